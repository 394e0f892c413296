"""From a recipe to a job: who starts from which weights, what is scored how, and what is checked before any worker."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from job_recipes import PLAN, job_recipe
from runs import descendants

from nereus.algorithms.progress import Scores
from nereus.data.prompts import Prompt
from nereus.data.reward_pool import load_reward
from nereus.data.tokenizers import byte_tokenizer
from nereus.errors import ConfigError, DataError, ModelError
from nereus.launch.job import Job, Scorer, prepare_job
from nereus.model import Head
from nereus.plan import Role
from nereus.recipe.config import parse_config


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return job_recipe(tmp_path)


def prepared(recipe: dict[str, Any]) -> Job:
    job = prepare_job(parse_config(recipe), lambda what, done, total: None)
    if job.reward is not None:
        job.reward.close()
    return job


def test_every_role_starts_from_the_weights_the_recipe_names(recipe: dict[str, Any], tmp_path: Path) -> None:
    roles = prepared(recipe).setup.roles
    assert {role: setup.folder.name for role, setup in roles.items()} == {
        Role.ACTOR: "actor", Role.REFERENCE: "actor", Role.CRITIC: "actor", Role.REWARD: "reward"
    }  # fmt: skip
    assert {role for role, setup in roles.items() if setup.spec.head is Head.SCORE} == {Role.CRITIC, Role.REWARD}
    assert {role for role, setup in roles.items() if setup.fresh_head} == {Role.CRITIC}
    assert {role for role, setup in roles.items() if setup.optimizer is not None} == {Role.ACTOR, Role.CRITIC}
    assert all(setup.dtype is torch.float64 and setup.max_tokens == 24 for setup in roles.values())
    assert all(setup.folder.is_absolute() for setup in roles.values()), "workers have another working directory"


def test_log_probabilities_are_of_the_distribution_that_was_sampled(recipe: dict[str, Any]) -> None:
    setup = prepared(recipe).setup
    assert setup.sampling.temperature == setup.roles[Role.ACTOR].temperature == 0.7
    assert setup.roles[Role.REFERENCE].temperature == 0.7
    assert setup.roles[Role.CRITIC].temperature == setup.roles[Role.REWARD].temperature == 1.0
    assert setup.sampling.top_k == 5 and setup.sampling.stop_ids == (byte_tokenizer().eos_id, 9)


def test_the_workflow_has_the_roles_the_recipe_uses_and_no_other(recipe: dict[str, Any]) -> None:
    recipe["algorithm"] = {"kl_coef": 0.0}
    del recipe["reward"]["model"]
    for name in ("reward-inference", "reference-inference"):
        del recipe["plan"][name]
    assert set(prepared(recipe).specs) == {Role.ACTOR, Role.CRITIC}


def test_optimizers_follow_their_sections(recipe: dict[str, Any]) -> None:
    roles = prepared(recipe).setup.roles
    actor, critic = roles[Role.ACTOR].optimizer, roles[Role.CRITIC].optimizer
    assert actor is not None and critic is not None
    assert (actor.learning_rate(0), critic.learning_rate(0)) == (1e-3, 1e-2)


def test_notes_say_what_was_read(recipe: dict[str, Any]) -> None:
    assert prepared(recipe).notes[0] == "6 training prompts, 6 held out; 0 removed as seen in training"


def test_a_refused_job_leaves_no_reward_process(recipe: dict[str, Any]) -> None:
    before = descendants(os.getpid())
    with pytest.raises(ModelError, match="nowhere"):
        prepared(recipe | {"critic": {"path": "nowhere"}})
    with pytest.raises(ConfigError, match="data.max_response_length"):
        prepared(recipe | {"data": {**recipe["data"], "max_response_length": 60}})
    assert descendants(os.getpid()) <= before


def test_the_scorer_decodes_responses_and_counts_failures(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 10 * int(solution_str) + int(ground_truth)}\n"
    )
    job = prepare_job(parse_config(recipe | {"reward": {"function": f"{path}:compute_score"}, "plan": _no_reward()}),
                      lambda what, done, total: None)  # fmt: skip
    assert job.reward is not None
    with job.reward:
        tokenizer = byte_tokenizer()
        responses = [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("4", "x", "12")]
        scores = job.setup.score(job.setup.prompts[:3], responses)
    assert scores == Scores(
        (41.0, 0.0, 121.0), num_failed=1, first_problem="ValueError: invalid literal for int() with base 10: 'x'"
    )


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("def compute_score(**sample): raise KeyError('no truth')", "KeyError: 'no truth'"),
        ("async def compute_score(**sample): return 1.0", "TypeError: the function is async"),
        ("def compute_score(**sample): pass", "TypeError: the function returned None"),
        ("def compute_score(prompt, answer): return 1.0", "unexpected keyword argument 'data_source'"),
    ],
)
def test_a_reward_function_that_never_worked_ends_the_run_with_its_first_traceback(
    tmp_path: Path, definition: str, reason: str
) -> None:
    path = tmp_path / "score.py"
    path.write_text(definition + "\n")
    prompt = Prompt(0, (5,), "1", "task", "1")
    with load_reward(f"{path}:compute_score", timeout=timedelta(seconds=5)) as reward:
        with pytest.raises(DataError, match="failed for all of 2 responses") as raised:
            Scorer(reward, byte_tokenizer())([prompt] * 2, [[5], [6]])
    assert reason in str(raised.value)
    if "KeyError" in reason:
        assert f'File "{path}", line 1, in compute_score' in str(raised.value)


def test_a_reward_function_that_has_worked_may_fail_for_a_whole_batch(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text("def compute_score(solution_str, **sample): return float(solution_str)\n")
    prompt, tokenizer = Prompt(0, (5,), "1", "task", "1"), byte_tokenizer()
    with load_reward(f"{path}:compute_score", timeout=timedelta(seconds=5)) as reward:
        scorer = Scorer(reward, tokenizer)
        assert scorer([prompt], [tokenizer.encode("3")]).values == (3.0,)
        assert scorer([prompt], [tokenizer.encode("x")]).num_failed == 1


def _no_reward() -> dict[str, str]:
    return {name: text for name, text in PLAN.items() if name != "reward-inference"}


def test_without_a_reward_function_responses_score_nothing() -> None:
    assert Scorer(None, byte_tokenizer())([], []).values == ()

"""The warm start: it teaches, it is made once, and a broken-off one is made again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import OutputKind, Sample
from nereus.checkpoint.hf import load_unit
from nereus.comm.groups import Group
from nereus.data.dataset import load_data
from nereus.engines.infer import score
from nereus.engines.pipeline import Pipeline
from nereus.engines.transformer import StageModel
from nereus.examples.chain_sum.answers import WarmStart, taught_answer
from nereus.examples.chain_sum.warm_start import WARMUP_STEPS, WarmModels, ensure_warm_start, warm_rate
from nereus.hf_config import read_model
from nereus.model import Head
from nereus.plan import Layout
from nereus.recipe.config import RunConfig, parse_config
from nereus.shards.state import RankState, StateKind, state_dtypes, zeros_on

TASK = {"reasoning_gym": "chain_sum", "size": 60, "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def config_of(cache: Path, **warm_start: Any) -> RunConfig:
    return parse_config(
        {
            "model": {
                "shape": {"hidden": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 40,
                          "max_positions": 96}
            },
            "data": {"train": {**TASK, "seed": 1}, "val": {**TASK, "seed": 900000}, "tokenizer": "trained",
                     "vocab_size": 300, "train_batch_size": 4, "max_prompt_length": 32, "max_response_length": 40},
            "actor": {"ppo_mini_batch_size": 2},
            "reward": {"function": "nereus.data.rewards:exact_answer"},
            "warm_start": {"steps": 6, "batch": 8, "cache": str(cache), **warm_start},
        }
    )  # fmt: skip


def made(config: RunConfig, said: list[str] | None = None) -> WarmModels:
    return ensure_warm_start(
        config,
        load_data(config, answer=taught_answer),
        lambda what, done, total: (said if said is not None else []).append(what),
    )


def weights(folder: Path) -> torch.Tensor:
    spec = read_model(folder)
    kinds = state_dtypes(torch.float32, trains=False)
    state = RankState.allocate(spec, Layout(), 0, dtypes=kinds, allocator=zeros_on(torch.device("cpu")))
    load_unit(folder, spec, state)
    return state.flats[StateKind.PARAM]


def test_it_is_made_once_and_says_so(tmp_path: Path) -> None:
    config, said = config_of(tmp_path / "cache"), []
    first = made(config, said)
    assert not first.cached and first.reward is None and said.count("warm start: teaching the task") == 6
    assert (first.actor / "tokenizer.json").is_file(), "an ordinary HF folder, tokenizer included"
    said.clear()
    second = made(config, said)
    assert second == WarmModels(first.actor, None, cached=True) and not said


def test_the_same_settings_give_the_same_weights(tmp_path: Path) -> None:
    first, second = made(config_of(tmp_path / "a")), made(config_of(tmp_path / "b"))
    assert torch.equal(weights(first.actor), weights(second.actor))


@pytest.mark.parametrize("change", [{"steps": 5}, {"lr": 1e-3}, {"batch": 4}, {"worked_share": 0.5}])
def test_another_setting_is_another_warm_start(tmp_path: Path, change: dict[str, Any]) -> None:
    assert made(config_of(tmp_path)).actor != made(config_of(tmp_path, **change)).actor


def test_a_reward_model_is_trained_beside_the_actor(tmp_path: Path) -> None:
    models = made(config_of(tmp_path, reward_steps=3))
    assert models.reward is not None
    assert read_model(models.reward).head is Head.SCORE
    assert bool(weights(models.reward).isfinite().all())


def test_one_that_was_broken_off_is_made_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward_steps=3)

    def interrupt(what: str, done: int, total: int) -> None:
        if "reward" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_warm_start(config, load_data(config, answer=taught_answer), interrupt)
    threads = torch.get_num_threads()
    models = made(config)
    assert not models.cached and models.reward is not None and models.reward.is_dir()
    assert torch.get_num_threads() == threads


def test_it_teaches(tmp_path: Path) -> None:
    """From a uniform guess over the vocabulary to clearly better on the task's own answers."""
    config = config_of(tmp_path, steps=150, batch=16)
    data = load_data(config, answer=taught_answer)
    examples = WarmStart(
        data.train, data.tokenizer, steps=150, batch=16, seed=7, worked_share=0.7, switch_at=0.8, late_worked_share=0.15
    ).examples(0)
    batch = RolloutBatch.from_samples(
        Sample(i, 0, e.prompt_tokens, e.response_tokens, finished=True) for i, e in enumerate(examples)
    )
    spec = read_model(folder := made(config).actor)
    kinds = state_dtypes(torch.float32, trains=False)
    state = RankState.allocate(spec, Layout(), 0, dtypes=kinds, allocator=zeros_on(torch.device("cpu")))
    load_unit(folder, spec, state)
    model = StageModel(state, tp=Group.single())
    logprobs = score(model, Pipeline(model, Group.single()), batch, OutputKind.LOGPROBS, micro_batch=16)
    assert logprobs is not None
    guess = -torch.tensor(float(spec.vocab)).log()
    print(f"mean log-probability {float(logprobs.mean()):.2f}, of a guess {float(guess):.2f}")
    assert float(logprobs.mean()) > float(guess) / 2


def test_the_rate_warms_up_holds_and_decays() -> None:
    rates = [warm_rate(update, peak=1.0, steps=600) for update in range(600)]
    assert rates[0] == pytest.approx(1 / WARMUP_STEPS) and max(rates) == 1.0
    assert rates[100] == 1.0 and rates[300] < 1.0 and rates[-1] == pytest.approx(0.05)
    assert rates[200:] == sorted(rates[200:], reverse=True)

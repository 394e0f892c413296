"""A step that fails anywhere goes on from what it has done, and comes to what an undisturbed one comes to."""

import dataclasses
import threading
from collections.abc import Sequence

import pytest
import torch

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.loop import Learned, Loop, Stages
from nereus.algorithms.ppo import PPO
from nereus.algorithms.progress import Scores, StepProgress, Update
from nereus.algorithms.types import OutputKind, Sample
from nereus.data.prompts import Prompt
from nereus.errors import UpdateAborted
from nereus.plan import ACTOR_TRAINING, CRITIC_TRAINING, MODEL_STAGES, ModelStage, Role
from nereus.recipe.sections import ActorConfig, AlgorithmConfig, CriticConfig
from nereus.workflow import step_workflow

WORKFLOW = step_workflow("ppo", Role)
ALGORITHM = PPO(
    algorithm=AlgorithmConfig(kl_coef=0.1, lam=0.9),
    actor=ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2),
    critic=CriticConfig(),
    n=2,
)
PROMPTS = tuple(Prompt(i, (1 + i, 2), f"{i}", "", "") for i in range(5))
STEP, FIRST_PLACE, SEED = 3, 10, 7
UPDATES_PER_ROLE = 6
"""5 prompts in 3 mini-batches of at most 2, two epochs."""


@dataclasses.dataclass
class CountedStages(Stages):
    """Model-stages, each on a device of its own, that compute sums. The call named by `fails` raises the first time.

    calls: every call that was answered, an update with its samples' log-probabilities.
    """

    fails: tuple[str, int] | None = None
    calls: list[tuple[str, tuple[float, ...]]] = dataclasses.field(default_factory=list)
    asked: dict[str, int] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def devices(self, model_stage: ModelStage) -> tuple[int, ...]:
        return (MODEL_STAGES.index(model_stage),)

    def _asked(self, name: str) -> None:
        with self.lock:
            self.asked[name] = self.asked.get(name, 0) + 1
            if (name, self.asked[name]) == self.fails:
                raise UpdateAborted(f"{name} failed once")

    def _answered(self, name: str, seen: Sequence[float] = ()) -> None:
        with self.lock:
            self.calls.append((name, tuple(seen)))

    def generate(self, prompts: Sequence[Prompt], *, first_place: int, validation: bool) -> list[Sample]:
        self._asked("generate")
        self._answered("generate")
        return [
            Sample(first_place + i, g, p.tokens, tuple(range(1, 3 + (i + g) % 4)), g == 0, policy_version=5 + g)
            for i, p in reversed(list(enumerate(prompts)))
            for g in range(2)
        ]

    def output(self, model_stage: ModelStage, batch: RolloutBatch, kind: OutputKind) -> torch.Tensor:
        self._asked(str(model_stage))
        self._answered(str(model_stage))
        shift = MODEL_STAGES.index(model_stage) / 10
        if kind is OutputKind.SCORES:
            return batch.response_lengths.to(torch.float64) + shift
        return -shift - torch.arange(batch.num_response_tokens, dtype=torch.float64) / 50

    def update(self, model_stage: ModelStage, batch: RolloutBatch, objective: Objective) -> Update:
        self._asked(f"update {model_stage}")
        seen = [*batch.column("advantages").tolist(), *batch.column("old_logprobs").tolist()]
        self._answered(f"update {model_stage}", seen)
        return Update(sum(seen), 1e-3 * len(seen), applied=True, metrics={f"{model_stage.role}/loss": seen[0]})


@dataclasses.dataclass
class Reward:
    """Scores a response by its length; raises the first time where `fails`."""

    fails: bool = False
    num_calls: int = 0

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> Scores:
        self.num_calls += 1
        if self.fails and self.num_calls == 1:
            raise RuntimeError("the reward failed once")
        values = (len(r) + p.index for p, r in zip(prompts, responses, strict=True))
        return Scores(tuple(float(value) for value in values), num_failed=1, first_problem="KeyError: 'x'")


class Keeper:
    """Keeps the newest progress of a step."""

    def __init__(self) -> None:
        self.progress = StepProgress(STEP, PROMPTS, FIRST_PLACE)

    def __call__(self, progress: StepProgress) -> None:
        self.progress = progress


def run(stages: Stages, keeper: Keeper, reward: Reward | None = None) -> Learned:
    return Loop(WORKFLOW, ALGORITHM, stages, reward or Reward(), seed=SEED).run(keeper.progress, keeper)


def measured(learned: Learned) -> dict[str, float]:
    return {name: value for name, value in learned.metrics.items() if not name.startswith("timing_s/")}


POINTS = [
    ("generate", 1),
    *((str(task.model_stage), 1) for task in WORKFLOW.tasks[1:] if task.name not in ("actor_update", "critic_update")),
    *((f"update {m}", k + 1) for m in (ACTOR_TRAINING, CRITIC_TRAINING) for k in range(UPDATES_PER_ROLE)),
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[0]} {point[1]}")
def test_a_step_that_failed_goes_on_where_it_stopped_and_comes_to_the_same(point: tuple[str, int]) -> None:
    undisturbed, plain = CountedStages(), Keeper()
    wanted = run(undisturbed, plain)
    stages, keeper = CountedStages(fails=point), Keeper()
    with pytest.raises(UpdateAborted, match="failed once"):
        run(stages, keeper)
    assert stages.asked[point[0]] == point[1]
    learned = run(stages, keeper)
    assert measured(learned) == measured(wanted)
    assert sorted(stages.calls) == sorted(undisturbed.calls), "each call is answered once, with the same samples"
    assert keeper.progress.updates == plain.progress.updates
    assert learned.lengths == wanted.lengths and learned.task_s.keys() == wanted.task_s.keys()


def test_a_step_whose_reward_failed_scores_again_and_generates_nothing_again() -> None:
    undisturbed = CountedStages()
    wanted = run(undisturbed, Keeper())
    stages, keeper, reward = CountedStages(), Keeper(), Reward(fails=True)
    with pytest.raises(RuntimeError, match="the reward failed once"):
        run(stages, keeper, reward)
    assert measured(run(stages, keeper, reward)) == measured(wanted)
    assert reward.num_calls == 2 and sorted(stages.calls) == sorted(undisturbed.calls)


def test_a_step_that_has_ended_is_told_again_without_a_call() -> None:
    stages, keeper, reward = CountedStages(), Keeper(), Reward()
    learned = run(stages, keeper, reward)
    num_calls = len(stages.calls)
    assert run(stages, keeper, reward) == learned
    assert (len(stages.calls), reward.num_calls) == (num_calls, 1)


def test_a_step_reports_its_updates_its_oldest_policy_and_why_rewards_failed() -> None:
    stages, keeper = CountedStages(), Keeper()
    learned = run(stages, keeper)
    assert {role: len(done) for role, done in keeper.progress.updates.items()} == {
        ACTOR_TRAINING.role: UPDATES_PER_ROLE, CRITIC_TRAINING.role: UPDATES_PER_ROLE,
    }  # fmt: skip
    assert learned.metrics["perf/policy_version"] == 5
    assert learned.metrics["train/reward/mean"] == pytest.approx(5.3)
    assert learned.metrics["reward/num_failed"] == 1 and learned.reward_problem == "KeyError: 'x'"
    assert learned.task_s.keys() == {task.model_stage for task in WORKFLOW.tasks}
    assert {"timing_s/reward", "timing_s/adv"} <= learned.metrics.keys()

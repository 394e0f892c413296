"""One RL step over model-stages, whatever the algorithm and the plan.

    generate -> score by function, and in parallel the inference tasks -> prepare -> updates -> synchronize

The step is the workflow: `Stages` runs its tasks, those on disjoint devices at the same time. The rollout batch lives
here, on the driver; workers get pieces of it and return columns, so an update that failed can be done again. Nothing
here knows units, ranks or processes.
"""

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from nereus.algorithms.base import Algorithm, Objective, Prepared
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.metrics import length_metrics, length_summary
from nereus.algorithms.types import OutputKind, Sample
from nereus.data.prompts import Prompt
from nereus.plan import ModelStage, Role
from nereus.planner.workload import LengthSummary
from nereus.workflow import Kind, Task, Workflow

Score = Callable[[Sequence[Prompt], Sequence[Sequence[int]]], "Scores"]
"""(prompt of each sample, response token ids of each sample) -> their scores."""

COLUMNS = {
    ("old_logprobs", Kind.LOGPROBS): "old_logprobs",
    ("reference", Kind.LOGPROBS): "reference_logprobs",
    ("values", Kind.VALUES): "values",
    ("reward", Kind.SCORES): "scores",
}
"""Which column of the batch the output of an inference task becomes."""

OUTPUTS = {Kind.LOGPROBS: OutputKind.LOGPROBS, Kind.VALUES: OutputKind.VALUES, Kind.SCORES: OutputKind.SCORES}


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Scores of samples in their order, and how many reward calls failed (scored 0) or were late.

    first_problem: what came of the first call that failed or was late, in a line.
    """

    values: tuple[float, ...]
    num_failed: int = 0
    num_late: int = 0
    first_problem: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """One committed optimizer update: the global gradient norm, the learning rate, metrics summed over the units."""

    grad_norm: float
    learning_rate: float
    applied: bool
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """What a step came to: metrics under verl's names, the lengths of its batch, seconds by model-stage.

    reward_problem: what came of the first reward call that failed or was late, where one was.
    """

    metrics: Mapping[str, float]
    lengths: LengthSummary
    task_s: Mapping[ModelStage, float]
    reward_problem: str | None = None


class Stages(abc.ABC):
    """What a step asks of the running model-stages. Calls for different model-stages may come from several threads."""

    @abc.abstractmethod
    def run(self, tasks: Sequence[Task], execute: Callable[[Task], None]) -> dict[ModelStage, float]:
        """Execute tasks when their predecessors have ended and their devices are free; seconds by model-stage."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Prompt], *, first_place: int, validation: bool) -> list[Sample]:
        """Responses for each prompt; `first_place` is the global place of the first."""

    @abc.abstractmethod
    def output(self, model_stage: ModelStage, batch: RolloutBatch, kind: OutputKind) -> torch.Tensor:
        """Forward only: [T] log-probabilities or values, or [N] scores, in the batch's order."""

    @abc.abstractmethod
    def update(self, model_stage: ModelStage, batch: RolloutBatch, objective: Objective) -> Update:
        """One committed update from a mini-batch; raises UpdateAborted, nothing changed."""


@dataclasses.dataclass(slots=True)
class _Step:
    """What a step has found out so far."""

    prompts: Sequence[Prompt]
    first_place: int
    batch: RolloutBatch | None = None
    scoring: "Future[tuple[Scores, float]] | None" = None
    scores: Scores | None = None
    prepared: Prepared | None = None
    updates: dict[Role, list[Update]] = dataclasses.field(default_factory=dict)
    driver_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Loop:
    """Runs steps of one algorithm. Holds no state between steps: prompts and places come from the caller."""

    def __init__(self, workflow: Workflow, algorithm: Algorithm, stages: Stages, score: Score, *, seed: int):
        self._workflow, self._algorithm, self._stages = workflow, algorithm, stages
        self._score, self._seed = score, seed
        self._lock = threading.Lock()

    def run(self, step: int, prompts: Sequence[Prompt], *, first_place: int) -> Learned:
        """Run step `step` (from 1)."""
        state = _Step(prompts, first_place)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as scorer:

            def execute(task: Task) -> None:
                if task.kind is Kind.GENERATE:
                    self._generate(state, scorer)
                elif task.kind is Kind.UPDATE:
                    self._update(task, state, step)
                else:
                    self._infer(task, state)

            task_s = self._stages.run(self._workflow.tasks, execute)
        assert state.batch is not None and state.scores is not None
        lengths = length_summary(state.batch)
        return Learned(self._metrics(state, lengths), lengths, task_s, state.scores.first_problem)

    def evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Mean reward and response length over held-out prompts, one response each."""
        samples = sorted(
            self._stages.generate(prompts, first_place=0, validation=True), key=lambda sample: sample.place
        )
        scores = self._score(prompts, [sample.response_tokens for sample in samples])
        lengths = [len(sample.response_tokens) for sample in samples]
        return {
            "val/reward/mean": sum(scores.values) / len(samples),
            "val/response_length/mean": sum(lengths) / len(samples),
            "val/num_samples": float(len(samples)),
        }

    def _generate(self, state: _Step, scorer: ThreadPoolExecutor) -> None:
        """The batch; its scores are computed while the inference tasks run."""
        samples = sorted(
            self._stages.generate(state.prompts, first_place=state.first_place, validation=False),
            key=lambda sample: sample.place,
        )
        state.batch = RolloutBatch.from_samples(samples)
        prompts = [state.prompts[sample.prompt_index - state.first_place] for sample in samples]
        state.scoring = scorer.submit(self._timed_scores, prompts, [sample.response_tokens for sample in samples])

    def _timed_scores(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> tuple[Scores, float]:
        started = time.perf_counter()
        return self._score(prompts, responses), time.perf_counter() - started

    def _infer(self, task: Task, state: _Step) -> None:
        assert state.batch is not None
        column = self._stages.output(task.model_stage, state.batch, OUTPUTS[task.kind])
        with self._lock:
            state.batch = state.batch.with_columns(**{COLUMNS[task.name, task.kind]: column})

    def _prepare(self, state: _Step) -> Prepared:
        """Rewards, advantages and returns, computed by whichever update comes first."""
        with self._lock:
            if state.prepared is None:
                assert state.batch is not None and state.scoring is not None
                state.scores, state.driver_s["timing_s/reward"] = state.scoring.result()
                started = time.perf_counter()
                batch = state.batch
                if batch.scores is None:
                    dtype = batch.column("old_logprobs").dtype
                    batch = batch.with_columns(scores=torch.tensor(state.scores.values, dtype=dtype))
                state.prepared = self._algorithm.prepare(batch)
                state.driver_s["timing_s/adv"] = time.perf_counter() - started
            return state.prepared

    def _update(self, task: Task, state: _Step, step: int) -> None:
        role = task.model_stage.role
        prepared = self._prepare(state)
        if not self._algorithm.trains(role, step=step):
            return
        done = state.updates.setdefault(role, [])
        for mini in self._algorithm.mini_batches(prepared.batch, seed=self._seed, step=step):
            batch = prepared.batch.select(mini.samples)
            done.append(self._stages.update(task.model_stage, batch, self._algorithm.objective(role, batch.counts)))

    def _metrics(self, state: _Step, lengths: LengthSummary) -> dict[str, float]:
        assert state.scores is not None and state.prepared is not None
        metrics = dict(state.prepared.metrics)
        metrics |= {
            "train/reward/mean": sum(state.scores.values) / len(state.scores.values),
            "reward/num_failed": float(state.scores.num_failed),
            "reward/num_late": float(state.scores.num_late),
            **length_metrics(lengths),
        }
        for role, updates in state.updates.items():
            metrics |= _update_metrics(role, updates)
        return metrics | state.driver_s


def _update_metrics(role: Role, updates: Sequence[Update]) -> dict[str, float]:
    """Means over a step's updates."""
    names = updates[0].metrics if updates else ()
    metrics = {name: sum(u.metrics[name] for u in updates) / len(updates) for name in names}
    if updates:
        metrics[f"{role}/grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
        metrics[f"{role}/lr"] = updates[-1].learning_rate
        metrics[f"{role}/updates_skipped"] = float(sum(not u.applied for u in updates))
    return metrics

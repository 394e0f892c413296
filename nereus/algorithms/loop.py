"""One RL step over model-stages, whatever the algorithm and the plan.

    generate -> score by function, and in parallel the inference tasks -> prepare -> updates -> synchronize

The step is the workflow: its tasks run at the same time where their devices are disjoint. What it has done is a
`StepProgress` that its caller keeps, on the driver; workers get pieces of the batch and return columns. So a step that
failed goes on at the task, or the mini-batch, at which it failed. Nothing here knows units, ranks or processes.
"""

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Concatenate, ParamSpec

import torch

from nereus.algorithms.base import Algorithm, Objective, Prepared
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.metrics import length_metrics, length_summary
from nereus.algorithms.progress import Scores, StepProgress, Update
from nereus.algorithms.run_tasks import run_tasks
from nereus.algorithms.types import OutputKind, Sample
from nereus.data.prompts import Prompt
from nereus.plan import ModelStage, Role
from nereus.planner.workload import LengthSummary
from nereus.workflow import Kind, Task, Workflow

P = ParamSpec("P")

Score = Callable[[Sequence[Prompt], Sequence[Sequence[int]]], Scores]
"""(prompt of each sample, response token ids of each sample) -> their scores."""

Keep = Callable[[StepProgress], None]
"""Told of every newer progress of a step, one call at a time, from any thread."""

COLUMNS = {
    ("old_logprobs", Kind.LOGPROBS): "old_logprobs",
    ("reference", Kind.LOGPROBS): "reference_logprobs",
    ("values", Kind.VALUES): "values",
    ("reward", Kind.SCORES): "scores",
}
"""Which column of the batch the output of an inference task becomes."""

OUTPUTS = {Kind.LOGPROBS: OutputKind.LOGPROBS, Kind.VALUES: OutputKind.VALUES, Kind.SCORES: OutputKind.SCORES}


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
    """What a step asks of the running model-stages. Calls for different model-stages may come from several threads.

    A call that raises has changed nothing that a step can see: the same call may be made again.
    """

    @abc.abstractmethod
    def devices(self, model_stage: ModelStage) -> Collection[int]:
        """What tasks of a model-stage run on; two tasks that share a device never run at once."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Prompt], *, first_place: int, validation: bool) -> list[Sample]:
        """Responses for each prompt; `first_place` is the global place of the first."""

    @abc.abstractmethod
    def output(self, model_stage: ModelStage, batch: RolloutBatch, kind: OutputKind) -> torch.Tensor:
        """Forward only: [T] log-probabilities or values, or [N] scores, in the batch's order."""

    @abc.abstractmethod
    def update(self, model_stage: ModelStage, batch: RolloutBatch, objective: Objective) -> Update:
        """One committed update from a mini-batch; raises UpdateAborted, nothing changed."""


class Loop:
    """Runs steps of one algorithm. Holds no state between steps: what a step has done is its caller's to keep."""

    def __init__(self, workflow: Workflow, algorithm: Algorithm, stages: Stages, score: Score, *, seed: int):
        self._workflow, self._algorithm, self._stages = workflow, algorithm, stages
        self._score, self._seed = score, seed

    def run(self, progress: StepProgress, keep: Keep) -> Learned:
        """Do what is left of a step and say what it came to.

        Where this raises, `run` of the last progress that `keep` was told goes on from there: tasks that ended and
        updates that were committed are not done again.
        """
        under_way = _StepRun(self._algorithm, self._stages, self._score, self._seed, progress, keep)
        return _learned(under_way.run(self._workflow.tasks))

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


class _StepRun:
    """One try of a step.

    threads of run_tasks --execute--> stages;  thread of the scorer --> reward function
                      every result --> a newer progress --> keep
    """

    def __init__(
        self, algorithm: Algorithm, stages: Stages, score: Score, seed: int, progress: StepProgress, keep: Keep
    ) -> None:
        self._algorithm, self._stages, self._score, self._seed = algorithm, stages, score, seed
        self._keep = keep
        self._changing, self._preparing = threading.Lock(), threading.Lock()
        self._scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._scoring: Future[None] | None = None
        self.progress = progress

    def run(self, tasks: Sequence[Task]) -> StepProgress:
        """Do what is left of the tasks."""
        with self._scorer:
            if self.progress.batch is not None and self.progress.scores is None:
                self._scoring = self._scorer.submit(self._score_batch, self.progress.batch)
            run_tasks(tasks, self._stages.devices, self._execute, ended=self.progress.ended)
        return self.progress

    def _note(
        self, change: Callable[Concatenate[StepProgress, P], StepProgress], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the progress and tell who keeps it."""
        with self._changing:
            self.progress = change(self.progress, *args, **kwargs)
            self._keep(self.progress)

    def _execute(self, task: Task) -> None:
        started = time.perf_counter()
        try:
            if task.kind is Kind.GENERATE:
                self._generate()
            elif task.kind is Kind.UPDATE:
                self._update(task.model_stage)
            else:
                self._infer(task)
            self._note(StepProgress.with_ended, task)
        finally:
            self._note(StepProgress.with_seconds, task.model_stage, time.perf_counter() - started)

    def _generate(self) -> None:
        """The batch; its scores are computed while the inference tasks run."""
        begun = self.progress
        samples = self._stages.generate(begun.prompts, first_place=begun.first_place, validation=False)
        batch = RolloutBatch.from_samples(samples)
        self._scoring = self._scorer.submit(self._score_batch, batch)
        self._note(StepProgress.with_batch, batch)

    def _score_batch(self, batch: RolloutBatch) -> None:
        """Score the responses of the batch with the reward function."""
        begun = self.progress
        prompts = [begun.prompts[place - begun.first_place] for place in batch.prompt_index.tolist()]
        started = time.perf_counter()
        scores = self._score(prompts, [batch.response(sample) for sample in range(batch.num_samples)])
        self._note(StepProgress.with_scores, scores, time.perf_counter() - started)

    def _infer(self, task: Task) -> None:
        assert self.progress.batch is not None
        column = self._stages.output(task.model_stage, self.progress.batch, OUTPUTS[task.kind])
        self._note(StepProgress.with_column, COLUMNS[task.name, task.kind], column)

    def _prepared(self) -> Prepared:
        """Rewards, advantages and returns, computed by whichever update comes first."""
        with self._preparing:
            if self.progress.prepared is None:
                if self._scoring is not None:
                    self._scoring.result()
                batch, scores = self.progress.batch, self.progress.scores
                assert batch is not None and scores is not None
                started = time.perf_counter()
                if batch.scores is None:
                    dtype = batch.column("old_logprobs").dtype
                    batch = batch.with_columns(scores=torch.tensor(scores.values, dtype=dtype))
                prepared = self._algorithm.prepare(batch)
                self._note(StepProgress.with_prepared, prepared, time.perf_counter() - started)
            assert self.progress.prepared is not None
            return self.progress.prepared

    def _update(self, model_stage: ModelStage) -> None:
        """The role's updates that are not committed yet."""
        role, step, batch = model_stage.role, self.progress.step, self._prepared().batch
        if not self._algorithm.trains(role, step=step):
            return
        minis = self._algorithm.mini_batches(batch, seed=self._seed, step=step)
        for mini in minis[len(self.progress.updates.get(role, ())) :]:
            piece = batch.select(mini.samples)
            update = self._stages.update(model_stage, piece, self._algorithm.objective(role, piece.counts))
            self._note(StepProgress.with_update, role, update)


def _learned(progress: StepProgress) -> Learned:
    """What a step came to whose tasks have all ended."""
    batch, scores, prepared = progress.batch, progress.scores, progress.prepared
    assert batch is not None and scores is not None and prepared is not None
    lengths = length_summary(batch)
    metrics = {
        **prepared.metrics,
        **length_metrics(batch, lengths),
        "train/reward/mean": sum(scores.values) / len(scores.values),
        "reward/num_failed": float(scores.num_failed),
        "reward/num_late": float(scores.num_late),
        "perf/policy_version": float(batch.policy_version.min()),
    }
    for role, updates in progress.updates.items():
        metrics |= _update_metrics(role, updates)
    return Learned({**metrics, **progress.driver_s}, lengths, progress.task_s, scores.first_problem)


def _update_metrics(role: Role, updates: Sequence[Update]) -> dict[str, float]:
    """Means over a step's updates."""
    metrics = {name: sum(u.metrics[name] for u in updates) / len(updates) for name in updates[0].metrics}
    metrics[f"{role}/grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
    metrics[f"{role}/lr"] = updates[-1].learning_rate
    metrics[f"{role}/updates_skipped"] = float(sum(not u.applied for u in updates))
    return metrics

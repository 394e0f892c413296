"""What one RL step has come to so far, as a value: whoever holds it can have the step gone on with from there."""

import dataclasses
from collections.abc import Mapping
from typing import Self

import torch

from nereus.algorithms.base import Prepared
from nereus.algorithms.buffer import RolloutBatch
from nereus.data.prompts import Prompt
from nereus.plan import ModelStage, Role
from nereus.workflow import Task

__all__ = ["Scores", "StepProgress", "Update"]


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
class StepProgress:
    """Step `step` (from 1) over `prompts`, whose first has the global place `first_place`, and what it has done.

    ended: names of the tasks that ended; batch: with a column for each inference task that did; prepared: what updates
    run on; updates: by role, those committed, in the order of the algorithm's mini-batches. task_s: seconds spent in
    tasks of each model-stage; driver_s: by metric, seconds of the driver. Nothing in it depends on the plan.
    """

    step: int
    prompts: tuple[Prompt, ...]
    first_place: int
    ended: frozenset[str] = frozenset()
    batch: RolloutBatch | None = None
    scores: Scores | None = None
    prepared: Prepared | None = None
    updates: Mapping[Role, tuple[Update, ...]] = dataclasses.field(default_factory=dict)
    task_s: Mapping[ModelStage, float] = dataclasses.field(default_factory=dict)
    driver_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def with_ended(self, task: Task) -> Self:
        return dataclasses.replace(self, ended=self.ended | {task.name})

    def with_seconds(self, model_stage: ModelStage, seconds: float) -> Self:
        """With more time spent in tasks of a model-stage, whether they ended or failed."""
        before = self.task_s.get(model_stage, 0.0)
        return dataclasses.replace(self, task_s={**self.task_s, model_stage: before + seconds})

    def with_batch(self, batch: RolloutBatch) -> Self:
        return dataclasses.replace(self, batch=batch)

    def with_column(self, name: str, column: torch.Tensor) -> Self:
        """With what an inference task computed for the batch."""
        assert self.batch is not None
        return dataclasses.replace(self, batch=self.batch.with_columns(**{name: column}))

    def with_scores(self, scores: Scores, seconds: float) -> Self:
        return dataclasses.replace(self, scores=scores, driver_s={**self.driver_s, "timing_s/reward": seconds})

    def with_prepared(self, prepared: Prepared, seconds: float) -> Self:
        return dataclasses.replace(self, prepared=prepared, driver_s={**self.driver_s, "timing_s/adv": seconds})

    def with_update(self, role: Role, update: Update) -> Self:
        """With one more committed update of a role."""
        return dataclasses.replace(self, updates={**self.updates, role: (*self.updates.get(role, ()), update)})

"""The seams of the algorithms: what the loop asks of an algorithm, what an engine asks of an objective.

    samples -> batch -> prepare (driver) -> mini-batches (driver) -> shares -> micro-batches -> objective (worker)

Neither knows of plans: everything an objective divides by is a count of the whole mini-batch.
"""

import abc
import dataclasses
from typing import Self

import torch

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import GlobalCounts, OutputKind, Outputs, Sampling
from nereus.plan import Role
from nereus.recipe.config import RunConfig

__all__ = ["Algorithm", "MiniBatch", "Objective", "Prepared"]


class Objective(abc.ABC):
    """A loss of one optimizer update. Implementations are frozen dataclasses: they are sent to workers.

    Called once for each micro-batch, on the rank that holds the outputs. The loss is a sum over the micro-batch divided
    by the global counts of the update, so losses, gradients and metrics of all micro-batches of all units add up to
    those of the update, whatever the split.
    """

    @property
    @abc.abstractmethod
    def output(self) -> OutputKind:
        """What the model must compute."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of each token's distribution is wanted as well; with a gradient if it is."""
        return False

    @abc.abstractmethod
    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's part of the loss (a scalar with a gradient) and of each metric (scalars without).

        `micro` is on the device of `outputs`. Names and number of the metrics do not depend on the data, an empty
        micro-batch included, so that ranks can add them up as one vector.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimizer update, as places in the batch's global order."""

    epoch: int
    index: int
    samples: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that the updates can run on, and the step's metrics under verl's names."""

    batch: RolloutBatch
    metrics: dict[str, float]


class Algorithm(abc.ABC):
    """What distinguishes one algorithm from another in the shared loop. All methods are pure and run on the driver.

    Implementations are frozen dataclasses over the sections of a recipe that are their settings. Which roles one uses
    follows from the recipe as well: `RunConfig.roles`.
    """

    @classmethod
    @abc.abstractmethod
    def of(cls, config: RunConfig) -> Self:
        """The algorithm of a recipe."""

    @property
    @abc.abstractmethod
    def sampling(self) -> Sampling:
        """What to generate for each prompt."""

    @abc.abstractmethod
    def prepare(self, batch: RolloutBatch) -> Prepared:
        """From scores, old log-probabilities and what its roles computed to rewards, advantages and returns."""

    @abc.abstractmethod
    def mini_batches(self, batch: RolloutBatch, *, seed: int, step: int) -> tuple[MiniBatch, ...]:
        """The step's optimizer updates in order: a function of its arguments, so work can resume at any of them."""

    @abc.abstractmethod
    def trains(self, role: Role, *, step: int) -> bool:
        """Whether the role is updated in this step; steps count from 1."""

    @abc.abstractmethod
    def objective(self, role: Role, counts: GlobalCounts) -> Objective:
        """The loss of one update of a role; `counts` are those of the mini-batch."""

"""What deciding asks of planning: the seam between the decider and whatever knows what plans cost."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

from nereus.cluster import Cluster
from nereus.plan import Plan
from nereus.planner.workload import LengthSummary
from nereus.runtime.seam import StepReport
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step. memory_share: peak of the fullest device over what a plan may use of it."""

    step_s: float
    memory_share: float


class Outlook(abc.ABC):
    """What a decision asks of planning. Answers depend on what was learned and asked before, and on nothing else."""

    @property
    @abc.abstractmethod
    def cluster(self) -> Cluster:
        """The devices as they are known here; changes only inside `recluster`."""

    @abc.abstractmethod
    def predict(self, plan: Plan, lengths: LengthSummary, *, frozen: bool = False) -> Prediction:
        """Seconds and memory of a plan; frozen: with what was known at the last `freeze`."""

    @abc.abstractmethod
    def plans(self, current: Plan | None, lengths: LengthSummary, devices: Sequence[int]) -> list[Plan]:
        """The fastest plan on these devices, then slightly slower ones that are nearer to `current`; empty: none fits.

        Called at replans, and when devices of the plan in force are first announced to leave.
        """

    @abc.abstractmethod
    def assess(self, current: Plan, target: Plan) -> Transition | Infeasible:
        """The transition between two plans with what it is predicted to take, uncorrected; or why there is none."""

    @abc.abstractmethod
    def learn(self, plan: Plan, report: StepReport) -> None:
        """A step of `plan` was measured."""

    @abc.abstractmethod
    def occupy(self, engine_bytes: Mapping[int, int]) -> None:
        """Every step tells what engines hold beside the state when it has ended, in bytes by device."""

    @abc.abstractmethod
    def recluster(self, cluster: Cluster) -> None:
        """The same device ids now stand for these devices: nodes have joined or gone."""

    @abc.abstractmethod
    def freeze(self) -> None:
        """Keep what is known now as the reference of `predict(frozen=True)`."""

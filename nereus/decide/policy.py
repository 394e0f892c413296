"""The seam between the decider, which keeps account of a run, and the rule by which a run adapts.

    Decider --at a replan--------> plans, horizon_steps, end, judge, looks_again
            --at any boundary----> step_factor, transition_s

Urgent moves are no matter of policy: where the plan in force cannot stay, the fastest offer that can be reached is it.
"""

import abc
import dataclasses
from collections.abc import Sequence

from nereus.decide.admission import Admit, Assess, Decline, Offer, TransitionCorrection
from nereus.decide.measured import Measured
from nereus.decide.seam import Outlook
from nereus.decide.triggers import Trigger
from nereus.plan import Plan
from nereus.planner.workload import LengthSummary
from nereus.supply.supply import Announcement


@dataclasses.dataclass(frozen=True, slots=True)
class Dials:
    """What a recipe turns. gamma: share of the horizon within which a move must pay itself back."""

    gamma: float = 0.5
    length_threshold: float = 0.30
    efficiency_threshold: float = 0.15


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What is known at a replan.

    current: the plan in force, None in a pause; urgent: it cannot stay. devices: that may be used; staying: those of
    them whose loss is not announced. lengths: of the last steps.
    """

    current: Plan | None
    urgent: bool
    devices: tuple[int, ...]
    staying: tuple[int, ...]
    lengths: LengthSummary
    measured: Measured
    outlook: Outlook

    def found_on(self, devices: Sequence[int]) -> list[Plan]:
        """What a search on these devices offers besides the plan in force."""
        return [plan for plan in self.outlook.plans(self.current, self.lengths, devices) if plan != self.current]

    def known_plans(self) -> list[Plan]:
        """Other plans the run has been on that devices and lengths admit."""
        devices = set(self.devices)
        known = [plan for plan in self.measured.by_plan if plan != self.current and set(plan.devices) <= devices]
        return [plan for plan in known if self.outlook.predict(plan, self.lengths).memory_share <= 1]


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """The plan in force where it could stay. step_s: its predicted step; horizon_steps: H, for how long things hold."""

    plan: Plan
    step_s: float
    horizon_steps: float


class Policy(abc.ABC):
    """When a run considers another plan, which ones, and on what terms it moves. Holds settings only: the same question
    has the same answer."""

    @abc.abstractmethod
    def triggers(self) -> tuple[Trigger, ...]:
        """What sets off a replan, as it stands before the first step. Asked once; the order is that of reports."""

    @abc.abstractmethod
    def plans(self, situation: Situation) -> list[Plan]:
        """What is offered at a replan, each plan once. Offers that do not fit in memory are dropped after it."""

    @abc.abstractmethod
    def horizon_steps(self, known: float, *, waited: int) -> float:
        """H: for how many steps the plan moved to is expected to stay right.

        known: the mean steps between crossings of the signals that fired; waited: steps since that replan.
        """

    @abc.abstractmethod
    def end(self, plan: Plan, leaving: Sequence[Announcement]) -> Announcement | None:
        """The announced loss that ends an offered plan's horizon, of those that are announced."""

    @abc.abstractmethod
    def judge(self, offers: Sequence[Offer], standing: Standing, assess: Assess) -> Admit | Decline:
        """The verdict on offers, fastest first, where the plan in force could stay."""

    @abc.abstractmethod
    def looks_again(self, faster: Sequence[Plan]) -> Sequence[Plan]:
        """Which of the declined plans, fastest first, are judged again at every boundary until the next replan."""

    @abc.abstractmethod
    def bias(self, plan: Plan | None, measured: Measured, outlook: Outlook) -> float | None:
        """Measured over predicted seconds of the plan in force; None where predictions are believed as they are.

        Asked at the beginning of every boundary; the answer holds until the next.
        """

    @abc.abstractmethod
    def step_factor(self, plan: Plan, bias: float | None, measured: Measured, outlook: Outlook) -> float:
        """By what the predicted step of `plan` is multiplied."""

    @abc.abstractmethod
    def transition_s(self, predicted_s: float, correction: TransitionCorrection) -> float:
        """What a transition is expected to take. correction: of what earlier ones took."""

"""Replanning by the clock: every k steps the fastest plan is moved to, whatever moving takes.

What a rule that asks for no payback costs is measured with it; a change of the devices, or memory that is predicted not
to suffice, it answers at once, as every policy must.
"""

import dataclasses
from collections.abc import Sequence

from nereus.decide.admission import Admit, Assess, Decline, Numbers, Offer, TransitionCorrection
from nereus.decide.measured import Measured
from nereus.decide.policy import Policy, Situation, Standing
from nereus.decide.seam import Outlook
from nereus.decide.triggers import Fired, MemoryTrigger, Moment, Replanned, StepEnded, SupplyTrigger, Trigger
from nereus.plan import Plan
from nereus.supply.supply import Announcement
from nereus.transition.operations import Infeasible

__all__ = ["EveryK", "IntervalTrigger"]


@dataclasses.dataclass(frozen=True, slots=True)
class IntervalTrigger(Trigger):
    """Fires when `every` steps have ended since the last replan, whatever started that one."""

    every: int
    num_steps: int = 0

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        match moment:
            case StepEnded():
                after = IntervalTrigger(self.every, self.num_steps + 1)
                text = f"{after.num_steps} steps since the last replan"
                fires = after.num_steps >= self.every
                return after, Fired("interval", after.num_steps, 0.0, self.every, text) if fires else None
            case Replanned():
                return IntervalTrigger(self.every), None
            case _:
                return self, None


@dataclasses.dataclass(frozen=True, slots=True)
class EveryK(Policy):
    """Every `every` steps the fastest plan that can be reached."""

    every: int

    def triggers(self) -> tuple[Trigger, ...]:
        return IntervalTrigger(self.every), SupplyTrigger(), MemoryTrigger()

    def plans(self, situation: Situation) -> list[Plan]:
        return situation.found_on(situation.devices)

    def horizon_steps(self, known: float, *, waited: int) -> float:
        return float(self.every)

    def end(self, plan: Plan, leaving: Sequence[Announcement]) -> Announcement | None:
        return None

    def judge(self, offers: Sequence[Offer], standing: Standing, assess: Assess) -> Admit | Decline:
        """The first offer that is faster and can be reached; its payback is not asked, as of an urgent move."""
        refused: list[tuple[Plan, str]] = []
        for offer in offers:
            if offer.step_s >= standing.step_s:
                break
            found = assess(offer.plan)
            if isinstance(found, Infeasible):
                refused.append((offer.plan, found.reason))
                continue
            numbers = Numbers(standing.step_s, offer.step_s, found.transition_s, 0.0, 0.0)
            saves = f"{numbers.saving_s:.3g} s of {numbers.current_s:.3g} s a step"
            text = f"Moving saves {saves}; what it takes is not asked."
            return Admit(offer.plan, text, numbers, transition=found.transition)
        if refused:
            return Decline(refused[0][0], f"No faster plan can be reached: {refused[0][1]}.", None)
        return Decline(None, "The plan in force is the fastest that fits.", None)

    def looks_again(self, faster: Sequence[Plan]) -> Sequence[Plan]:
        return ()

    def bias(self, plan: Plan | None, measured: Measured, outlook: Outlook) -> float | None:
        return None

    def step_factor(self, plan: Plan, bias: float | None, measured: Measured, outlook: Outlook) -> float:
        return 1.0

    def transition_s(self, predicted_s: float, correction: TransitionCorrection) -> float:
        return predicted_s

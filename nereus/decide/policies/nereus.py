"""The default rule. What it adds to the published one, and why, is told in `docs/when-it-adapts.md`.

A declined plan is judged again at every boundary, with a horizon that grows with the steps that have passed since; an
announced loss ends it; of several plans the one that earns most is taken; what was measured corrects what is predicted.
"""

import dataclasses
from collections.abc import Sequence

from nereus.decide.admission import Admit, Assess, Decline, Offer, Terms, TransitionCorrection, judge
from nereus.decide.measured import Measured
from nereus.decide.policy import Dials, Policy, Situation, Standing
from nereus.decide.seam import Outlook
from nereus.decide.triggers import (
    EfficiencyTrigger,
    LengthTrigger,
    MemoryTrigger,
    StartTrigger,
    SupplyTrigger,
    Trigger,
)
from nereus.plan import Plan
from nereus.supply.supply import Announcement

MAX_PENDING = 3
"""Declined offers that are examined again."""


@dataclasses.dataclass(frozen=True, slots=True)
class NereusPolicy(Policy):
    """What has lasted n steps is expected to last about n more, and what was measured outweighs what was predicted."""

    dials: Dials = Dials()

    def triggers(self) -> tuple[Trigger, ...]:
        length = LengthTrigger.of(self.dials.length_threshold)
        efficiency = EfficiencyTrigger.of(self.dials.efficiency_threshold)
        return length, efficiency, StartTrigger(), SupplyTrigger(), MemoryTrigger()

    def plans(self, situation: Situation) -> list[Plan]:
        """Those that a search finds, those the run has been on, and those without the devices that will leave."""
        plans = situation.found_on(situation.devices)
        plans += [plan for plan in situation.known_plans() if plan not in plans]
        if not situation.urgent and 0 < len(situation.staying) < len(situation.devices):
            plans += [plan for plan in situation.found_on(situation.staying) if plan not in plans]
        return plans

    def horizon_steps(self, known: float, *, waited: int) -> float:
        return max(known, float(waited))

    def end(self, plan: Plan, leaving: Sequence[Announcement]) -> Announcement | None:
        uses = [announced for announced in leaving if not set(announced.devices).isdisjoint(plan.devices)]
        return min(uses, key=lambda announced: announced.deadline_s, default=None)

    def judge(self, offers: Sequence[Offer], standing: Standing, assess: Assess) -> Admit | Decline:
        terms = Terms(standing.plan, standing.step_s, standing.horizon_steps, self.dials.gamma, best_margin=True)
        return judge(offers, terms, assess)

    def looks_again(self, faster: Sequence[Plan]) -> Sequence[Plan]:
        return faster[:MAX_PENDING]

    def bias(self, plan: Plan | None, measured: Measured, outlook: Outlook) -> float | None:
        return measured.ratio_now(plan, outlook)

    def step_factor(self, plan: Plan, bias: float | None, measured: Measured, outlook: Outlook) -> float:
        """The bias, but a plan the run has been on counts with its own ratio where that differs by more than the
        threshold of an efficiency drift: then the model is wrong about one of the two, and what was measured is right.
        """
        assert bias is not None
        own = measured.ratio_on(plan, outlook)
        differs = own is not None and abs(own / bias - 1) > self.dials.efficiency_threshold
        return own if own and differs else bias

    def transition_s(self, predicted_s: float, correction: TransitionCorrection) -> float:
        return correction.corrected(predicted_s)

"""The published rule: the fastest plan is moved to where it pays back within gamma of the steps between crossings."""

import dataclasses
from collections.abc import Sequence

from nereus.decide.admission import Admit, Assess, Decline, Offer, Terms, TransitionCorrection, judge
from nereus.decide.measured import Measured
from nereus.decide.policy import Dials, Policy, Situation, Standing
from nereus.decide.seam import Outlook
from nereus.decide.triggers import EfficiencyTrigger, LengthTrigger, MemoryTrigger, SupplyTrigger, Trigger
from nereus.plan import Plan
from nereus.supply.supply import Announcement


@dataclasses.dataclass(frozen=True, slots=True)
class PaperPolicy(Policy):
    """What is declined is forgotten until something fires again; nothing measured corrects a prediction."""

    dials: Dials = Dials()

    def triggers(self) -> tuple[Trigger, ...]:
        length = LengthTrigger.of(self.dials.length_threshold)
        return length, EfficiencyTrigger.of(self.dials.efficiency_threshold), SupplyTrigger(), MemoryTrigger()

    def plans(self, situation: Situation) -> list[Plan]:
        return situation.found_on(situation.devices)

    def horizon_steps(self, known: float, *, waited: int) -> float:
        return known

    def end(self, plan: Plan, leaving: Sequence[Announcement]) -> Announcement | None:
        return None

    def judge(self, offers: Sequence[Offer], standing: Standing, assess: Assess) -> Admit | Decline:
        terms = Terms(standing.plan, standing.step_s, standing.horizon_steps, self.dials.gamma)
        return judge(offers, terms, assess)

    def looks_again(self, faster: Sequence[Plan]) -> Sequence[Plan]:
        return ()

    def bias(self, plan: Plan | None, measured: Measured, outlook: Outlook) -> float | None:
        return None

    def step_factor(self, plan: Plan, bias: float | None, measured: Measured, outlook: Outlook) -> float:
        return 1.0

    def transition_s(self, predicted_s: float, correction: TransitionCorrection) -> float:
        return predicted_s

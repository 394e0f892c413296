"""Whether a better plan is worth moving to. Pure: numbers in, a verdict out.

    offers (fastest first) --assess--> feasible? --> does it pay? --> Admit | Decline       (a drift, a gain of devices)
                                                --> the fastest ----> Urgent | Decline      (the plan became invalid)

An offer pays when `saving > 0` and `transition / saving <= gamma * horizon`: the steps until the move has paid itself
back are few beside the steps for which the new plan is expected to stay right. Nothing here knows where offers,
seconds or horizons come from; `decisions` brings them together.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from nereus.plan import Plan
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible

CORRECTION_WEIGHT = 0.5
"""Weight of the newest measured transition in the correction (of its logarithm)."""

CORRECTION_BOUNDS = (1 / 16, 16.0)
"""Bounds of measured over predicted seconds that the correction believes."""

URGENT_TRIES = 2
"""Aborts in a row after which an urgent move, too, looks for another way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A plan that could be moved to. step_s: its predicted step; horizon_steps: for how long it can hold at most.

    bound: what ends it then, in words.
    """

    plan: Plan
    step_s: float
    horizon_steps: float = math.inf
    bound: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Assessment:
    """How a plan can be reached. transition_s: what that is expected to take, corrected by what was measured.

    transition: None where the plan is started from saved state.
    """

    transition_s: float
    transition: Transition | None = None


Assess = Callable[[Plan], Assessment | Infeasible]


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What a move must earn. current_s: predicted step of the plan in force; horizon_steps: H.

    best_margin: among feasible offers take the one that earns most within gamma * H; else the fastest is judged alone,
    as in the paper.
    """

    current: Plan
    current_s: float
    horizon_steps: float
    gamma: float
    best_margin: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """What a verdict rests on. payback_steps: None where nothing is saved; horizon_steps: H, bounds applied."""

    current_s: float
    target_s: float
    transition_s: float
    horizon_steps: float
    gamma: float

    @property
    def saving_s(self) -> float:
        return self.current_s - self.target_s

    @property
    def payback_steps(self) -> float | None:
        return self.transition_s / self.saving_s if self.saving_s > 0 else None

    @property
    def allowed_steps(self) -> float:
        return self.gamma * self.horizon_steps

    @property
    def margin_s(self) -> float:
        """Seconds earned within the allowed steps, the transition paid."""
        return self.allowed_steps * self.saving_s - self.transition_s

    @property
    def pays(self) -> bool:
        """The rule. With gamma 0 nothing pays, not even what costs nothing."""
        return self.gamma > 0 and self.payback_steps is not None and self.payback_steps <= self.allowed_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about a target. `reason` is one sentence; `numbers` None where it never came to numbers.

    transition: what was judged, and so what is executed where the move is live.
    """

    name: ClassVar[str]
    target: Plan | None
    reason: str
    numbers: Numbers | None
    transition: Transition | None = dataclasses.field(default=None, compare=False, kw_only=True)

    @property
    def moves(self) -> bool:
        return not isinstance(self, Decline)


@dataclasses.dataclass(frozen=True, slots=True)
class Admit(Verdict):
    """The move pays."""

    name: ClassVar[str] = "admit"


@dataclasses.dataclass(frozen=True, slots=True)
class Decline(Verdict):
    """The plan in force stays. `target` is what was declined, if there was anything."""

    name: ClassVar[str] = "decline"


@dataclasses.dataclass(frozen=True, slots=True)
class Urgent(Verdict):
    """The plan in force cannot stay; whether the move pays was not asked."""

    name: ClassVar[str] = "urgent"


def judge(offers: Sequence[Offer], terms: Terms, assess: Assess) -> Admit | Decline:
    """The verdict on offers (fastest first) where the plan in force could stay."""
    offers = [offer for offer in offers if offer.plan != terms.current]
    if not offers:
        return Decline(None, "The plan in force is the fastest that fits.", None)
    refused: list[str] = []
    judged: list[tuple[Offer, Numbers, Transition | None]] = []
    for offer in offers:
        assessment = assess(offer.plan)
        if isinstance(assessment, Infeasible):
            refused.append(assessment.reason)
            continue
        horizon = min(terms.horizon_steps, offer.horizon_steps)
        found = Numbers(terms.current_s, offer.step_s, assessment.transition_s, horizon, terms.gamma)
        judged.append((offer, found, assessment.transition))
        if not terms.best_margin:
            break
    if not judged:
        return Decline(offers[0].plan, f"No target can be reached: {refused[0]}.", None)
    offer, numbers, transition = max(judged, key=lambda row: row[1].margin_s)
    verdict = Admit if numbers.pays else Decline
    return verdict(offer.plan, _sentence(offer, numbers, terms), numbers, transition=transition)


def judge_urgent(offers: Sequence[Offer], *, current_s: float, cause: str, assess: Assess) -> Urgent | Decline:
    """The first offer that can be reached, where the plan in force is invalid; `cause` says why, as half a sentence."""
    refused: list[str] = []
    for offer in offers:
        assessment = assess(offer.plan)
        if not isinstance(assessment, Infeasible):
            numbers = Numbers(current_s, offer.step_s, assessment.transition_s, 0.0, 0.0)
            step = f"a step then takes {_seconds(offer.step_s)}"
            text = (
                f"The plan in force cannot stay: {cause}; moving takes {_seconds(assessment.transition_s)} and {step}."
            )
            return Urgent(offer.plan, text, numbers, transition=assessment.transition)
        refused.append(assessment.reason)
    target = offers[0].plan if offers else None
    why = refused[0] if refused else "no plan fits the devices that are left"
    return Decline(target, f"The plan in force cannot stay ({cause}), and there is no way to move: {why}.", None)


def _sentence(offer: Offer, numbers: Numbers, terms: Terms) -> str:
    if numbers.payback_steps is None:
        return (
            f"The best target would take {_seconds(numbers.target_s)} a step, no less than the "
            f"{_seconds(numbers.current_s)} of the plan in force."
        )
    share = numbers.saving_s / numbers.current_s
    saves = (
        f"Moving takes {_seconds(numbers.transition_s)} and saves {_seconds(numbers.saving_s)} of "
        f"{_seconds(numbers.current_s)} a step ({share:.1%}), so it pays back after {numbers.payback_steps:.3g} steps"
    )
    if numbers.gamma == 0:
        return f"{saves}; gamma 0 admits urgent moves only."
    until = offer.bound if numbers.horizon_steps < terms.horizon_steps else "the next change is expected"
    allowed = (
        f"{numbers.allowed_steps:.3g} are allowed ({numbers.gamma:g} of the {numbers.horizon_steps:.3g} until {until})"
    )
    return f"{saves}; {allowed}."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionCorrection:
    """Measured over predicted seconds of past transitions: an average of logarithms, within `CORRECTION_BOUNDS`."""

    factor: float = 1.0

    def corrected(self, predicted_s: float) -> float:
        return predicted_s * self.factor

    def observed(self, *, predicted_s: float, measured_s: float) -> "TransitionCorrection":
        """After a transition; predictions are those before correction. Times not above zero are ignored."""
        if predicted_s <= 0 or measured_s <= 0:
            return self
        low, high = CORRECTION_BOUNDS
        ratio = min(max(measured_s / predicted_s, low), high)
        log = (1 - CORRECTION_WEIGHT) * math.log(self.factor) + CORRECTION_WEIGHT * math.log(ratio)
        return TransitionCorrection(math.exp(log))


@dataclasses.dataclass(frozen=True, slots=True)
class Aborts:
    """Targets to which transitions were aborted: {target: (how often since one went through, before which step last)}.

    The n-th abort in a row closes a target for 2^n steps, so that one that never succeeds is tried some log2(N) times
    in N steps.
    """

    by_target: Mapping[Plan, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def aborted(self, target: Plan, step: int) -> "Aborts":
        """After a transition to `target` before `step` was refused or rolled back."""
        times, _ = self.by_target.get(target, (0, 0))
        return Aborts({**self.by_target, target: (times + 1, step)})

    def reached(self, target: Plan) -> "Aborts":
        """After one that went through."""
        return Aborts({plan: seen for plan, seen in self.by_target.items() if plan != target})

    def closed(self, target: Plan, step: int, *, urgent: bool = False) -> str | None:
        """Why nothing moves there before `step`, as half a sentence; None where the target is open."""
        times, last = self.by_target.get(target, (0, 0))
        until = last + 2**times
        if times < (URGENT_TRIES if urgent else 1) or step >= until:
            return None
        often = "once" if times == 1 else f"{times} times"
        return f"moving there was aborted {often}, last before step {last}, and is tried again from step {until} on"

"""What to do at each boundary, from recorded inputs alone: the pure half of the controller.

    boundary(step, supply view) --> Ruling: what fired, verdict, action      before a step
    moved(target, seconds) | aborted(target, step)                           after a transition, a restart | an abort
    observe(report)                                                          after a step

The same calls in the same order give the same rulings, bit for bit: `replay` feeds them from `events.jsonl`. What
plans exist, what they cost and what moving takes is asked of an `Outlook`; by which rule a run adapts, of a `Policy`.

A ruling goes through: what fired? -> is the plan in force still valid? -> offers -> admission. The decider keeps the
account: what was measured, which triggers stand how, which deadlines are near, which offers were declined.
"""

import dataclasses
import functools
from collections.abc import Sequence

from nereus.cluster import Cluster
from nereus.decide.admission import (
    Aborts,
    Assessment,
    Offer,
    TransitionCorrection,
    Verdict,
    judge_urgent,
)
from nereus.decide.crossings import Crossings
from nereus.decide.deadlines import Deadlines
from nereus.decide.measured import Measured
from nereus.decide.policy import Policy, Situation, Standing
from nereus.decide.ruling import Action, Ruling
from nereus.decide.seam import Outlook, Prediction
from nereus.decide.triggers import (
    Aborted,
    BoundaryReached,
    FellBack,
    Fired,
    LossTrigger,
    Moment,
    Moved,
    Replanned,
    StepEnded,
    Trigger,
)
from nereus.plan import Plan, format_devices
from nereus.planner.workload import LengthSummary
from nereus.runtime.seam import StepReport
from nereus.supply.supply import SupplyView
from nereus.transition.operations import Infeasible


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """Offers judged before `step`: declined ones may pay later, and one whose move was aborted opens again."""

    plans: tuple[Plan, ...]
    step: int
    horizon_steps: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Boundary:
    """What a ruling is about. devices: that may be used; prediction: of the plan in force, None in a pause."""

    step: int
    view: SupplyView
    devices: tuple[int, ...]
    prediction: Prediction | None


class Decider:
    """Rules at every boundary of one run that starts on `plan`."""

    def __init__(
        self, policy: Policy, outlook: Outlook, plan: Plan, *, lengths: LengthSummary, warmup_steps: int = 0
    ) -> None:
        """lengths: what is assumed of responses before the first step.

        warmup_steps: first steps that do less than later ones (the critic learns alone); their seconds teach nothing.
        """
        self.policy = policy
        self.plan: Plan | None = plan
        self._outlook = outlook
        self._assumed, self._warmup_steps = lengths, warmup_steps
        self._measured, self._bias = Measured(), policy.bias(plan, Measured(), outlook)
        self._triggers: tuple[Trigger, ...] = (*policy.triggers(), LossTrigger())
        self._fired: list[Fired] = []
        self._crossings = Crossings()
        self._pending: _Pending | None = None
        self._correction = TransitionCorrection()
        self._aborts = Aborts()
        self._deadlines = Deadlines()
        self._outlook.freeze()

    @property
    def paused(self) -> bool:
        """Whether the job waits, off all devices, for a supply that holds a plan."""
        return self.plan is None

    def boundary(self, step: int, view: SupplyView) -> Ruling:
        """The ruling before `step`. Called once for every step, and while paused once for every new view."""
        self._bias = self.policy.bias(self.plan, self._measured, self._outlook)
        prediction = self._expected(self.plan) if self.plan else None
        step_s = max(self._measured.last_s, prediction.step_s if prediction else 0.0)
        self._deadlines = self._deadlines.seen(view, step_s=step_s, exit_s=self._exit_s)
        now = _Boundary(step, view, self._deadlines.usable(view), prediction)
        share = prediction.memory_share if prediction and self._measured.recent else None
        fired = [*self._fired, *self._tell(BoundaryReached(frozenset(now.devices), share))]
        self._fired = []
        if fired or self._gone(now.devices):
            ruling = self._replan(now, fired)
        elif self._pending:
            ruling = self._again(now, self._pending)
        else:
            ruling = Ruling(step, self.plan)
        if ruling.action is Action.PAUSE:
            self.plan = None
        staying = prediction.step_s if prediction and ruling.target is None else None
        target_s = self._expected(ruling.target).step_s if ruling.target else staying
        return dataclasses.replace(ruling, predicted_step_s=target_s)

    def moved(self, target: Plan, *, seconds: float | None = None, predicted_s: float = 0.0) -> None:
        """The job is on `target` now.

        seconds: of the live transition, None where it was started from saved state. predicted_s: before correction.
        """
        live_s = seconds if self.plan is not None and self.plan != target else None
        if live_s is not None:
            self._correction = self._correction.observed(predicted_s=predicted_s, measured_s=live_s)
        self.plan = target
        self._deadlines = self._deadlines.moved(live_s or 0.0)
        self._aborts = self._aborts.reached(target)
        self._pending = self._still_faster(target)
        self._measured = self._measured.moved()
        self._tell(Moved())

    def fell_back(self, plan: Plan) -> None:
        """The job goes on with what was whole of its plan; what is best now is examined at the next boundary."""
        self.moved(plan)
        self._tell(FellBack())

    def recluster(self, cluster: Cluster) -> None:
        """The device ids stand for these devices from the next boundary on."""
        self._outlook.recluster(cluster)

    def aborted(self, target: Plan, step: int) -> None:
        """A transition to `target` before `step` was refused or rolled back; the plan in force stays."""
        self._aborts = self._aborts.aborted(target, step)
        self._tell(Aborted())

    def observe(self, report: StepReport) -> None:
        """A step of the plan in force has ended."""
        assert self.plan is not None, "a step ran while the job was paused"
        self._outlook.occupy(report.engine_bytes)
        counts = report.step > self._warmup_steps
        ratio = self._frozen_ratio(self.plan, report) if counts else None
        if counts:
            self._outlook.learn(self.plan, report)
        self._measured = self._measured.seen(self.plan, report, counts=counts)
        self._fired = self._tell(StepEnded(report.lengths.mean, ratio))

    @property
    def _lengths(self) -> LengthSummary:
        return self._measured.lengths or self._assumed

    def _tell(self, moment: Moment) -> list[Fired]:
        """Every trigger sees the moment; what fired."""
        seen = [trigger.seen(moment) for trigger in self._triggers]
        self._triggers = tuple(trigger for trigger, _ in seen)
        return [fired for _, fired in seen if fired is not None]

    def _frozen_ratio(self, plan: Plan, report: StepReport) -> float:
        """Measured over predicted seconds, by what was known at the last replan."""
        return report.step_s / self._outlook.predict(plan, report.lengths, frozen=True).step_s

    def _exit_s(self, kept: tuple[int, ...]) -> float:
        """Predicted seconds of moving to the devices that stay; 0 if nothing has to move or none can."""
        plans = self._outlook.plans(self.plan, self._lengths, kept) if self._gone(kept) else []
        ways = [way.transition_s for way in map(self._assess, plans) if not isinstance(way, Infeasible)]
        return ways[0] if ways else 0.0

    def _replan(self, now: _Boundary, fired: Sequence[Fired]) -> Ruling:
        """Search, judge, and reset every reference, whatever the verdict."""
        signals = [found.signal for found in fired]
        self._crossings = self._crossings.crossed(signals, now.step)
        self._pending = None
        self._reset()
        cause = self._invalid(now)
        staying = tuple(device for device in now.devices if device not in now.view.leaving)
        plans = self.policy.plans(
            Situation(
                self.plan, cause is not None, now.devices, staying, self._lengths, self._measured, self._outlook
            )
        )  # fmt: skip
        offers = self._offers(plans, now.view)
        if cause is not None:
            return self._urgent(now, offers, cause, fired)
        horizon = self.policy.horizon_steps(self._crossings.horizon_steps(signals), waited=0)
        ruling = self._judged(now, offers, horizon, fired)
        self._pending = self._kept(now, offers, horizon, ruling)
        return ruling

    def _urgent(self, now: _Boundary, offers: Sequence[Offer], cause: str, fired: Sequence[Fired]) -> Ruling:
        """The ruling where the plan in force cannot stay."""
        current_s = now.prediction.step_s if now.prediction else 0.0
        assess = functools.partial(self._assess_open, now.step, urgent=True)
        verdict = judge_urgent(offers, current_s=current_s, cause=cause, assess=assess)
        return Ruling(now.step, self.plan, tuple(fired), verdict, self._urgent_action(verdict, now.devices))

    def _urgent_action(self, verdict: Verdict, devices: tuple[int, ...]) -> Action:
        """Live where that is possible; from saved state where it is not; wait where nothing fits."""
        if verdict.target is not None:
            return Action.MOVE if verdict.moves and self.plan is not None else Action.RESTART
        return Action.PAUSE if self.plan is None or self._gone(devices) else Action.KEEP

    def _again(self, now: _Boundary, pending: _Pending) -> Ruling:
        """Judge what was declined once more, so many steps later."""
        horizon = self.policy.horizon_steps(pending.horizon_steps, waited=now.step - pending.step)
        ruling = self._judged(now, self._offers(pending.plans, now.view), horizon, ())
        return dataclasses.replace(ruling, again=True)

    def _judged(self, now: _Boundary, offers: Sequence[Offer], horizon: float, fired: Sequence[Fired]) -> Ruling:
        """The ruling where the plan in force is valid."""
        assert self.plan is not None and now.prediction is not None
        standing = Standing(self.plan, now.prediction.step_s, horizon)
        verdict = self.policy.judge(offers, standing, functools.partial(self._assess_open, now.step))
        action = Action.MOVE if verdict.moves else Action.KEEP
        return Ruling(now.step, self.plan, tuple(fired), verdict, action)

    def _kept(self, now: _Boundary, offers: Sequence[Offer], horizon: float, ruling: Ruling) -> _Pending | None:
        """What is judged again: faster plans that came to numbers, or that aborts have closed for now."""
        assert now.prediction is not None and ruling.verdict is not None
        faster = [offer.plan for offer in offers if offer.step_s < now.prediction.step_s]
        kept = tuple(self.policy.looks_again(faster))
        opens = any(self._aborts.closed(plan, now.step) for plan in kept)
        return _Pending(kept, now.step, horizon) if kept and (ruling.verdict.numbers or opens) else None

    def _still_faster(self, target: Plan) -> _Pending | None:
        """What may still pay after a move to one of the pending plans: those faster than it."""
        if self._pending is None or target not in self._pending.plans:
            return None
        step_s = self._expected(target).step_s
        plans = [plan for plan in self._pending.plans if self._expected(plan).step_s < step_s]
        return dataclasses.replace(self._pending, plans=tuple(plans)) if plans else None

    def _offers(self, plans: Sequence[Plan], view: SupplyView) -> list[Offer]:
        """Fastest first, of those that fit in memory."""
        leaving = [announced for announced in view.announced if announced.leaving]
        offers = []
        for plan in plans:
            found = self._expected(plan)
            if found.memory_share > 1:
                continue
            offer, end = Offer(plan, found.step_s), self.policy.end(plan, leaving)
            if end is not None:
                bound = f"device {format_devices(end.devices)} leaves"
                offer = Offer(plan, found.step_s, float(int(end.deadline_s / found.step_s)), bound)
            offers.append(offer)
        return sorted(offers, key=lambda offer: offer.step_s)

    def _expected(self, plan: Plan) -> Prediction:
        """A plan's predicted step, as far as the policy believes it."""
        found = self._outlook.predict(plan, self._lengths)
        factor = self.policy.step_factor(plan, self._bias, self._measured, self._outlook)
        return dataclasses.replace(found, step_s=found.step_s * factor)

    def _assess_open(self, step: int, target: Plan, *, urgent: bool = False) -> Assessment | Infeasible:
        """What moving takes; a target that aborts have closed cannot be reached live."""
        closed = self._aborts.closed(target, step, urgent=urgent) if self.plan else None
        return Infeasible(closed) if closed else self._assess(target)

    def _assess(self, target: Plan) -> Assessment | Infeasible:
        if self.plan is None:
            return Assessment(0.0)
        found = self._outlook.assess(self.plan, target)
        if isinstance(found, Infeasible):
            return found
        return Assessment(self.policy.transition_s(found.seconds, self._correction), found)

    def _gone(self, devices: tuple[int, ...]) -> list[int]:
        """Devices of the plan in force that must not be used any more."""
        return [device for device in self.plan.devices if device not in devices] if self.plan else []

    def _invalid(self, now: _Boundary) -> str | None:
        """Why the plan in force cannot stay, as half a sentence; None where it can."""
        if self.plan is None or now.prediction is None:
            return "the job is paused"
        gone = self._gone(now.devices)
        if gone:
            return f"it uses device {format_devices(gone)}, which must be given back"
        if now.prediction.memory_share > 1:
            return f"its fullest device would need {now.prediction.memory_share:.0%} of the memory it may use"
        return None

    def _reset(self) -> None:
        """Every trigger takes what is seen now as its reference; predictions are frozen anew."""
        self._outlook.freeze()
        self._deadlines = self._deadlines.replanned()
        plan, on_plan = self.plan, self._measured.on_plan
        ratios = tuple(self._frozen_ratio(plan, report) for report in on_plan) if plan is not None else ()
        self._tell(Replanned(ratios, self._bias))

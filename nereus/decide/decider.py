"""What to do at each boundary, from recorded inputs alone: the pure half of the controller.

    boundary(step, supply view) --> Ruling: triggers, verdict, action        before a step
    moved(target, seconds) | aborted(target, step)                           after a transition, a restart | an abort
    observe(report)                                                          after a step

The same calls in the same order give the same rulings, bit for bit: `replay` feeds them from `events.jsonl`. What
plans exist, what they cost and what moving takes is asked of an `Outlook`.

A ruling goes through: what fired? -> is the plan in force still valid? -> offers -> admission. Beyond the paper,
`mode="nereus"` examines a declined target again at every boundary (with no search and no reset), lets the horizon grow
with the steps since the last crossing, ends it at an announced loss, corrects transitions by measured ones, and offers
plans the run has been on before at what they were measured to take.
"""

import abc
import collections
import dataclasses
import enum
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from nereus.cluster import Cluster
from nereus.decide.admission import (
    Aborts,
    Assessment,
    Offer,
    Terms,
    TransitionCorrection,
    Verdict,
    judge,
    judge_urgent,
)
from nereus.decide.triggers import Crossings, Drift, Memory, Signal, Supply, Trigger
from nereus.plan import Plan, format_devices
from nereus.planner.workload import LengthSummary
from nereus.reports.events import Decision, Event, SupplyChange, TriggerFired
from nereus.runtime.seam import StepReport
from nereus.supply.supply import SupplyView
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible

MEASURED_STEPS = 3
"""Steps after which a run's first plan is examined for the first time."""

RECENT_STEPS = 3
"""Steps over which lengths are averaged for predictions."""

EFFICIENCY_WINDOW = 5
"""Steps over which measured against predicted seconds are smoothed."""

LEAD_FACTOR = 1.5
"""How much longer than the last one, or than predicted, a step before a deadline may take."""

LEAD_MOVES = 2
"""How many moves must fit between that step and the deadline."""

REMEMBERED_PLANS = 4
"""Plans whose measured steps are remembered, the one in force among them."""

MAX_PENDING = 3
"""Declined offers that are examined again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The dials of adaptation.

    gamma: share of the horizon within which a move must pay itself back. warmup_steps: steps that do less than later
    ones (the critic learns alone); nothing is learned from their seconds.
    """

    mode: Literal["nereus", "paper"] = "nereus"
    gamma: float = 0.5
    length_threshold: float = 0.30
    efficiency_threshold: float = 0.15
    warmup_steps: int = 0

    @property
    def paper(self) -> bool:
        return self.mode == "paper"


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step. memory_share: peak of the fullest device over what a plan may use of it."""

    step_s: float
    memory_share: float


class Outlook(abc.ABC):
    """What a decision asks of planning. Answers depend on what was learned and asked before, and on nothing else."""

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


class Action(enum.StrEnum):
    """What the controller does with a ruling.

    KEEP: go on. MOVE: a live transition to the target. RESTART: save the state, start on the target from it.
    PAUSE: save the state and wait for a supply view with which `boundary` rules otherwise.
    """

    KEEP = "keep"
    MOVE = "move"
    RESTART = "restart"
    PAUSE = "pause"


@dataclasses.dataclass(frozen=True, slots=True)
class Ruling:
    """What was found and decided before a step. again: a declined target was examined again, without a replan."""

    step: int
    current: Plan | None
    triggers: tuple[Trigger, ...] = ()
    verdict: Verdict | None = None
    action: Action = Action.KEEP
    again: bool = False
    predicted_step_s: float | None = None

    @property
    def target(self) -> Plan | None:
        """The plan to be on after the action; None where it stays."""
        return self.verdict.target if self.verdict and self.action in (Action.MOVE, Action.RESTART) else None

    @property
    def transition(self) -> Transition | None:
        """What a live move executes: the transition that was judged."""
        return self.verdict.transition if self.verdict and self.action is Action.MOVE else None

    @property
    def events(self) -> list[Event]:
        """What of it belongs in `events.jsonl`."""
        events: list[Event] = [
            TriggerFired(self.step, t.signal.value, value=t.value, reference=t.reference, threshold=t.threshold)
            for t in self.triggers
        ]
        if self.verdict is not None:
            events.append(self._decision(self.verdict))
        return events

    def _decision(self, verdict: Verdict) -> Decision:
        numbers = verdict.numbers
        return Decision(
            self.step,
            verdict=verdict.name,
            action=self.action.value,
            reason=verdict.reason,
            current=self.current,
            target=verdict.target,
            again=self.again,
            current_s=numbers.current_s if numbers else None,
            target_s=numbers.target_s if numbers else None,
            transition_s=numbers.transition_s if numbers else None,
            saving_s=numbers.saving_s if numbers else None,
            payback_steps=numbers.payback_steps if numbers else None,
            horizon_steps=numbers.horizon_steps if numbers else None,
            gamma=numbers.gamma if numbers else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """Offers judged before `step`: declined ones may pay later, and one whose move was aborted opens again."""

    plans: tuple[Plan, ...]
    step: int
    horizon_steps: float


class Decider:
    """Rules at every boundary of one run that starts on `plan`."""

    def __init__(self, policy: Policy, outlook: Outlook, plan: Plan, *, lengths: LengthSummary) -> None:
        """lengths: what is assumed of responses before the first step."""
        self.policy = policy
        self.plan: Plan | None = plan
        self._outlook = outlook
        self._lengths = lengths
        self._recent: collections.deque[StepReport] = collections.deque(maxlen=EFFICIENCY_WINDOW)
        self._measured: dict[Plan, collections.deque[StepReport]] = {}
        self._last_measured: collections.deque[tuple[Plan, StepReport]] = collections.deque(maxlen=EFFICIENCY_WINDOW)
        self._measured_on_plan = 0
        self._num_measured = 0
        self._bias = 1.0
        self._supply = Supply()
        self._memory = Memory()
        self._length = Drift(Signal.LENGTH, policy.length_threshold)
        self._efficiency = Drift(Signal.EFFICIENCY, policy.efficiency_threshold, size=EFFICIENCY_WINDOW)
        self._fired: list[Trigger] = []
        self._crossings = Crossings()
        self._pending: _Pending | None = None
        self._correction = TransitionCorrection()
        self._aborts = Aborts()
        self._leaving: frozenset[int] = frozenset()
        self._longest_move_s = 0.0
        self._exits: dict[tuple[int, ...], float] = {}
        self._outlook.freeze()

    def boundary(self, step: int, view: SupplyView) -> Ruling:
        """The ruling before `step`. Called once for every step, and while paused once for every new view."""
        self._bias = self._bias_now()
        prediction = self._expected(self.plan) if self.plan else None
        devices = self._usable(view, prediction)
        triggers, self._fired = [*self._fired], []
        self._supply, fired = self._supply.seen(devices)
        triggers += [fired] if fired else []
        if prediction and self._recent:
            self._memory, fired = self._memory.seen(prediction.memory_share)
            triggers += [fired] if fired else []
        if triggers or self._gone(devices):
            ruling = self._replan(step, view, devices, triggers, prediction)
        elif self._pending:
            ruling = self._again(step, view, self._pending, prediction)
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
        if self.plan is not None and seconds is not None and self.plan != target:
            self._correction = self._correction.observed(predicted_s=predicted_s, measured_s=seconds)
            self._longest_move_s = max(self._longest_move_s, seconds)
        self.plan = target
        self._exits.clear()
        self._aborts = self._aborts.reached(target)
        self._pending = self._still_faster(target)
        self._measured_on_plan = 0
        self._efficiency = self._efficiency.expecting(self._efficiency.reference)

    def recluster(self, cluster: Cluster) -> None:
        """The device ids stand for these devices from the next boundary on."""
        self._outlook.recluster(cluster)

    def aborted(self, target: Plan, step: int) -> None:
        """A transition to `target` before `step` was refused or rolled back; the plan in force stays.

        Memory that it was to relieve fires again at the next boundary.
        """
        self._aborts = self._aborts.aborted(target, step)
        self._memory = Memory()

    def observe(self, report: StepReport) -> None:
        """A step of the plan in force has ended."""
        assert self.plan is not None, "a step ran while the job was paused"
        self._outlook.occupy(report.engine_bytes)
        self._recent.append(report)
        self._lengths = _average([s.lengths for s in list(self._recent)[-RECENT_STEPS:]])
        self._length, length = self._length.seen(report.lengths.mean)
        self._fired = [length] if length else []
        if report.step > self.policy.warmup_steps:
            self._fired += self._observe_seconds(self.plan, report)

    def _observe_seconds(self, plan: Plan, report: StepReport) -> list[Trigger]:
        """Learn from a step's seconds; what they trigger."""
        frozen = self._outlook.predict(plan, report.lengths, frozen=True)
        self._outlook.learn(plan, report)
        self._efficiency, fired = self._efficiency.seen(report.step_s / frozen.step_s)
        self._measured_on_plan += 1
        self._num_measured += 1
        self._remember(plan, report)
        triggers = [fired] if fired else []
        if self._num_measured == MEASURED_STEPS and not self.policy.paper:
            triggers.append(Trigger(Signal.START, float(MEASURED_STEPS), 0.0, 0.0))
        return triggers

    def _usable(self, view: SupplyView, prediction: Prediction | None) -> tuple[int, ...]:
        """The view's devices without those that must be left at this boundary; once left, a device stays so."""
        last_s = self._recent[-1].step_s if self._recent else 0.0
        step_s = LEAD_FACTOR * max(last_s, prediction.step_s if prediction else 0.0)
        left = self._leaving & _announced(view)
        for deadline_s in sorted({a.deadline_s for a in view.announced if a.leaving}):
            gone = left | view.leaving_within(deadline_s)
            exit_s = self._exit_s(tuple(device for device in view.devices if device not in gone))
            if deadline_s <= step_s + LEAD_MOVES * max(self._longest_move_s, exit_s):
                left = gone
        self._leaving = left
        return tuple(device for device in view.devices if device not in left)

    def _exit_s(self, kept: tuple[int, ...]) -> float:
        """Predicted seconds of moving to the devices that stay, kept until the next replan or move; 0 if none can."""
        if kept not in self._exits:
            plans = self._outlook.plans(self.plan, self._lengths, kept) if self._gone(kept) else []
            ways = [way.transition_s for way in map(self._assess, plans) if not isinstance(way, Infeasible)]
            self._exits[kept] = ways[0] if ways else 0.0
        return self._exits[kept]

    def _replan(
        self,
        step: int,
        view: SupplyView,
        devices: tuple[int, ...],
        triggers: list[Trigger],
        prediction: Prediction | None,
    ) -> Ruling:
        """Search, judge, and reset every reference, whatever the verdict."""
        signals = [trigger.signal for trigger in triggers]
        self._crossings = self._crossings.crossed(signals, step)
        self._pending = None
        self._reset()
        cause = self._invalid(devices, prediction)
        plans = [plan for plan in self._outlook.plans(self.plan, self._lengths, devices) if plan != self.plan]
        plans += [plan for plan in self._known_plans(devices) if plan not in plans]
        if cause is None:
            kept = [d for d in devices if d not in _announced(view)]
            if not self.policy.paper and 0 < len(kept) < len(devices):
                plans += [plan for plan in self._outlook.plans(self.plan, self._lengths, kept) if plan not in plans]
            horizon = self._crossings.horizon_steps(signals)
            return self._ruled(step, view, tuple(plans), horizon, prediction, triggers)
        offers = self._offers(plans, view)
        current_s = prediction.step_s if prediction else 0.0
        assess = functools.partial(self._assess_open, step, urgent=True)
        verdict = judge_urgent(offers, current_s=current_s, cause=cause, assess=assess)
        action = self._urgent_action(verdict, devices)
        return Ruling(step, self.plan, tuple(triggers), verdict, action)

    def _urgent_action(self, verdict: Verdict, devices: tuple[int, ...]) -> Action:
        """Live where that is possible; from saved state where it is not; wait where nothing fits."""
        if verdict.target is not None:
            return Action.MOVE if verdict.moves and self.plan is not None else Action.RESTART
        return Action.PAUSE if self.plan is None or self._gone(devices) else Action.KEEP

    def _again(self, step: int, view: SupplyView, pending: _Pending, prediction: Prediction | None) -> Ruling:
        """Judge what was declined with the horizon that has passed without a crossing since."""
        horizon = max(pending.horizon_steps, float(step - pending.step))
        ruling = self._ruled(step, view, pending.plans, horizon, prediction, [])
        self._pending = pending
        return dataclasses.replace(ruling, again=True)

    def _ruled(
        self,
        step: int,
        view: SupplyView,
        plans: tuple[Plan, ...],
        horizon: float,
        prediction: Prediction | None,
        triggers: list[Trigger],
    ) -> Ruling:
        """The ruling where the plan in force is valid."""
        assert self.plan is not None and prediction is not None
        terms = Terms(self.plan, prediction.step_s, horizon, self.policy.gamma, best_margin=not self.policy.paper)
        offers = self._offers(plans, view)
        verdict = judge(offers, terms, functools.partial(self._assess_open, step))
        faster = tuple(offer.plan for offer in offers[:MAX_PENDING] if offer.step_s < prediction.step_s)
        if faster and not self.policy.paper and (verdict.numbers or any(self._aborts.closed(p, step) for p in faster)):
            self._pending = _Pending(faster, step, horizon)
        action = Action.MOVE if verdict.moves else Action.KEEP
        return Ruling(step, self.plan, tuple(triggers), verdict, action)

    def _still_faster(self, target: Plan) -> _Pending | None:
        """What may still pay after a move to one of the pending plans: those faster than it."""
        if self._pending is None or target not in self._pending.plans:
            return None
        step_s = self._expected(target).step_s
        plans = [plan for plan in self._pending.plans if self._expected(plan).step_s < step_s]
        return dataclasses.replace(self._pending, plans=tuple(plans)) if plans else None

    def _offers(self, plans: Sequence[Plan], view: SupplyView) -> list[Offer]:
        """Fastest first, of those that fit in memory. An announced loss of a device ends a plan that uses it."""
        offers = []
        for plan in plans:
            found = self._expected(plan)
            step_s = found.step_s
            if found.memory_share > 1:
                continue
            ends = [a for a in view.announced if a.leaving and not set(a.devices).isdisjoint(plan.devices)]
            if ends and not self.policy.paper:
                first = min(ends, key=lambda a: a.deadline_s)
                bound = f"device {format_devices(first.devices)} leaves"
                offers.append(Offer(plan, step_s, float(int(first.deadline_s / step_s)), bound))
            else:
                offers.append(Offer(plan, step_s))
        return sorted(offers, key=lambda offer: offer.step_s)

    def _expected(self, plan: Plan) -> Prediction:
        """A plan's predicted step; by default times measured over predicted seconds of the plan in force.

        A plan the run has been on counts with its own ratio where that differs by more than the threshold of an
        efficiency drift: then the model is wrong about one of the two, and what was measured is right.
        """
        found = self._outlook.predict(plan, self._lengths)
        if self.policy.paper:
            return found
        own = self._measured_bias(plan)
        differs = own is not None and abs(own / self._bias - 1) > self.policy.efficiency_threshold
        return dataclasses.replace(found, step_s=found.step_s * (own if own and differs else self._bias))

    def _measured_bias(self, plan: Plan) -> float | None:
        """Measured over predicted seconds, by what is known now: the median of the plan's last steps."""
        steps = self._measured.get(plan, ())
        if len(steps) < MEASURED_STEPS:
            return None
        return statistics.median(self._ratio(plan, report) for report in steps)

    def _bias_now(self) -> float:
        """The bias of the plan in force; while it is new, that of the last steps on whatever plan."""
        own = self._measured_bias(self.plan) if self.plan else None
        if own is not None:
            return own
        if len(self._last_measured) < MEASURED_STEPS:
            return 1.0
        return statistics.median(self._ratio(plan, report) for plan, report in self._last_measured)

    def _ratio(self, plan: Plan, report: StepReport) -> float:
        return report.step_s / self._outlook.predict(plan, report.lengths).step_s

    def _remember(self, plan: Plan, report: StepReport) -> None:
        """Keep the plan's last steps; the plan in force is always the newest."""
        if self.policy.paper:
            return
        self._last_measured.append((plan, report))
        steps = self._measured.pop(plan, None)
        self._measured[plan] = steps if steps is not None else collections.deque(maxlen=EFFICIENCY_WINDOW)
        self._measured[plan].append(report)
        if len(self._measured) > REMEMBERED_PLANS:
            del self._measured[next(iter(self._measured))]

    def _known_plans(self, devices: tuple[int, ...]) -> list[Plan]:
        """Plans the run has been on that these devices and the lengths of now admit."""
        known = [plan for plan in self._measured if plan != self.plan and set(plan.devices) <= set(devices)]
        return [plan for plan in known if self._outlook.predict(plan, self._lengths).memory_share <= 1]

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
        seconds = found.seconds if self.policy.paper else self._correction.corrected(found.seconds)
        return Assessment(seconds, found)

    def _gone(self, devices: tuple[int, ...]) -> list[int]:
        """Devices of the plan in force that must not be used any more."""
        return [device for device in self.plan.devices if device not in devices] if self.plan else []

    def _invalid(self, devices: tuple[int, ...], prediction: Prediction | None) -> str | None:
        """Why the plan in force cannot stay, as half a sentence; None where it can."""
        if self.plan is None or prediction is None:
            return "the job is paused"
        gone = self._gone(devices)
        if gone:
            return f"it uses device {format_devices(gone)}, which must be given back"
        if prediction.memory_share > 1:
            return f"its fullest device would need {prediction.memory_share:.0%} of the memory it may use"
        return None

    def _reset(self) -> None:
        """Every drifting signal takes what is seen now as its reference; predictions are frozen anew."""
        self._outlook.freeze()
        self._exits.clear()
        self._length = self._length.reset()
        efficiency = self._efficiency.expecting(None)
        if self.plan is not None and self._measured_on_plan:
            for report in list(self._recent)[-self._measured_on_plan :]:
                frozen = self._outlook.predict(self.plan, report.lengths, frozen=True)
                efficiency, _ = efficiency.seen(report.step_s / frozen.step_s)
        self._efficiency = efficiency.reset(None if self.policy.paper else self._bias)


def supply_event(step: int, view: SupplyView, cluster: Cluster | None = None) -> SupplyChange:
    """The event to write before `boundary` wherever the view differs from the last one.

    cluster: the devices, where they differ from those known so far.
    """
    return SupplyChange(step, view.devices, tuple(a.to_json() for a in view.announced), view.deadline_s, cluster)


def _announced(view: SupplyView) -> frozenset[int]:
    return frozenset(device for a in view.announced if a.leaving for device in a.devices)


def _average(recent: Sequence[LengthSummary]) -> LengthSummary:
    """Means of the steps, and the longest of them."""
    count = len(recent)
    return LengthSummary(
        mean=sum(x.mean for x in recent) / count,
        p95=sum(x.p95 for x in recent) / count,
        longest=max(x.longest for x in recent),
        prompt_mean=sum(x.prompt_mean for x in recent) / count,
    )

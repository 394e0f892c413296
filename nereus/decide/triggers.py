"""What can start a replan: pure state machines over what happens to a run.

    trigger, moment -> (trigger after it, Fired | None)

    StepEnded         a step of the plan in force has ended              --> may fire
    BoundaryReached   before a step: devices, predicted memory           --> may fire
    Replanned         a replan begins, whatever comes of it              references are reset
    Moved | Aborted   the job is on another plan | a transition there was refused or rolled back
    FellBack          the job goes on with what was whole of its plan

A drifting signal fires when it differs from its reference by more than a relative threshold; the reference is reset at
every replan, rejected ones too. A change of the devices, or memory that is predicted not to suffice, fires at once.
"""

import abc
import dataclasses
import enum
import statistics

MEASURED_STEPS = 3
"""Steps after which a run's first plan is examined for the first time."""

EFFICIENCY_WINDOW = 5
"""Steps over which measured against predicted seconds are smoothed."""

FEWEST_SEEN = 3
"""Values of a window that is not full yet whose median may become a reference."""

MEMORY_STEP = 0.02
"""A memory violation that a replan left in place fires again when the predicted peak has grown by this share."""


class Signal(enum.StrEnum):
    """The signals below, as events name them."""

    START = "start"
    SUPPLY = "supply"
    MEMORY = "memory"
    LENGTH = "length"
    EFFICIENCY = "efficiency"


@dataclasses.dataclass(frozen=True, slots=True)
class Fired:
    """A signal that crossed. `threshold` is relative for drifts, absolute (0) for supply, the limit for memory.

    text: what happened, in words.
    """

    signal: str
    value: float
    reference: float
    threshold: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or self.signal


@dataclasses.dataclass(frozen=True, slots=True)
class StepEnded:
    """A step has ended. mean_length: of its responses, in tokens.

    ratio: its measured seconds over those predicted by what was known at the last replan; None where a step's seconds
    tell nothing.
    """

    mean_length: float
    ratio: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryReached:
    """A step is to begin. devices: that may be used now.

    memory_share: predicted peak of the fullest device over what it may use; None before the first step and in a pause.
    """

    devices: frozenset[int]
    memory_share: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Replanned:
    """A replan begins; predictions are those of now. ratios: of the last steps on the plan in force, by them.

    expected: what the ratio is expected to be where those are too few to tell; None where nothing is known.
    """

    ratios: tuple[float, ...]
    expected: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """The job is on another plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Aborted:
    """A transition was refused or rolled back; the plan in force stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class FellBack:
    """Some units of the plan in force were lost; the job goes on with the others."""


Moment = StepEnded | BoundaryReached | Replanned | Moved | Aborted | FellBack


class Trigger(abc.ABC):
    """Something that can start a replan, as a value that never changes.

    `seen` is called with every moment of a run in order and answers with the trigger that hears the next one, and with
    what fired, if anything did: at a StepEnded or BoundaryReached alone. What fires at the end of a step starts a
    replan at the boundary after it. Moments that a trigger has no use for leave it as it is.
    """

    @abc.abstractmethod
    def seen(self, moment: Moment) -> "tuple[Trigger, Fired | None]":
        """The trigger after a moment, and what fired."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """State of one drifting signal.

    size: steps over which it is smoothed. Without a reference the first full window becomes it.
    """

    signal: str
    threshold: float
    size: int = 1
    window: tuple[float, ...] = ()
    reference: float | None = None

    @property
    def smoothed(self) -> float | None:
        """Median of the window, None until it is full: noise and outliers are damped, and a lasting change shows at its
        full height at once, so that it fires once."""
        return statistics.median(self.window) if len(self.window) == self.size else None

    def seen(self, value: float) -> tuple["Drift", Fired | None]:
        """The state after one more step, and what fired if that step crossed."""
        after = dataclasses.replace(self, window=(*self.window, value)[-self.size :])
        now = after.smoothed
        if now is None:
            return after, None
        if self.reference is None:
            return dataclasses.replace(after, reference=now), None
        if abs(now - self.reference) <= self.threshold * abs(self.reference):
            return after, None
        change = f"{self.signal} {now / self.reference - 1:+.0%} ({self.reference:.4g} -> {now:.4g})"
        return after, Fired(self.signal, now, self.reference, self.threshold, change)

    def reset(self, otherwise: float | None = None) -> "Drift":
        """After a replan: what is seen now is the reference, `otherwise` where that is too little to tell."""
        enough = len(self.window) >= min(self.size, FEWEST_SEEN)
        return dataclasses.replace(self, reference=statistics.median(self.window) if enough else otherwise)

    def expecting(self, reference: float | None) -> "Drift":
        """With an empty window and a given reference, such as after a change of plan."""
        return dataclasses.replace(self, window=(), reference=reference)


@dataclasses.dataclass(frozen=True, slots=True)
class LengthTrigger(Trigger):
    """Fires when the mean response length leaves its reference."""

    drift: Drift

    @classmethod
    def of(cls, threshold: float) -> "LengthTrigger":
        return cls(Drift(Signal.LENGTH, threshold))

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        match moment:
            case StepEnded(mean_length=mean):
                drift, fired = self.drift.seen(mean)
                return LengthTrigger(drift), fired
            case Replanned():
                return LengthTrigger(self.drift.reset()), None
            case _:
                return self, None


@dataclasses.dataclass(frozen=True, slots=True)
class EfficiencyTrigger(Trigger):
    """Fires when measured over predicted seconds leave their reference. After a move the reference stays: a plan that
    turns out slower than predicted is examined again."""

    drift: Drift

    @classmethod
    def of(cls, threshold: float) -> "EfficiencyTrigger":
        return cls(Drift(Signal.EFFICIENCY, threshold, size=EFFICIENCY_WINDOW))

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        drift, fired = self.drift, None
        match moment:
            case StepEnded(ratio=ratio) if ratio is not None:
                drift, fired = drift.seen(ratio)
            case Replanned(ratios=ratios, expected=expected):
                drift = drift.expecting(None)
                for ratio in ratios:
                    drift, _ = drift.seen(ratio)
                drift = drift.reset(expected)
            case Moved():
                drift = drift.expecting(drift.reference)
        return EfficiencyTrigger(drift), fired


@dataclasses.dataclass(frozen=True, slots=True)
class StartTrigger(Trigger):
    """Fires once, when the first measurements of the run are in: a poor first plan may be left."""

    num_steps: int = 0

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        match moment:
            case StepEnded(ratio=ratio) if ratio is not None:
                after = StartTrigger(self.num_steps + 1)
                text = f"the first {MEASURED_STEPS} steps are measured"
                fired = Fired(Signal.START, float(MEASURED_STEPS), 0.0, 0.0, text)
                return after, fired if after.num_steps == MEASURED_STEPS else None
            case _:
                return self, None


@dataclasses.dataclass(frozen=True, slots=True)
class SupplyTrigger(Trigger):
    """Fires when the devices change. devices: as last seen; None before the first boundary, which fires nothing."""

    devices: frozenset[int] | None = None

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        if not isinstance(moment, BoundaryReached):
            return self, None
        before, now = self.devices, moment.devices
        if before is None or now == before:
            return SupplyTrigger(now), None
        text = f"devices: {len(before)} -> {len(now)}"
        return SupplyTrigger(now), Fired(Signal.SUPPLY, len(now), len(before), 0.0, text)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTrigger(Trigger):
    """Fires when predicted memory does not suffice; once more where a move that was to relieve it was aborted.

    fired_at: share of the limit that the last violation stood at.
    """

    fired_at: float | None = None

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        match moment:
            case BoundaryReached(memory_share=share) if share is not None:
                return self._asked(share)
            case Aborted():
                return MemoryTrigger(), None
            case _:
                return self, None

    def _asked(self, share: float) -> tuple[Trigger, Fired | None]:
        if share <= 1:
            return MemoryTrigger(), None
        if self.fired_at is not None and share <= self.fired_at * (1 + MEMORY_STEP):
            return self, None
        text = f"a device would need {share:.3f} of what it may use"
        return MemoryTrigger(share), Fired(Signal.MEMORY, share, self.fired_at or 1.0, 1.0, text)


@dataclasses.dataclass(frozen=True, slots=True)
class LossTrigger(Trigger):
    """Fires at the boundary after units of the plan were lost: a run starts anew from what is left. No policy is asked
    whether it is there."""

    lost: bool = False

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        match moment:
            case FellBack():
                return LossTrigger(lost=True), None
            case BoundaryReached() if self.lost:
                return LossTrigger(), Fired(Signal.START, 0.0, 0.0, 0.0, "some units of the plan were lost")
            case _:
                return self, None


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedTrigger(Trigger):
    """Fires when the given steps have ended, counted from 1: the fake for tests."""

    after: frozenset[int]
    signal: str = "scripted"
    num_steps: int = 0

    def seen(self, moment: Moment) -> tuple[Trigger, Fired | None]:
        if not isinstance(moment, StepEnded):
            return self, None
        ended = dataclasses.replace(self, num_steps=self.num_steps + 1)
        fires = ended.num_steps in self.after
        return ended, Fired(self.signal, float(ended.num_steps), 0.0, 0.0) if fires else None

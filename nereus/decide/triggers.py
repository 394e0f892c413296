"""When a replan starts: pure state machines over signals.

    state, value -> (state, Trigger | None)

A drifting signal fires when it differs from its reference by more than a relative threshold; the reference is reset at
every replan, rejected ones too. A change of the devices, or memory that is predicted not to suffice, fires at once.
`Crossings` keeps how many steps lie between the crossings of each signal: the horizon over which a plan must pay.
"""

import dataclasses
import enum
import statistics
from collections.abc import Iterable, Mapping

HORIZON_WEIGHT = 0.5
"""Weight of the newest interval in a horizon's moving average."""

FEWEST_SEEN = 3
"""Values of a window that is not full yet whose median may become a reference."""

MEMORY_STEP = 0.02
"""A memory violation that a replan left in place fires again when the predicted peak has grown by this share."""


class Signal(enum.StrEnum):
    """What can start a replan. START: the first measurements of the run are in; a poor first plan may be left."""

    START = "start"
    SUPPLY = "supply"
    MEMORY = "memory"
    LENGTH = "length"
    EFFICIENCY = "efficiency"


@dataclasses.dataclass(frozen=True, slots=True)
class Trigger:
    """A signal that crossed. `threshold` is relative for drifts, absolute (0) for supply, the limit for memory."""

    signal: Signal
    value: float
    reference: float
    threshold: float

    def __str__(self) -> str:
        match self.signal:
            case Signal.START:
                return f"the first {self.value:g} steps are measured"
            case Signal.SUPPLY:
                return f"devices: {self.reference:g} -> {self.value:g}"
            case Signal.MEMORY:
                return f"a device would need {self.value:.3f} of what it may use"
            case _:
                change = self.value / self.reference - 1
                return f"{self.signal} {change:+.0%} ({self.reference:.4g} -> {self.value:.4g})"


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """State of one drifting signal.

    size: steps over which it is smoothed. Without a reference the first full window becomes it.
    """

    signal: Signal
    threshold: float
    size: int = 1
    window: tuple[float, ...] = ()
    reference: float | None = None

    @property
    def smoothed(self) -> float | None:
        """Median of the window, None until it is full: noise and outliers are damped, and a lasting change shows at its
        full height at once, so that it fires once."""
        return statistics.median(self.window) if len(self.window) == self.size else None

    def seen(self, value: float) -> tuple["Drift", Trigger | None]:
        """The state after one more step, and the trigger if that step crossed."""
        after = dataclasses.replace(self, window=(*self.window, value)[-self.size :])
        now = after.smoothed
        if now is None:
            return after, None
        if self.reference is None:
            return dataclasses.replace(after, reference=now), None
        if abs(now - self.reference) <= self.threshold * abs(self.reference):
            return after, None
        return after, Trigger(self.signal, now, self.reference, self.threshold)

    def reset(self, otherwise: float | None = None) -> "Drift":
        """After a replan: what is seen now is the reference, `otherwise` where that is too little to tell."""
        enough = len(self.window) >= min(self.size, FEWEST_SEEN)
        return dataclasses.replace(self, reference=statistics.median(self.window) if enough else otherwise)

    def expecting(self, reference: float | None) -> "Drift":
        """With an empty window and a given reference, such as after a change of plan."""
        return dataclasses.replace(self, window=(), reference=reference)


@dataclasses.dataclass(frozen=True, slots=True)
class Supply:
    """State of the device pool as last seen; None before the first view, which fires nothing."""

    devices: frozenset[int] | None = None

    def seen(self, devices: Iterable[int]) -> tuple["Supply", Trigger | None]:
        now = frozenset(devices)
        if self.devices is None or now == self.devices:
            return Supply(now), None
        return Supply(now), Trigger(Signal.SUPPLY, len(now), len(self.devices), 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """State of predicted memory. `fired_at`: share of the limit that the last violation stood at."""

    fired_at: float | None = None

    def seen(self, share: float) -> tuple["Memory", Trigger | None]:
        """share: predicted peak of the fullest device over what it may use."""
        if share <= 1:
            return Memory(), None
        if self.fired_at is not None and share <= self.fired_at * (1 + MEMORY_STEP):
            return self, None
        return Memory(share), Trigger(Signal.MEMORY, share, self.fired_at or 1.0, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Intervals:
    """last: step of the last crossing; mean: moving average of the intervals, None before the first is known."""

    last: int
    mean: float | None = None

    def crossed(self, step: int) -> "_Intervals":
        interval = float(step - self.last)
        mean = interval if self.mean is None else HORIZON_WEIGHT * interval + (1 - HORIZON_WEIGHT) * self.mean
        return _Intervals(step, mean)


@dataclasses.dataclass(frozen=True, slots=True)
class Crossings:
    """Steps between the crossings of each signal, updated at crossings only."""

    by_signal: Mapping[Signal, _Intervals] = dataclasses.field(default_factory=dict)

    def crossed(self, signals: Iterable[Signal], step: int) -> "Crossings":
        """After these signals crossed before `step`; a second crossing before the same step counts as one."""
        after = dict(self.by_signal)
        for signal in signals:
            before = after.get(signal)
            if before is None:
                after[signal] = _Intervals(step)
            elif step > before.last:
                after[signal] = before.crossed(step)
        return Crossings(after)

    def horizon_steps(self, signals: Iterable[Signal]) -> float:
        """H_x: the smallest mean interval of these signals; one step where no interval is known."""
        known = [self.by_signal[s].mean if s in self.by_signal else None for s in signals]
        return min((1.0 if mean is None else mean for mean in known), default=1.0)

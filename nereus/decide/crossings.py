"""How many steps lie between the crossings of each signal: the horizon over which a plan must pay. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping

HORIZON_WEIGHT = 0.5
"""Weight of the newest interval in a horizon's moving average."""


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

    by_signal: Mapping[str, _Intervals] = dataclasses.field(default_factory=dict)

    def crossed(self, signals: Iterable[str], step: int) -> "Crossings":
        """After these signals crossed before `step`; a second crossing before the same step counts as one."""
        after = dict(self.by_signal)
        for signal in signals:
            before = after.get(signal)
            if before is None:
                after[signal] = _Intervals(step)
            elif step > before.last:
                after[signal] = before.crossed(step)
        return Crossings(after)

    def horizon_steps(self, signals: Iterable[str]) -> float:
        """H_x: the smallest mean interval of these signals; one step where no interval is known."""
        known = [self.by_signal[s].mean if s in self.by_signal else None for s in signals]
        return min((1.0 if mean is None else mean for mean in known), default=1.0)

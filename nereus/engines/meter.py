"""Measures what a rank does by operation class: work, calls, seconds. For processors; on CUDA kernels end later.

Classes and work are those of the planner's bills (`planner/prices/operations.py`): floating-point operations of matrix
products and whole-sequence attention, bytes of decoding attention and of weights read while decoding, bytes on the wire
of collectives. Forward passes are measured operation by operation; a backward pass is one call and is not.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nereus.engines.gauge import MemoryGauge

Totals = dict[str, tuple[float, float, float]]
"""{class: (work, calls, seconds)}."""


class Meter:
    """Totals since the last `drain`, and the worker's memory gauge where it has one."""

    def __init__(self, gauge: MemoryGauge | None = None) -> None:
        self._totals: Totals = {}
        self.gauge = gauge

    def sample_memory(self) -> None:
        """Called where memory peaks; raises DeviceMemoryError above the limit."""
        if self.gauge is not None:
            self.gauge.sample()

    def add(self, name: str, work: float, seconds: float) -> None:
        """One call of a class."""
        before = self._totals.get(name, (0.0, 0.0, 0.0))
        self._totals[name] = (before[0] + work, before[1] + 1, before[2] + seconds)

    @contextmanager
    def time(self, name: str, work: float) -> Iterator[None]:
        """Measure what runs inside as one call of a class."""
        begun = time.perf_counter()
        yield
        self.add(name, work, time.perf_counter() - begun)

    def drain(self) -> Totals:
        """The totals, which start again from nothing."""
        totals, self._totals = self._totals, {}
        return totals

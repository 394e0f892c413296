"""What each operation class really costs on each accelerator, learned online from measured times.

The time of a class is linear in what was counted: seconds = calls * fixed + work / (peak * efficiency). A saturating
efficiency, peak * w / (w + w_half) for w work per call, is the same line, since w_half / peak joins the fixed part.
So one recursive-least-squares filter per accelerator estimates two numbers per class and link, relative to
conservative priors, and accepts times of one class as well as totals of several.

It does not know plans, models or layouts. Its state is saved and loaded; an accelerator never seen starts from the
nearest one that was.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nereus.cluster import ACCELERATORS, Accelerator, Link, nearest_accelerator
from nereus.planner.operations import COLLECTIVES, COMPUTE, KEYS, MEMORY, Counts, Op, OpKey, key_name, parse_key

FORGETTING = 0.98
"""Weight that an observation keeps with each later one of the same class."""

PRIOR_SPREAD = 0.5
"""Relative standard deviation of a prior: how fast the first observations take over."""

NOISE = 0.05
"""Relative standard deviation of one measured time."""

FACTOR_BOUNDS = (1 / 64, 64.0)
"""Bounds of both learned factors relative to their priors."""

MAX_EFFICIENCY = 1.0
"""No class runs faster than the device's peak (a CPU's table entry is a typical core, so it may)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prior:
    """Conservative start of a class: efficiency of the peak, and seconds per call."""

    efficiency: float
    fixed_s: float


PRIORS = {
    Op.GEMM: Prior(0.60, 12e-6),
    Op.ATTENTION: Prior(0.35, 15e-6),
    Op.ATTENTION_BACKWARD: Prior(0.30, 30e-6),
    Op.ATTENTION_DECODE: Prior(0.55, 8e-6),
    Op.DECODE_GEMM: Prior(0.65, 6e-6),
    Op.ELEMENTWISE: Prior(0.65, 3e-6),
    Op.ALL_REDUCE: Prior(0.55, 12e-6),
    Op.ALL_GATHER: Prior(0.50, 12e-6),
    Op.REDUCE_SCATTER: Prior(0.50, 12e-6),
    Op.ALL_TO_ALL: Prior(0.40, 15e-6),
    Op.POINT_TO_POINT: Prior(0.60, 12e-6),
    Op.LAUNCH: Prior(1.0, 5e-4),
    Op.GROUP_SETUP: Prior(1.0, 0.5),
}
"""From the achieved rates of A100, H100, H200 and B200 kernels and NCCL collectives in the published hardware table,
rounded down (GEMM 0.62-0.80 of peak, causal attention 0.38-0.57, decode GEMM 0.72, all-reduce 0.6-0.74)."""

CPU_FIXED_FACTOR = 4.0
"""Calls cost more on a CPU worker: each passes the framework and, for collectives, a socket."""


def peak(accelerator: Accelerator, key: OpKey) -> float:
    """Work per second at the device's or the link's peak."""
    op, link = key
    if op in COMPUTE:
        return accelerator.flops_per_s
    if op in MEMORY:
        return accelerator.memory_bytes_per_s
    if op in COLLECTIVES:
        return accelerator.inter_node_bytes_per_s if link is Link.INTER_NODE else accelerator.intra_node_bytes_per_s
    return math.inf


def _prior_line(accelerator: Accelerator, key: OpKey) -> tuple[float, float]:
    """(seconds per call, seconds per unit of work) before anything was measured."""
    prior = PRIORS[key[0]]
    fixed = prior.fixed_s * (CPU_FIXED_FACTOR if accelerator.name == "cpu" else 1.0)
    if key[1] is Link.INTER_NODE:
        fixed *= 2
    return fixed, 1 / (peak(accelerator, key) * prior.efficiency)


class _Filter:
    """Recursive least squares over two factors (fixed, per work) per class, all starting at 1."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.keys: dict[OpKey, int] = {}
        self.lines: list[tuple[float, float]] = []
        self.factors = np.zeros(0)
        self.covariance = np.zeros((0, 0))
        self.counts: list[int] = []

    def index(self, key: OpKey, start: tuple[float, float] = (1.0, 1.0)) -> int:
        """Position of a class; a new one starts at `start` times its prior."""
        if key not in self.keys:
            self.keys[key] = len(self.lines)
            self.lines.append(_prior_line(self.accelerator, key))
            self.counts.append(0)
            self.factors = np.append(self.factors, start)
            size = len(self.factors)
            grown = np.zeros((size, size))
            grown[:-2, :-2] = self.covariance
            grown[-2, -2], grown[-1, -1] = ((PRIOR_SPREAD * factor) ** 2 for factor in start)
            self.covariance = grown
        return self.keys[key]

    def line(self, key: OpKey) -> tuple[float, float]:
        """(seconds per call, seconds per unit of work) as learned so far."""
        position = self.keys.get(key)
        if position is None:
            return _prior_line(self.accelerator, key)
        fixed, per_work = self.lines[position]
        return fixed * float(self.factors[2 * position]), per_work * float(self.factors[2 * position + 1])

    def update(self, entries: Iterable[tuple[OpKey, float, float]], seconds: float) -> None:
        """One measured total of several classes' (key, work, calls)."""
        rows = [(self.index(key), work, calls) for key, work, calls in entries]
        x = np.zeros(len(self.factors))
        for position, work, calls in rows:
            fixed, per_work = self.lines[position]
            x[2 * position] += calls * fixed / seconds
            x[2 * position + 1] += work * per_work / seconds
        self._forget([position for position, _, _ in rows])
        spread = self.covariance @ x
        gain = spread / (float(x @ spread) + NOISE**2)
        self.factors = self.factors + gain * (1.0 - float(x @ self.factors))
        self.covariance = self.covariance - np.outer(gain, spread)
        self._bound(rows)

    def _forget(self, positions: list[int]) -> None:
        """Age what the classes at hand know, never beyond the prior's ignorance."""
        for position in positions:
            for i in (2 * position, 2 * position + 1):
                aged = min(self.covariance[i, i] / FORGETTING, PRIOR_SPREAD**2 * max(1.0, self.factors[i] ** 2))
                self.covariance[i, i] = max(self.covariance[i, i], aged)

    def _bound(self, rows: list[tuple[int, float, float]]) -> None:
        names = list(self.keys)
        for position, _, _ in rows:
            self.counts[position] += 1
            lowest = FACTOR_BOUNDS[0]
            if self.accelerator.name != "cpu":
                lowest = max(lowest, PRIORS[names[position][0]].efficiency / MAX_EFFICIENCY)
            span = slice(2 * position, 2 * position + 2)
            self.factors[span] = np.clip(self.factors[span], (FACTOR_BOUNDS[0], lowest), FACTOR_BOUNDS[1])


class Calibration:
    """Learned fixed parts and efficiencies per (operation class, link) and accelerator.

    `accelerators` adds types that the built-in table lacks.
    """

    def __init__(self, accelerators: Iterable[Accelerator] = ()) -> None:
        self._accelerators = ACCELERATORS | {a.name: a for a in accelerators}
        self._filters: dict[str, _Filter] = {}
        self._lines: dict[str, Counts] = {}

    def observe(
        self,
        op_class: Op | str,
        work: float,
        count: float,
        seconds: float,
        *,
        accelerator: str = "cpu",
        link: Link | None = None,
    ) -> None:
        """`count` calls of one class with `work` in total took `seconds`; `op_class` may name the link as well."""
        self.observe_total([(_key(op_class, link), work, count)], seconds, accelerator=accelerator)

    def observe_total(
        self, entries: Iterable[tuple[OpKey, float, float]], seconds: float, *, accelerator: str = "cpu"
    ) -> None:
        """Several classes' (key, work, count) together took `seconds`; times that are not positive are ignored."""
        rows = [row for row in entries if row[1] > 0 or row[2] > 0]
        if not rows or seconds <= 0 or not math.isfinite(seconds):
            return
        self._lines.clear()
        found = self._filter(accelerator)
        for key, _, _ in rows:
            if key not in found.keys:
                found.index(key, self._donor_factors(key, accelerator))
        found.update(rows, seconds)

    def predict(
        self, op_class: Op | str, work: float, count: float, *, accelerator: str = "cpu", link: Link | None = None
    ) -> float:
        """Seconds of `count` calls with `work` in total."""
        fixed, per_work = self.line(_key(op_class, link), accelerator)
        return count * fixed + work * per_work

    def line(self, key: OpKey, accelerator: str) -> tuple[float, float]:
        """(seconds per call, seconds per unit of work) of a class."""
        found = self._filters.get(accelerator)
        if found is None or key not in found.keys:
            return self._inherited(key, accelerator)
        return found.line(key)

    def lines(self, accelerator: str) -> Counts:
        """[2, classes]: seconds per unit of work and per call of every class, in the order of `operations.KEYS`."""
        if accelerator not in self._lines:
            pairs = [self.line(key, accelerator) for key in KEYS]
            self._lines[accelerator] = np.array([[p for _, p in pairs], [fixed for fixed, _ in pairs]])
        return self._lines[accelerator]

    def efficiency(self, op_class: Op | str, accelerator: str, *, link: Link | None = None) -> float:
        """Learned share of the peak for large work."""
        key = _key(op_class, link)
        return 1 / (self.line(key, accelerator)[1] * peak(self._accelerators[accelerator], key))

    def observations(self, op_class: Op | str, accelerator: str, *, link: Link | None = None) -> int:
        """How many measured times the class has on an accelerator."""
        found, key = self._filters.get(accelerator), _key(op_class, link)
        return found.counts[found.keys[key]] if found and key in found.keys else 0

    def _inherited(self, key: OpKey, accelerator: str) -> tuple[float, float]:
        """The prior of an unmeasured class, times what the nearest accelerator that measured it learned."""
        fixed, per_work = _prior_line(self._accelerators[accelerator], key)
        fixed_factor, work_factor = self._donor_factors(key, accelerator)
        return fixed * fixed_factor, per_work * work_factor

    def _donor_factors(self, key: OpKey, accelerator: str) -> tuple[float, float]:
        """(fixed, per work) factors that the nearest accelerator learned for a class; 1 where none did.

        Processor workers and accelerators do not lend to each other.
        """
        own = self._accelerators[accelerator]
        is_cpu = accelerator == "cpu"
        seen = [
            self._accelerators[name]
            for name, found in self._filters.items()
            if key in found.keys and (name == "cpu") == is_cpu
        ]
        if not seen:
            return 1.0, 1.0
        donor = self._filters[nearest_accelerator(own, seen).name]
        position = donor.keys[key]
        return float(donor.factors[2 * position]), float(donor.factors[2 * position + 1])

    def _filter(self, accelerator: str) -> _Filter:
        if accelerator not in self._filters:
            self._filters[accelerator] = _Filter(self._accelerators[accelerator])
        return self._filters[accelerator]

    def to_json(self) -> dict[str, Any]:
        """The whole state; `from_json` gives the same predictions and the same later learning."""
        return {
            "accelerators": [dataclasses.asdict(self._accelerators[name]) for name in self._filters],
            "filters": {
                name: {
                    "classes": [key_name(key) for key in found.keys],
                    "counts": found.counts,
                    "factors": found.factors.tolist(),
                    "covariance": found.covariance.tolist(),
                }
                for name, found in self._filters.items()
            },
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Calibration":
        result = cls(Accelerator(**fields) for fields in state["accelerators"])
        for name, saved in state["filters"].items():
            found = result._filter(name)
            for class_name in saved["classes"]:
                found.index(parse_key(class_name))
            found.counts = list(saved["counts"])
            found.factors = np.array(saved["factors"])
            found.covariance = np.array(saved["covariance"])
        return result


def _key(op_class: Op | str, link: Link | None) -> OpKey:
    if isinstance(op_class, Op):
        return op_class, link
    op, named_link = parse_key(op_class)
    return op, link or named_link

"""What each operation class really costs on each accelerator, learned online from measured times.

The time of a class is linear in what was counted: seconds = calls * fixed + work / (peak * efficiency). A saturating
efficiency, peak * w / (w + w_half) for w work per call, is the same line, since w_half / peak joins the fixed part.

Both numbers of a class start at a conservative prior and carry a learned factor. All factors live in one recursive
least-squares filter over their logarithms (positive whatever is measured; a measured total of several classes moves
each by its share of the time). Its prior covariance says what goes together: everything on one accelerator (clock,
software), compute with compute and network with network, and a class with itself on accelerators of similar peaks.
So one measured total already corrects all classes together, and an accelerator never seen starts from the nearest
ones that were.

It does not know plans, models or layouts. Its state is saved and loaded.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.cluster import ACCELERATORS, Accelerator, Link, log_distance
from nereus.engine_facts import Op
from nereus.planner.prices.operations import COLLECTIVES, COMPUTE, KEYS, MEMORY, Counts, OpKey, key_name, parse_key

FORGETTING = 0.95
"""Weight that an observation keeps with each later one."""

SURPRISE = 3.0
"""Standard deviations beyond which a time says that something changed: variances grow in proportion to the excess, so
a change is followed within a few observations and one outlier moves little."""

MAX_INFLATION = 4.0
"""Largest such growth after one observation."""

NOISE = 0.03
"""Relative standard deviation of one measured time."""

COMMON, GROUP, CLASS, DEVICE, OWN = 0.2, 0.1, 0.3, 0.3, 0.05
"""Standard deviations of a log factor's parts: shared by all classes, by compute or by network, by a class on all
accelerators, by an accelerator, by nothing."""

DISTANCE_SCALE = 6.0
"""Log-peak distance over which accelerators stop learning from each other (A100 to H100: 1.5)."""

FACTOR_BOUNDS = (1 / 64, 64.0)
"""Bounds of a learned factor."""

RELINEARIZATIONS = 3
"""Steps of one update; a total is not linear in log factors."""

Entries = Iterable[tuple[OpKey, float, float]]
"""(class, work, calls)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prior:
    """Conservative start of a class: efficiency of the peak; seconds per call or hop on an accelerator and on a CPU."""

    efficiency: float
    fixed_s: float
    cpu_fixed_s: float


PRIORS = {
    Op.GEMM: Prior(0.62, 10e-6, 20e-6),
    Op.ATTENTION: Prior(0.30, 10e-6, 60e-6),
    Op.ATTENTION_BACKWARD: Prior(0.22, 20e-6, 120e-6),
    Op.ATTENTION_DECODE: Prior(0.55, 8e-6, 60e-6),
    Op.DECODE_GEMM: Prior(0.65, 6e-6, 20e-6),
    Op.ELEMENTWISE: Prior(0.65, 3e-6, 15e-6),
    Op.ALL_REDUCE: Prior(0.60, 5e-6, 150e-6),
    Op.ALL_GATHER: Prior(0.60, 1.5e-6, 150e-6),
    Op.REDUCE_SCATTER: Prior(0.60, 1.5e-6, 150e-6),
    Op.ALL_TO_ALL: Prior(0.40, 5e-6, 150e-6),
    Op.POINT_TO_POINT: Prior(0.60, 8e-6, 150e-6),
    Op.LAUNCH: Prior(1.0, 0.5e-3, 1e-3),
    Op.GROUP_SETUP: Prior(1.0, 0.5, 0.05),
}
"""Rates of kernels measured alone, lowered to what long training sustains: GEMM 0.79 of peak alone on H100 (0.62 under
its power limit), FlashAttention-2 0.3 of peak forward and 0.22 backward on H100, decode GEMM 0.77-0.84 of memory
bandwidth, NCCL 0.7-0.75 of the link; small-message times of 8-rank collectives give the seconds per hop."""

AMPERE = {Op.GEMM: 0.76, Op.ATTENTION: 0.45, Op.ATTENTION_BACKWARD: 0.34}
"""Efficiencies of the generation that neither throttles nor needs newer attention kernels."""

PRIOR_EFFICIENCY: dict[str, Mapping[Op, float]] = {
    "a100": AMPERE,
    "a100-40gb": AMPERE,
    "a100-pcie": AMPERE,
    "a800": AMPERE,
    "a10": AMPERE,
    "cpu": {Op.ATTENTION: 0.25, Op.ATTENTION_BACKWARD: 0.25},
}
"""Where an accelerator's prior efficiency differs from `PRIORS`."""

INTER_NODE_EFFICIENCY = 0.75
"""Of the network cards for large messages; small ones pay per hop."""

INTER_NODE_FIXED_FACTOR = 2.0
"""A hop between nodes takes about twice as long as inside one."""


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


def prior_line(accelerator: Accelerator, key: OpKey) -> tuple[float, float]:
    """(seconds per call, seconds per unit of work) before anything was measured."""
    op, link = key
    prior = PRIORS[op]
    fixed = prior.cpu_fixed_s if accelerator.name == "cpu" else prior.fixed_s
    efficiency = PRIOR_EFFICIENCY.get(accelerator.name, {}).get(op, prior.efficiency)
    if link is Link.INTER_NODE:
        fixed *= INTER_NODE_FIXED_FACTOR
        efficiency = INTER_NODE_EFFICIENCY
    return fixed, 1 / (peak(accelerator, key) * efficiency)


@dataclasses.dataclass(frozen=True, slots=True)
class _Factor:
    """One learned number: of an accelerator, a class, and of its fixed part or its work."""

    accelerator: str
    key: OpKey
    fixed: bool


class Calibration:
    """Learned fixed parts and efficiencies per (operation class, link) and accelerator.

    `accelerators` adds types that the built-in table lacks. In what follows `hidden` are classes that run beside the
    others (gradient reduction under the backward pass): both together take the root of the sum of their squares.
    """

    def __init__(self, accelerators: Iterable[Accelerator] = (), *, forgetting: float = FORGETTING) -> None:
        """`forgetting` 1: the times come from a machine that does not change, and all count the same."""
        self._forgetting = forgetting
        self._accelerators = ACCELERATORS | {a.name: a for a in accelerators}
        self._index: dict[_Factor, int] = {}
        self._logs = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        self._counts: dict[tuple[str, OpKey], int] = {}
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
        self, entries: Entries, seconds: float, *, accelerator: str = "cpu", hidden: Entries = (), noise: float = NOISE
    ) -> None:
        """Several classes together took `seconds`, known to a relative `noise`; times not above zero are ignored."""
        shown = [row for row in entries if row[1] > 0 or row[2] > 0]
        beside = [row for row in hidden if row[1] > 0 or row[2] > 0]
        if not (shown or beside) or seconds <= 0 or not math.isfinite(seconds):
            return
        keys = list(dict.fromkeys(key for key, _, _ in shown + beside))
        self._extend([_Factor(accelerator, key, fixed) for key in keys for fixed in (True, False)])
        for key in keys:
            self._counts[accelerator, key] = self._counts.get((accelerator, key), 0) + 1
        self._inflate(accelerator, 1 / self._forgetting)
        self._update(shown, beside, math.log(seconds), accelerator, noise)
        self._lines.clear()

    def predict(
        self, op_class: Op | str, work: float, count: float, *, accelerator: str = "cpu", link: Link | None = None
    ) -> float:
        """Seconds of `count` calls with `work` in total."""
        fixed, per_work = self.line(_key(op_class, link), accelerator)
        return count * fixed + work * per_work

    def predict_total(self, entries: Entries, *, accelerator: str = "cpu", hidden: Entries = ()) -> float:
        """Seconds of several classes together."""
        shown, beside = (
            sum(self.predict(key[0], work, calls, accelerator=accelerator, link=key[1]) for key, work, calls in rows)
            for rows in (entries, hidden)
        )
        return math.hypot(shown, beside)

    def line(self, key: OpKey, accelerator: str) -> tuple[float, float]:
        """(seconds per call, seconds per unit of work) of a class."""
        per_work, fixed = self.lines(accelerator)[:, KEYS.index(_as_key(key))]
        return float(fixed), float(per_work)

    def lines(self, accelerator: str) -> Counts:
        """[2, classes]: seconds per unit of work and per call of every class, in the order of `operations.KEYS`."""
        if accelerator not in self._lines:
            own = self._accelerators[accelerator]
            priors = np.array([prior_line(own, key) for key in KEYS])
            wanted = [_Factor(accelerator, key, fixed) for key in KEYS for fixed in (True, False)]
            learned = np.exp(self._expected(wanted)).reshape(-1, 2)
            self._lines[accelerator] = (priors * learned).T[::-1].copy()
        return self._lines[accelerator]

    def efficiency(self, op_class: Op | str, accelerator: str, *, link: Link | None = None) -> float:
        """Learned share of the peak for large work."""
        key = _key(op_class, link)
        return 1 / (self.line(key, accelerator)[1] * peak(self._accelerators[accelerator], key))

    def observations(self, op_class: Op | str, accelerator: str, *, link: Link | None = None) -> int:
        """In how many measured times the class took part on an accelerator."""
        return self._counts.get((accelerator, _key(op_class, link)), 0)

    def to_json(self) -> dict[str, Any]:
        """The whole state; `from_json` gives the same predictions and the same later learning."""
        names = sorted({factor.accelerator for factor in self._index})
        return {
            "forgetting": self._forgetting,
            "accelerators": [dataclasses.asdict(self._accelerators[name]) for name in names],
            "factors": [[f.accelerator, key_name(f.key), f.fixed] for f in self._index],
            "logs": self._logs.tolist(),
            "covariance": self._covariance.tolist(),
            "observations": [[name, key_name(key), count] for (name, key), count in self._counts.items()],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Calibration":
        accelerators = [Accelerator(**fields) for fields in state["accelerators"]]
        result = cls(accelerators, forgetting=state["forgetting"])
        factors = [_Factor(name, parse_key(key), fixed) for name, key, fixed in state["factors"]]
        result._index = {factor: position for position, factor in enumerate(factors)}
        result._logs = np.array(state["logs"])
        result._covariance = np.array(state["covariance"]).reshape(len(factors), len(factors))
        result._counts = {(name, parse_key(key)): count for name, key, count in state["observations"]}
        return result

    def _update(
        self,
        shown: list[tuple[OpKey, float, float]],
        beside: list[tuple[OpKey, float, float]],
        target: float,
        accelerator: str,
        noise: float,
    ) -> None:
        """One iterated step of the filter towards log seconds `target`."""
        start, logs = self._logs, self._logs
        log_total, slope = self._linearize(shown, beside, accelerator, logs)
        deviation = math.sqrt(float(slope @ self._covariance @ slope) + noise**2)
        surprise = abs(target - log_total) / (SURPRISE * deviation)
        if surprise > 1 and self._forgetting < 1:
            self._inflate(accelerator, min(surprise, MAX_INFLATION))
        for _ in range(RELINEARIZATIONS):
            log_total, slope = self._linearize(shown, beside, accelerator, logs)
            spread = self._covariance @ slope
            gain = spread / (float(slope @ spread) + noise**2)
            logs = self._bounded(start + gain * (target - log_total - float(slope @ (start - logs))))
        self._logs = logs
        covariance = self._covariance - np.outer(gain, spread)
        self._covariance = (covariance + covariance.T) / 2

    def _linearize(
        self,
        shown: list[tuple[OpKey, float, float]],
        beside: list[tuple[OpKey, float, float]],
        accelerator: str,
        logs: Counts,
    ) -> tuple[float, Counts]:
        """(log of the predicted total, its derivative by each log factor)."""
        own = self._accelerators[accelerator]
        seconds = [np.zeros(len(logs)), np.zeros(len(logs))]
        for part, rows in enumerate((shown, beside)):
            for key, work, calls in rows:
                for fixed, amount in zip((True, False), (calls, work), strict=True):
                    position = self._index[_Factor(accelerator, key, fixed)]
                    seconds[part][position] += (
                        amount * prior_line(own, key)[0 if fixed else 1] * math.exp(logs[position])
                    )
        sums = [float(part.sum()) for part in seconds]
        total = math.hypot(*sums)
        slope = (seconds[0] * sums[0] + seconds[1] * sums[1]) / total**2
        return math.log(total), slope

    def _bounded(self, logs: Counts) -> Counts:
        """Factors within `FACTOR_BOUNDS`, and efficiencies up to 1 (a CPU's peak is a typical core's: not bounded)."""
        lowest = np.full(len(logs), math.log(FACTOR_BOUNDS[0]))
        for factor, position in self._index.items():
            if not factor.fixed and factor.accelerator != "cpu":
                own = self._accelerators[factor.accelerator]
                limit = peak(own, factor.key) * prior_line(own, factor.key)[1]
                lowest[position] = max(lowest[position], -math.log(limit)) if math.isfinite(limit) else lowest[position]
        return np.clip(logs, lowest, math.log(FACTOR_BOUNDS[1]))

    def _extend(self, factors: list[_Factor]) -> None:
        """Add factors, with the mean and covariance that what is known already implies for them."""
        new = [factor for factor in factors if factor not in self._index]
        if not new:
            return
        old = list(self._index)
        transfer, remainder = self._conditional(new, old)
        cross = transfer @ self._covariance
        own = remainder + cross @ transfer.T
        self._logs = np.concatenate([self._logs, transfer @ self._logs])
        self._covariance = np.block([[self._covariance, cross.T], [cross, own]])
        for factor in new:
            self._index[factor] = len(self._index)

    def _expected(self, factors: list[_Factor]) -> Counts:
        """Log factors: learned ones, and what these imply for the others."""
        new = [factor for factor in factors if factor not in self._index]
        implied = iter(self._conditional(new, list(self._index))[0] @ self._logs)
        return np.array([self._logs[self._index[f]] if f in self._index else float(next(implied)) for f in factors])

    def _conditional(self, new: list[_Factor], old: list[_Factor]) -> tuple[Counts, Counts]:
        """(matrix from old to expected new factors, covariance of new ones given old) under the prior."""
        joint, size = self._prior_covariance(new + old), len(new)
        among, cross, known = joint[:size, :size], joint[:size, size:], joint[size:, size:]
        transfer = np.zeros((size, len(old)))
        if old and new:
            transfer[:] = np.linalg.solve(known, cross.T).T
        return transfer, among - transfer @ cross.T

    def _prior_covariance(self, factors: list[_Factor]) -> Counts:
        """[n, n]; fixed parts and work have nothing in common."""
        names = list(dict.fromkeys(f.accelerator for f in factors))
        likeness = np.array([[self._likeness(a, b) for b in names] for a in names])
        device = np.array([names.index(f.accelerator) for f in factors], dtype=int)
        classes = list(dict.fromkeys(f.key for f in factors))
        cls = np.array([classes.index(f.key) for f in factors], dtype=int)
        network = np.array([f.key[0] in COLLECTIVES for f in factors], dtype=int)
        fixed = np.array([f.fixed for f in factors], dtype=int)
        shared = COMMON**2 + GROUP**2 * _same(network) + CLASS**2 * _same(cls)
        alike = likeness[np.ix_(device, device)] if factors else np.zeros((0, 0))
        return _same(fixed) * (alike * shared + DEVICE**2 * _same(device)) + OWN**2 * np.eye(len(factors))

    def _likeness(self, a: str, b: str) -> float:
        """1 for the same accelerator, falling with the distance of the peaks; CPU workers stand apart."""
        if a == b:
            return 1.0
        if "cpu" in (a, b):
            return 0.0
        return math.exp(-log_distance(self._accelerators[a], self._accelerators[b]) / DISTANCE_SCALE)

    def _inflate(self, accelerator: str, times: float) -> None:
        """Multiply the variances of an accelerator's factors, never beyond the prior's ignorance."""
        factors = list(self._index)
        wider = np.array([math.sqrt(times) if f.accelerator == accelerator else 1.0 for f in factors])
        inflated = self._covariance * np.outer(wider, wider)
        limit = np.sqrt(np.minimum(1.0, np.diag(self._prior_covariance(factors)) / np.diag(inflated)))
        self._covariance = inflated * np.outer(limit, limit)


def _same(labels: npt.NDArray[np.int_]) -> Counts:
    """[n, n]: 1 where two labels are equal."""
    return np.equal.outer(labels, labels).astype(np.float64)


def _as_key(key: OpKey) -> OpKey:
    """The class under which a link is learned: a device's link to itself counts as inside the node."""
    return (key[0], Link.INTRA_NODE) if key[1] is Link.SELF else key


def _key(op_class: Op | str, link: Link | None) -> OpKey:
    if isinstance(op_class, Op):
        return _as_key((op_class, link))
    op, named_link = parse_key(op_class)
    return _as_key((op, link or named_link))

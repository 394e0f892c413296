"""Where blocks of devices can lie: the line of devices, and what a block on it is.

The devices stand on a line, node after node, the strongest type first. A block is an interval of it: its
tensor-parallel groups fill it from the left, none crosses a node, and devices left over at the end of a node (fewer
than a group) belong to the block and stay idle. A block may start anywhere.
"""

import bisect
import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nereus.cluster import HEADROOM, Accelerator, Cluster, Device


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A kind of block: priced alike wherever it starts.

    accelerator: name of the slowest type in the block. one_node: it lies in a single node.
    low, high: the end of the block lies in (low, high].
    """

    accelerator: str
    one_node: bool
    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """What `place` must know of one model-stage (or of two that share parameters and devices).

    grain, groups: so many devices that must stay in one node, so many times.
    peak: bytes it adds beyond `idle` while it is active. index: its bit in the masks of conflicts.
    """

    index: int
    grain: int
    groups: int
    region: int
    idle: int
    peak: int


class Line:
    """The devices of a cluster in planning order, and where blocks fit.

    memory_cap_bytes: a device is taken to have no more memory than this. headroom: share of memory left free.
    """

    def __init__(self, cluster: Cluster, *, memory_cap_bytes: int | None = None, headroom: float = HEADROOM) -> None:
        self.headroom = headroom
        self.devices, self.node_starts = _planning_order(cluster)
        self.num_devices = len(self.devices)
        self.node_sizes = [
            b - a for a, b in zip(self.node_starts, [*self.node_starts[1:], self.num_devices], strict=True)
        ]
        self.max_node = max(self.node_sizes)
        cap = math.inf if memory_cap_bytes is None else memory_cap_bytes
        usable = {memory: int(min(memory, cap) * (1 - headroom)) for memory in {d.memory_bytes for d in self.devices}}
        self.runs = _runs(self.devices, usable)
        self.max_capacity = max(capacity for _, capacity in self.runs)
        self.regions = self._regions(speed_ranks(cluster))
        self.anywhere = len(self.regions)
        self._kinds = (*self.regions, Region(self.devices[-1].accelerator, False, 0, self.num_devices))
        self._slots: dict[int, list[int]] = {}
        self._spans: dict[tuple[int, int, int, int], tuple[int, int] | None] = {}

    @property
    def total_capacity(self) -> int:
        """Usable bytes of all devices."""
        ends = [first for first, _ in self.runs[1:]] + [self.num_devices]
        return sum((end - first) * capacity for (first, capacity), end in zip(self.runs, ends, strict=True))

    def with_capacity(self, usable_bytes: int) -> "Line":
        """The same line with so many usable bytes on every device."""
        line = copy.copy(self)
        line.runs, line.max_capacity = [(first, usable_bytes) for first, _ in self.runs], usable_bytes
        return line

    def _regions(self, rank: Mapping[str, int]) -> tuple[Region, ...]:
        """Two for each type, in the order of `regions`: a block runs at the slowest type found up to its end."""
        types = [d.accelerator for d in self.devices]
        slowest, regions, low = types[0], list[Region](), 0
        for position in range(1, self.num_devices + 1):
            if position < self.num_devices and rank[types[position]] <= rank[slowest]:
                continue
            regions += [Region(slowest, one_node, low, position) for one_node in (True, False)]
            if position < self.num_devices:
                slowest, low = types[position], position
        return tuple(regions)

    def slots(self, tp: int) -> list[int]:
        """Groups of `tp` devices that fit in the nodes before each node; one entry more than nodes."""
        if tp not in self._slots:
            sums, total = [0], 0
            for size in self.node_sizes:
                total += size // tp
                sums.append(total)
            self._slots[tp] = sums
        return self._slots[tp]

    def groups_fit(self, tp: int) -> int:
        """Groups of `tp` devices that the whole line holds."""
        return self.slots(tp)[-1]

    def node_at(self, position: int) -> int:
        return bisect.bisect_right(self.node_starts, position) - 1

    def end(self, start: int, tp: int, groups: int) -> int | None:
        """The end of a block that starts at a position, or None where the line is too short."""
        node = self.node_at(start)
        offset = start - self.node_starts[node]
        here = (self.node_sizes[node] - offset) // tp
        if groups <= here:
            return start + groups * tp
        slots = self.slots(tp)
        wanted = slots[node + 1] + groups - here
        if wanted > slots[-1]:
            return None
        last = bisect.bisect_left(slots, wanted) - 1
        return self.node_starts[last] + (wanted - slots[last]) * tp

    def first_group(self, start: int, tp: int) -> int | None:
        """Where the first group of a block that starts at a position really lies."""
        for node in range(self.node_at(start), len(self.node_sizes)):
            begin = max(start, self.node_starts[node])
            if self.node_starts[node] + self.node_sizes[node] - begin >= tp:
                return begin
        return None

    def next_span(self, position: int, tp: int, groups: int, region_index: int) -> tuple[int, int] | None:
        """(start, end) of the first such block in the region that starts at or after a position; None without one."""
        key = (position, tp, groups, region_index)
        if key not in self._spans:
            self._spans[key] = self._next_span(position, tp, groups, self._kinds[region_index])
        return self._spans[key]

    def _next_span(self, position: int, tp: int, groups: int, region: Region) -> tuple[int, int] | None:
        low = max(position, 0)
        if low >= self.num_devices:
            return None
        start = self._reaching(low, tp, groups, region.low + 1)
        if start is not None and region.one_node:
            start = self._inside_node(start, tp * groups)
        if start is None:
            return None
        start = self.first_group(start, tp)
        end = self.end(start, tp, groups) if start is not None else None
        return (start, end) if start is not None and end is not None and end <= region.high else None

    def _reaching(self, position: int, tp: int, groups: int, end: int) -> int | None:
        """The smallest start at or after a position whose block ends at `end` or later."""
        first, last = position, self.num_devices
        while first < last:
            middle = (first + last) // 2
            found = self.end(middle, tp, groups)
            if found is None or found >= end:
                last = middle
            else:
                first = middle + 1
        return first if first < self.num_devices and self.end(first, tp, groups) is not None else None

    def _inside_node(self, position: int, size: int) -> int | None:
        for node in range(self.node_at(position), len(self.node_sizes)):
            begin = max(position, self.node_starts[node])
            if self.node_starts[node] + self.node_sizes[node] - begin >= size:
                return begin
        return None

    def capacity_at(self, position: int) -> int:
        """Usable bytes of the device at a position."""
        return self.runs[bisect.bisect_right(self.runs, (position, 1 << 62)) - 1][1]

    def positions(self, start: int, tp: int, groups: int) -> npt.NDArray[np.int64]:
        """Positions of the devices of a block, group after group."""
        parts, node, left = list[npt.NDArray[np.int64]](), self.node_at(start), groups
        while left:
            begin = max(start, self.node_starts[node])
            here = min(left, (self.node_starts[node] + self.node_sizes[node] - begin) // tp)
            parts.append(np.arange(begin, begin + here * tp))
            node, left = node + 1, left - here
        return np.concatenate(parts)

    def groups(self, start: int, tp: int, groups: int) -> list[int]:
        """Device ids of a block, group after group."""
        return [self.devices[position].id for position in self.positions(start, tp, groups)]


def speed_ranks(cluster: Cluster) -> dict[str, int]:
    """Rank of each type, fastest first: by peak operations, then memory and link bandwidth, then name."""

    def slowness(a: Accelerator) -> tuple[float, float, float, str]:
        return -a.flops_per_s, -a.memory_bytes_per_s, -a.intra_node_bytes_per_s, a.name

    return {a.name: rank for rank, a in enumerate(sorted(cluster.accelerators, key=slowness))}


def _planning_order(cluster: Cluster) -> tuple[tuple[Device, ...], list[int]]:
    """Devices node after node: nodes by their weakest device's type, strongest first, larger nodes first."""
    rank = speed_ranks(cluster)
    nodes = [sorted(node, key=lambda d: (rank[d.accelerator], -d.memory_bytes)) for node in cluster.nodes.values()]
    nodes.sort(key=lambda node: (rank[node[-1].accelerator], rank[node[0].accelerator], -node[-1].memory_bytes))
    starts, devices = list[int](), list[Device]()
    for node in nodes:
        starts.append(len(devices))
        devices += node
    return tuple(devices), starts


def _runs(devices: Sequence[Device], usable: dict[int, int]) -> list[tuple[int, int]]:
    """(first position, usable bytes) of each run of devices of one type and memory size."""
    runs: list[tuple[int, int]] = []
    before: tuple[str, int] | None = None
    for position, device in enumerate(devices):
        kind = (device.accelerator, device.memory_bytes)
        if kind != before:
            runs.append((position, usable[device.memory_bytes]))
            before = kind
    return runs


@functools.lru_cache(maxsize=16)
def line_of(cluster: Cluster, memory_cap_bytes: int | None, headroom: float) -> Line:
    """The line of a cluster, kept between decisions."""
    return Line(cluster, memory_cap_bytes=memory_cap_bytes, headroom=headroom)

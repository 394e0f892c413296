"""Where blocks of devices can lie: the line of devices, what a block on it is, and an exact search for positions.

The devices stand on a line, node after node, the strongest type first. A block is an interval of it: its
tensor-parallel groups fill it from the left, none crosses a node, and devices left over at the end of a node (fewer
than a group) belong to the block and stay idle. A block may start anywhere.

`place` decides whether blocks fit together, and where: it is exact. Overlap is only ever bad (it costs memory or
time), so any arrangement can be pushed to the left until every block starts at the beginning of a run of equal
devices or right behind another block; only such arrangements are tried, from left to right.
"""

import bisect
import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nereus.cluster import Accelerator, Cluster, Device

Spans = tuple[tuple[int, int], ...]
"""[start, end) of blocks."""


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

    def __init__(self, cluster: Cluster, *, memory_cap_bytes: int | None = None, headroom: float = 0.1) -> None:
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
        """Two for each type: a block runs at the slowest type found up to its end."""
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


class _Arrangement:
    """Blocks placed so far, from left to right."""

    __slots__ = ("blocks", "conflicts", "hopeless", "line", "spans")

    def __init__(self, line: Line, blocks: Sequence[Block], conflicts: Sequence[int]) -> None:
        self.line, self.blocks, self.conflicts = line, blocks, conflicts
        self.spans: list[tuple[int, int] | None] = [None] * len(blocks)
        self.hopeless: set[tuple[tuple[int, int] | None, ...]] = set()

    def admits(self, place: int, start: int, end: int) -> bool:
        """Whether block number `place` can lie at [start, end): conflicts, and memory wherever cover can be highest."""
        block, mask = self.blocks[place], self.conflicts[place]
        idle, peak = block.idle, block.peak
        for other, span in zip(self.blocks, self.spans, strict=True):
            if span is not None and span[0] < end and span[1] > start:
                if mask >> other.index & 1:
                    return False
                if span[0] <= start:
                    idle, peak = idle + other.idle, max(peak, other.peak)
        if idle + peak > self.line.capacity_at(start):
            return False
        return all(self._fits(place, first) for first, _ in self.line.runs[1:] if start < first < end)

    def _fits(self, place: int, point: int) -> bool:
        block = self.blocks[place]
        idle, peak = block.idle, block.peak
        for other, span in enumerate(self.spans):
            if span is not None and span[0] <= point < span[1]:
                idle += self.blocks[other].idle
                peak = max(peak, self.blocks[other].peak)
        return idle + peak <= self.line.capacity_at(point)

    def options(self, place: int, first: int) -> list[tuple[int, int]]:
        """(start, end) of the positions at or after `first` that block number `place` may take."""
        block, line = self.blocks[place], self.line
        behind = {position for position, _ in line.runs}
        behind.update([span[1] for span in self.spans if span is not None])
        found: list[tuple[int, int]] = []
        for position in sorted(behind):
            span = line.next_span(position, block.grain, block.groups, block.region)
            if span is None:
                break
            if span[0] >= first and (not found or found[-1] != span):
                found.append(span)
        return found

    def begin_at(self, start: int) -> bool:
        """Place all blocks at one start; leaves their spans set where memory suffices."""
        self.spans = [None] * len(self.blocks)
        for place, block in enumerate(self.blocks):
            end = self.line.end(start, block.grain, block.groups)
            if end is None or not self.admits(place, start, end):
                return False
            self.spans[place] = (start, end)
        return True

    def solve(self, left: int, first: int) -> bool:
        """Place all blocks of the mask `left` at or after `first`; leaves their spans set where it succeeds."""
        if not left:
            return True
        reached = tuple(self.spans)
        if reached in self.hopeless:
            return False
        for place in range(len(self.blocks)):
            if not left >> place & 1:
                continue
            for start, end in self.options(place, first):
                if not self.admits(place, start, end):
                    continue
                self.spans[place] = (start, end)
                if self.solve(left & ~(1 << place), start):
                    return True
                self.spans[place] = None
        self.hopeless.add(reached)
        return False


def place(line: Line, blocks: Sequence[Block], conflicts: Sequence[int], *, at_start: bool = False) -> Spans | None:
    """(start, end) of every block, or None where they do not fit together.

    conflicts: for each block the mask of block indices it must not overlap.
    at_start: all begin at one device, the first at which all can.
    """
    arrangement = _Arrangement(line, blocks, conflicts)
    if at_start:
        found = any(arrangement.begin_at(start) for start in _common_starts(line, blocks))
    else:
        found = (
            _enough_memory(line, blocks)
            and _enough_devices(line, blocks, conflicts)
            and arrangement.solve((1 << len(blocks)) - 1, 0)
        )
    return tuple(span for span in arrangement.spans if span is not None) if found else None


def _common_starts(line: Line, blocks: Sequence[Block]) -> Iterator[int]:
    """The first position at or after the beginning of each run of equal devices where every block may begin.

    Later ones of a run have nothing that the first has not: all blocks only end further to the right.
    """
    for first, _ in line.runs:
        start = _common_start(line, blocks, first)
        if start is None:
            return
        yield start


def _common_start(line: Line, blocks: Sequence[Block], position: int) -> int | None:
    while True:
        furthest = position
        for block in blocks:
            span = line.next_span(position, block.grain, block.groups, block.region)
            if span is None:
                return None
            furthest = max(furthest, span[0])
        if furthest == position:
            return position
        position = furthest


class Placer:
    """`place` on one line with what earlier answers imply.

    Blocks that need no more groups, idle and peak bytes than others that fit do fit as well, in the same places; those
    that need no less than others that do not fit do not. (Where types differ a block's end decides how it is priced,
    and only blocks of equally many groups are compared.)
    """

    def __init__(self, line: Line, *, at_start: bool) -> None:
        self.line, self.at_start, self.num_solved = line, at_start, 0
        self._any_length = len(line.regions) <= 2
        self._known: dict[tuple[object, ...], tuple[_Vectors, _Vectors, list[Spans]]] = {}

    def place(self, blocks: Sequence[Block], conflicts: tuple[int, ...]) -> Spans | None:
        groups = tuple(block.groups for block in blocks)
        shapes = tuple((block.index, block.grain, block.region) for block in blocks)
        key = (shapes, conflicts) if self._any_length else (shapes, conflicts, groups)
        needs = (*groups, *(block.idle for block in blocks), *(block.peak for block in blocks))
        if key not in self._known:
            self._known[key] = _Vectors(len(needs)), _Vectors(len(needs)), []
        misfits, fits, places = self._known[key]
        if misfits.any_within(needs):
            return None
        known = fits.first_around(needs)
        if known is not None:
            return self._shortened(places[known], blocks)
        self.num_solved += 1
        found = place(self.line, blocks, conflicts, at_start=self.at_start)
        if found is None:
            misfits.append(needs)
        else:
            fits.append(needs)
            places.append(found)
        return found

    def _shortened(self, spans: Spans, blocks: Sequence[Block]) -> Spans:
        """Blocks that start where longer ones do."""
        found = []
        for (start, end), block in zip(spans, blocks, strict=True):
            own = self.line.end(start, block.grain, block.groups)
            assert own is not None and own <= end
            found.append((start, own))
        return tuple(found)


class _Vectors:
    """Vectors of one length, compared with another all at once."""

    def __init__(self, length: int) -> None:
        self._rows = np.zeros((16, length), dtype=np.int64)
        self._count = 0

    def append(self, vector: Sequence[int]) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = vector
        self._count += 1

    def any_within(self, vector: Sequence[int]) -> bool:
        """Whether any row is nowhere larger than the vector."""
        return self._count > 0 and bool((self._rows[: self._count] <= np.array(vector)).all(axis=1).any())

    def first_around(self, vector: Sequence[int]) -> int | None:
        """The first row that is nowhere smaller than the vector."""
        if not self._count:
            return None
        around = np.flatnonzero((self._rows[: self._count] >= np.array(vector)).all(axis=1))
        return int(around[0]) if len(around) else None


def _enough_memory(line: Line, blocks: Sequence[Block]) -> bool:
    """Whether what all blocks keep, and the one that works with most beside it, is no more than all devices have."""
    sizes = [block.grain * block.groups for block in blocks]
    kept = sum(size * block.idle for size, block in zip(sizes, blocks, strict=True))
    most = max((size * block.peak for size, block in zip(sizes, blocks, strict=True)), default=0)
    return kept + most <= line.total_capacity


def _enough_devices(line: Line, blocks: Sequence[Block], conflicts: Sequence[int]) -> bool:
    """Whether every set of blocks has as many devices as it needs, given how many of them can share one at most."""
    index = {block.index: place for place, block in enumerate(blocks)}
    excluded = [sum(1 << place for bit, place in index.items() if mask >> bit & 1) for mask in conflicts]
    sharing, shares, needed = [True], [0], [0]
    for chosen in range(1, 1 << len(blocks)):
        last = chosen.bit_length() - 1
        rest = chosen ^ (1 << last)
        members = [block for place, block in enumerate(blocks) if chosen >> place & 1]
        fits = sharing[rest] and not excluded[last] & rest
        fits = fits and sum(block.idle for block in members) + max(b.peak for b in members) <= line.max_capacity
        most = len(members) if fits else max(shares[chosen ^ (1 << p)] for p in range(last + 1) if chosen >> p & 1)
        sharing.append(fits)
        shares.append(most)
        needed.append(needed[rest] + blocks[last].grain * blocks[last].groups)
        if needed[chosen] > most * line.num_devices:
            return False
    return True

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
import itertools
from collections.abc import Mapping, Sequence

from nereus.cluster import Accelerator, Cluster, Device


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
        usable = {
            memory: int(min(memory, memory_cap_bytes or memory) * (1 - headroom))
            for memory in {d.memory_bytes for d in self.devices}
        }
        self.runs = _runs(self.devices, usable)
        self.max_capacity = max(capacity for _, capacity in self.runs)
        self.regions = self._regions(speed_ranks(cluster))
        self._slots: dict[int, list[int]] = {}
        self._starts: dict[tuple[int, int, int, int], int | None] = {}

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

    def in_region(self, start: int, end: int, region: Region) -> bool:
        if not region.low < end <= region.high:
            return False
        return not region.one_node or self.node_at(start) == self.node_at(end - 1)

    def next_start(self, position: int, tp: int, groups: int, region_index: int) -> int | None:
        """The smallest start at or after a position where such a block lies in the region; None where there is none."""
        key = (position, tp, groups, region_index)
        if key not in self._starts:
            self._starts[key] = self._next_start(position, tp, groups, self.regions[region_index])
        return self._starts[key]

    def _next_start(self, position: int, tp: int, groups: int, region: Region) -> int | None:
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
        return start if end is not None and end <= region.high else None

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

    def groups(self, start: int, tp: int, groups: int) -> list[int]:
        """Device ids of a block, group after group."""
        ids: list[int] = []
        node = self.node_at(start)
        position = start
        for _ in range(groups):
            while self.node_starts[node] + self.node_sizes[node] - position < tp:
                node += 1
                position = self.node_starts[node]
            ids += [d.id for d in self.devices[position : position + tp]]
            position += tp
        return ids


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

    __slots__ = ("at_start", "blocks", "conflicts", "hopeless", "line", "spans")

    def __init__(self, line: Line, blocks: Sequence[Block], conflicts: Sequence[int], *, at_start: bool) -> None:
        self.line, self.blocks, self.conflicts, self.at_start = line, blocks, conflicts, at_start
        self.spans: list[tuple[int, int] | None] = [None] * len(blocks)
        self.hopeless: set[tuple[tuple[int, int] | None, ...]] = set()

    def admits(self, place: int, start: int, end: int) -> bool:
        """Whether block number `place` can lie at [start, end): conflicts, and memory wherever cover can be highest."""
        mask = self.conflicts[place]
        points = [start]
        for other, span in enumerate(self.spans):
            if span is not None and span[0] < end and span[1] > start and mask >> self.blocks[other].index & 1:
                return False
        if len(self.line.runs) > 1:
            points += [first for first, _ in self.line.runs if start < first < end]
        return all(self._fits(place, point) for point in points)

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
        block = self.blocks[place]
        if self.at_start:
            end = self.line.end(0, block.grain, block.groups)
            fits = end is not None and self.line.in_region(0, end, self.line.regions[block.region])
            return [(0, end)] if fits and end is not None else []
        line, spans = self.line, self.spans
        behind = {position for position, _ in line.runs}
        behind.update([span[1] for span in spans if span is not None and span[1] >= first])
        found: list[tuple[int, int]] = []
        for position in sorted(behind):
            start = line.next_start(position, block.grain, block.groups, block.region)
            if start is None:
                break
            if start < first or (found and found[-1][0] == start):
                continue
            end = line.end(start, block.grain, block.groups)
            if end is not None:
                found.append((start, end))
        return found

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


def place(
    line: Line, blocks: Sequence[Block], conflicts: Sequence[int], *, at_start: bool = False
) -> tuple[tuple[int, int], ...] | None:
    """(start, end) of every block, or None where they do not fit together.

    conflicts: for each block the mask of block indices it must not overlap. at_start: all begin at the first device.
    """
    if not at_start and not _enough_devices(line, blocks, conflicts):
        return None
    arrangement = _Arrangement(line, blocks, conflicts, at_start=at_start)
    if not arrangement.solve((1 << len(blocks)) - 1, 0):
        return None
    return tuple(span for span in arrangement.spans if span is not None)


def _enough_devices(line: Line, blocks: Sequence[Block], conflicts: Sequence[int]) -> bool:
    """Whether every set of blocks that exclude each other, by rule or by memory, has as many devices as it needs."""
    excludes = [0] * len(blocks)
    for a, b in itertools.combinations(range(len(blocks)), 2):
        one, other = blocks[a], blocks[b]
        together = one.idle + other.idle + max(one.peak, other.peak)
        if conflicts[a] >> other.index & 1 or together > line.max_capacity:
            excludes[a] |= 1 << b
            excludes[b] |= 1 << a
    return _cliques_fit(blocks, excludes, (1 << len(blocks)) - 1, line.num_devices)


def _cliques_fit(blocks: Sequence[Block], excludes: Sequence[int], candidates: int, left: int) -> bool:
    """Whether no set of mutually exclusive blocks among `candidates` needs more than `left` devices."""
    if left < 0:
        return False
    while candidates:
        place = candidates.bit_length() - 1
        candidates &= ~(1 << place)
        needed = blocks[place].grain * blocks[place].groups
        if not _cliques_fit(blocks, excludes, candidates & excludes[place], left - needed):
            return False
    return True

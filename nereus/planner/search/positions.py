"""Where blocks of devices fit together on the line: an exact search for positions.

Overlap is only ever bad (it costs memory or time), so any arrangement can be pushed to the left until every block
starts at the beginning of a run of equal devices or right behind another block; only such arrangements are tried, from
left to right."""

from collections.abc import Iterator, Sequence

import numpy as np

from nereus.planner.space.line import Block, Line
from nereus.planner.space.regions import KINDS_OF_A_TYPE

Spans = tuple[tuple[int, int], ...]
"""[start, end) of blocks."""


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
        self._any_length = len(line.regions) <= KINDS_OF_A_TYPE
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
    """Whether every set of blocks has the devices it needs: no more than all devices times the most blocks of the set
    that can share one. A necessary condition, cheap to check before blocks are placed.

    Example: three blocks of 5 devices on a line of 8. If two of them can share a device but not all three, a device
    serves at most two, so at most 16 places are there for 15: they may fit. If none can share, 15 exceed 8.
    """
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

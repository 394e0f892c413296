"""Where the chosen blocks should lie so that least has to move: positions among equally fast arrangements.

The search returns one arrangement, pushed to the left. Any other with the same disjoint blocks and no new sharing is
as fast; of those that begin where blocks of the current plan (or of the arrangement) begin, the one that leaves most
bytes on the devices that hold them is taken.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage, Plan, StagePlan
from nereus.planner.placement import Placement
from nereus.planner.search.choices import Combination
from nereus.planner.space.arrays import Ints
from nereus.planner.space.candidates import Candidate
from nereus.planner.space.line import Line

MAX_TRIED = 4096
"""Arrangements looked at."""

Spans = dict[ModelStage, tuple[int, int]]


def nearest_spans(line: Line, found: Combination, placement: Placement, current: Plan) -> Spans:
    """The spans of `found`, or others as fast that keep more of what `current` holds in place."""
    if placement is Placement.COLOCATED:
        return found.spans
    positions = {device.id: position for position, device in enumerate(line.devices)}
    edges = {span[0] for span in found.spans.values()} | _edges(current, positions)
    holders = [m for m in found.chosen if m not in found.shared]
    choices: dict[ModelStage, list[tuple[int, tuple[int, int]]]] = {}
    for m in holders:
        ranks = _ranks_held(current.get(m), positions, line.num_devices)
        spans = {found.spans[m], *_starting_at(line, found.chosen[m], edges)}
        kept = ((_kept(line, found.chosen[m], span[0], current.get(m), ranks), span) for span in spans)
        choices[m] = sorted(kept, key=lambda choice: (-choice[0], choice[1] != found.spans[m], choice[1]))
    arrangements = _by_bytes_kept([choices[m] for m in holders])
    for _, tried in itertools.islice(arrangements, MAX_TRIED):
        spans_tried = dict(zip(holders, tried, strict=True))
        for m in found.shared:
            spans_tried[m] = next(
                span for holder, span in spans_tried.items() if holder.role == m.role and holder.stage > m.stage
            )
        if all(spans_tried[m] == span for m, span in found.spans.items()) or _as_good(line, found, spans_tried):
            return spans_tried
    return found.spans


def _by_bytes_kept(
    choices: Sequence[Sequence[tuple[int, tuple[int, int]]]],
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """(bytes kept, spans) of every way to take one of each, most bytes first; each list is sorted that way."""

    def entry(at: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return -sum(listed[i][0] for listed, i in zip(choices, at, strict=True)), at

    queue = [entry((0,) * len(choices))]
    seen = {queue[0][1]}
    while queue:
        lost, at = heapq.heappop(queue)
        yield -lost, tuple(listed[i][1] for listed, i in zip(choices, at, strict=True))
        for place, listed in enumerate(choices):
            following = (*at[:place], at[place] + 1, *at[place + 1 :])
            if following[place] < len(listed) and following not in seen:
                seen.add(following)
                heapq.heappush(queue, entry(following))


def _edges(current: Plan, positions: Mapping[int, int]) -> set[int]:
    """Positions where a block of the current plan begins or ends."""
    edges: set[int] = set()
    for _, stage_plan in current.stages:
        places = [positions[d] for d in stage_plan.devices if d in positions]
        if places:
            edges |= {min(places), max(places) + 1}
    return edges


def _starting_at(line: Line, candidate: Candidate, edges: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first spans of a candidate at or after each edge."""
    for edge in sorted(edges):
        span = line.next_span(edge, candidate.grain, candidate.num_groups, candidate.region)
        if span is not None:
            yield span


def _ranks_held(before: StagePlan | None, positions: Mapping[int, int], num_devices: int) -> Ints:
    """[positions of the line]: the rank within its unit that each device has now; -1 where it has none."""
    ranks = np.full(num_devices, -1, dtype=np.int64)
    for unit in before.units if before else ():
        for rank, device in enumerate(unit):
            if device in positions:
                ranks[positions[device]] = rank
    return ranks


def _kept(line: Line, candidate: Candidate, start: int, before: StagePlan | None, ranks: Ints) -> int:
    """Bytes of state that stay on their device, as the share of ranks that keep their place in an equal layout."""
    if before is None:
        return 0
    held = ranks[line.positions(start, candidate.grain, candidate.num_groups)]
    wanted = np.arange(len(held)) % candidate.layout.num_ranks
    same = int((held == wanted).sum()) if before.layout == candidate.layout else 0
    return same * candidate.idle_bytes + (int((held >= 0).sum()) - same) * (candidate.idle_bytes // 8)


def _as_good(line: Line, found: Combination, spans: Mapping[ModelStage, tuple[int, int]]) -> bool:
    """Whether an arrangement shares devices no more than the found one did, pair by pair, and fits in memory."""
    for a, b in itertools.combinations(spans, 2):
        if _meet(spans[a], spans[b]) and not _meet(found.spans[a], found.spans[b]):
            return False
    points = {span[0] for span in spans.values()} | {first for first, _ in line.runs}
    return all(_fits(line, found, spans, point) for point in points)


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _fits(line: Line, found: Combination, spans: Mapping[ModelStage, tuple[int, int]], point: int) -> bool:
    here = [m for m, (start, end) in spans.items() if start <= point < end]
    return device_bytes([(found.chosen[m], m in found.shared) for m in here]) <= line.capacity_at(point)


def device_bytes(held: Sequence[tuple[Candidate, bool]]) -> int:
    """Peak bytes of a device that holds (candidate, shares parameters) model-stages: all idle but the largest peak."""
    idle = [c.shared_idle_bytes if shared else c.idle_bytes for c, shared in held]
    active = [c.shared_active_bytes if shared else c.active_bytes for c, shared in held]
    return sum(idle) + max((a - i for a, i in zip(active, idle, strict=True)), default=0)

"""Where the chosen blocks should lie so that least has to move: positions among equally fast arrangements.

The search returns one arrangement, pushed to the left. Any other with the same disjoint blocks and no new sharing is
as fast; of those that begin where blocks of the current plan (or of the arrangement) begin, the one that leaves most
bytes on the devices that hold them is taken.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

from nereus.plan import ModelStage, Plan, StagePlan
from nereus.planner.candidates import Candidate
from nereus.planner.combine import Combination, Placement
from nereus.planner.placement import Line

MAX_TRIED = 4096
"""Arrangements looked at."""

Spans = dict[ModelStage, tuple[int, int]]


def nearest_spans(line: Line, found: Combination, placement: Placement, current: Plan) -> Spans:
    """The spans of `found`, or others as fast that keep more of what `current` holds in place."""
    if placement is Placement.COLOCATED:
        return found.spans
    holders = [m for m in found.chosen if m not in found.shared]
    starts = {m: _starts(line, m, found, current) for m in holders}

    @functools.cache
    def kept_at(m: ModelStage, start: int) -> int:
        return _kept(line, found.chosen[m], start, current.get(m))

    best, most = found.spans, sum(kept_at(m, start) for m, (start, _) in found.spans.items())
    for tried in itertools.islice(itertools.product(*(starts[m] for m in holders)), MAX_TRIED):
        spans = dict(zip(holders, tried, strict=True))
        for m in found.shared:
            spans[m] = next(span for holder, span in spans.items() if holder.role == m.role and holder.stage > m.stage)
        kept = sum(kept_at(m, start) for m, (start, _) in spans.items())
        if kept > most and _as_good(line, found, spans):
            best, most = spans, kept
    return best


def _starts(line: Line, m: ModelStage, found: Combination, current: Plan) -> list[tuple[int, int]]:
    """Spans of a model-stage that begin where something of the current plan or of the arrangement begins or ends."""
    candidate = found.chosen[m]
    positions = {device.id: position for position, device in enumerate(line.devices)}
    edges = {span[0] for span in found.spans.values()}
    for _, stage_plan in current.stages:
        places = [positions[d] for d in stage_plan.devices if d in positions]
        if places:
            edges |= {min(places), max(places) + 1}
    spans = [found.spans[m]]
    for edge in sorted(edges):
        start = line.next_start(edge, candidate.grain, candidate.num_groups, candidate.region)
        end = line.end(start, candidate.grain, candidate.num_groups) if start is not None else None
        if start is not None and end is not None and (start, end) not in spans:
            spans.append((start, end))
    return spans


def _kept(line: Line, candidate: Candidate, start: int, before: StagePlan | None) -> int:
    """Bytes of state that stay on their device, as the share of ranks that keep their place in an equal layout."""
    if before is None:
        return 0
    total, ranks = 0, candidate.layout.num_ranks
    for place, device in enumerate(line.groups(start, candidate.grain, candidate.num_groups)):
        at = before.position(device)
        if at is not None:
            same = before.layout == candidate.layout and at[1] == place % ranks
            total += candidate.idle_bytes if same else candidate.idle_bytes // 8
    return total


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

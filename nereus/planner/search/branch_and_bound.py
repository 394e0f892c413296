"""One candidate per model-stage and a position for each: the exact optimum of the plan space. Numbers only.

    tables of candidates -> depth first over model-stages, best bound first -> place -> the fastest that fits

A step is a sequence of waves; a wave takes as long as its most loaded device, the sum of the tasks it runs in that
wave. Model-stages of one stage lie on disjoint blocks, so a wave is the slowest of them, plus the wait of those that
share devices with a model-stage that also has a task in this wave (the trainer's old log-probabilities). Weight
synchronization between two model-stages is a cost of the pair, nothing where they share parameters.

    sharing.py      who may share devices, and what memory leaves room for
    bounds.py       seconds that no completion of a partial choice undercuts
    sync_bounds.py  and what synchronizations add to them
    dominance.py    candidates that others make needless
    positions.py    whether blocks can lie together, and where

Every cut is by a bound that holds for all completions, and partial choices that cannot be placed together are
dropped: the result is the optimum, which `tests/planner` checks against enumeration. It knows neither models nor how
candidates were priced.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage
from nereus.planner.placement import Placement
from nereus.planner.prices.syncs import Options, Pair, SyncPrice
from nereus.planner.search.bounds import Bounds, step_of
from nereus.planner.search.choices import Combination, Part
from nereus.planner.search.dominance import Frontier, carefree, most_beside
from nereus.planner.search.positions import Placer
from nereus.planner.search.sharing import Sharing
from nereus.planner.search.sync_bounds import SyncBounds
from nereus.planner.space.arrays import Floats, Mask
from nereus.planner.space.candidates import Candidates
from nereus.planner.space.line import Block, Line
from nereus.planner.space.regions import KINDS_OF_A_TYPE

ALLOWANCES = (50, 500, math.inf)
"""Choices tried below each first candidate before the search goes on to the next; then all over with the next of these:
where memory is tight, the best bound is a poor guide, and a good plan found early spares most of the rest."""

NARROWING = 0.5
"""The search starts over when a better plan leaves less than this share of the candidates."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A candidate that may still be part of something faster. shares: it uses its source's parameters in place.

    bound: seconds that no completion with it undercuts. sync: its synchronization from a chosen source.
    """

    row: int
    shares: bool
    bound: float
    floor: Floats
    sync: dict[Pair, float]


class Combiner:
    """Finds the fastest combination of `tables` that fits on a line.

    syncs: (source, target) pairs, priced by `sync_price`. overlapped: generation has devices of its own and runs beside
    the other waves. limit_s: only combinations faster than this are of interest.
    open_s: after `solve`, what no choice left untried undercuts; infinite where there is none that could be faster.
    budget: choices tried before the search settles for the best plan found; None to prove the optimum.
    """

    def __init__(
        self,
        line: Line,
        tables: Mapping[ModelStage, Candidates],
        *,
        syncs: Sequence[Pair],
        sync_price: SyncPrice,
        placement: Placement,
        overlapped: bool = False,
        limit_s: float = math.inf,
        budget: int | None = None,
    ) -> None:
        self.line, self.placement, self.overlapped = line, placement, overlapped
        self.in_turn = placement is Placement.COLOCATED
        self.syncs, self.sync_price = tuple(syncs), sync_price
        self.best: Combination | None = None
        self.best_seconds = limit_s
        self._placer = Placer(line, at_start=self.in_turn)
        self._ends_matter = self.in_turn and len(line.regions) > KINDS_OF_A_TYPE
        self.budget = math.inf if budget is None else budget
        self.num_tried = self._begun = 0
        self._allowance = self.open_s = math.inf
        self._narrowed = False
        self._use({m: self._possible(table) for m, table in tables.items()})

    def _use(self, tables: dict[ModelStage, Candidates]) -> None:
        self.tables = tables
        self.bounds = Bounds(
            {m: Options(table.num_devices, table.seconds) for m, table in tables.items()},
            num_devices=self.line.num_devices,
            in_turn=self.in_turn,
            overlapped=self.overlapped,
        )
        self.crosser = self.bounds.crosser
        self.order = sorted(tables, key=self._priority)
        self.syncs_bound = SyncBounds(tables, self.bounds, self.syncs, self.sync_price)
        self.sharing = Sharing(self.line, tables, self.syncs, self.placement, self.overlapped, self.crosser)
        self._least_idle = {m: int(np.minimum(t.idle, t.shared_idle).min(initial=1 << 62)) for m, t in tables.items()}
        self._scarce = not all(
            carefree(table, most_beside(tables, m, {}, in_turn=self.in_turn), self.line).all()
            for m, table in tables.items()
        )

    def _possible(self, table: Candidates) -> Candidates:
        """The candidates that could run on the line if they had it alone."""
        least = np.minimum(table.active, table.shared_active)
        return table.take((table.num_devices <= self.line.num_devices) & (least <= self.line.max_capacity))

    def _step(self, waves: Floats) -> Floats:
        """[...]: seconds of a step, without synchronizations, of waves [..., waves]."""
        return step_of(waves, overlapped=self.overlapped)

    def _priority(self, model_stage: ModelStage) -> tuple[bool, int, bool, float]:
        """The one with tasks in several waves first, then sources before targets, then the slow before the fast."""
        table = self.tables[model_stage]
        slowest = -float(table.total_seconds.min()) if len(table) else 0.0
        roles = [source.role for source, _ in self.syncs]
        place = roles.index(model_stage.role) if model_stage.role in roles else len(roles)
        is_source = any(model_stage == source for source, _ in self.syncs)
        return model_stage != self.crosser, place, not is_source, slowest

    def solve(self) -> Combination | None:
        """The optimum, or None where nothing (faster than the limit) fits."""
        for allowance in ALLOWANCES:
            self._allowance, self._narrowed = allowance, True
            while self._narrowed and all(map(len, self.tables.values())):
                self._narrowed, self.open_s = False, math.inf
                nothing = np.zeros(self.bounds.num_waves)
                self._expand(0, Part(nothing, nothing, {}, {}, (), ()))
            if self.open_s >= self.best_seconds or self.spent:
                break
        return self.best

    @property
    def spent(self) -> bool:
        """Whether a plan was found, here or before, and the budget for proving it the fastest is used up."""
        return self.best_seconds < math.inf and self.num_tried >= self.budget

    def _narrow(self) -> None:
        """Start over with the candidates that can still be part of something faster, where that leaves far fewer."""
        nothing = np.zeros(self.bounds.num_waves)
        keep = {m: self._step(self.bounds.completions(m, {}, nothing)) < self.best_seconds for m in self.tables}
        if sum(int(rows.sum()) for rows in keep.values()) < NARROWING * sum(map(len, self.tables.values())):
            self._use({m: self.tables[m].take(rows) for m, rows in keep.items()})
            self._narrowed = True

    def _expand(self, depth: int, part: Part) -> None:
        """Try every candidate of the next model-stage below a partial choice, best bound first."""
        if depth == len(self.order):
            self._finish(part)
            return
        model_stage = self.order[depth]
        entries, frontier = self._entries(model_stage, part)
        for entry in entries:
            # entries come by rising bounds: where one cannot be faster than the best, none after it can
            if entry.bound >= self.best_seconds or self._narrowed:
                break
            if depth == 0:
                self._begun = self.num_tried
            if self.spent or self.num_tried - self._begun >= self._allowance:
                # what is left untried is no cut: `open_s` says how fast it could still be
                self.open_s = min(self.open_s, entry.bound)
                break
            # a candidate tried before at this point is no worse in anything that a completion can depend on
            if frontier.dominates(entry.row, entry.shares):
                continue
            frontier.remember(entry.row, entry.shares)
            self.num_tried += 1
            child = self._extended(part, model_stage, entry)
            # blocks that do not fit together do not fit with more of them either
            if child is None:
                continue
            # nor can a choice be completed that leaves some model-stage nothing faster than the best
            floor = self._floor_ahead(child)
            if floor is not None:
                child.floor = floor
                self._expand(depth + 1, child)

    def _entries(self, m: ModelStage, part: Part) -> tuple[Iterator[_Entry], Frontier]:
        """(candidates of `m` that may still win below `part`, by rising bounds, what compares them with each other)."""
        table = self.tables[m]
        floors = self.bounds.completions(m, part.rows, part.floor)
        bounds = self._step(floors) + part.sync_seconds
        if part.blocks:
            # memory or devices run out whatever else is chosen
            bounds[~self.sharing.fits_beside(part, m, 0)] = math.inf
        bounds += self.syncs_bound.to_come(m, part, floors, bounds < self.best_seconds, limit_s=self.best_seconds)
        known = self.syncs_bound.known(m, part)
        own = known[1] if known else None
        frontier = Frontier(
            table,
            self._compared(m, part, floors),
            own,
            by_shape=any(m == source for source, _ in self.syncs) or self._ends_matter,
        )
        apart = bounds if own is None else bounds + own
        beside = most_beside(self.tables, m, part.rows, in_turn=self.in_turn)
        # where memory is out of the question only seconds and devices count: all dominated rows go at once
        apart[frontier.needless(apart < self.best_seconds, carefree(table, beside, self.line))] = math.inf
        ways = [(apart, False)]
        if known and not self.sharing.must_part(*known[0]):
            ways.append((np.where(known[2], bounds, math.inf), True))
        return self._ordered(table, ways, floors, known), frontier

    def _compared(self, m: ModelStage, part: Part, floors: Floats) -> Floats:
        """[rows of `m`, waves]: what decides between candidates that need the same devices.

        The floors, except in the shared wave. There two candidates of one floor may differ: where the floor comes from
        another model-stage, the slower of them is hidden by it only while it does not have to wait for the crosser.
        Example: the floor is 5 s, candidates take 2 and 4 s, the crosser 3 s. Alone both end by 5 s; after the crosser
        they end at 5 and 7 s. So their own seconds are compared.
        """
        if self.in_turn or self.crosser is None or m not in (self.crosser, *self.bounds.shared_members):
            return floors
        wave, compared = self.bounds.shared_wave, floors.copy()
        compared[:, wave] = self.tables[m].seconds[:, wave]
        if m != self.crosser:
            wait_s = self.tables[self.crosser].seconds[part.rows[self.crosser], wave]
            compared[:, wave] = np.maximum(compared[:, wave], part.floor[wave] - wait_s)
        return compared

    def _floor_ahead(self, part: Part) -> Floats | None:
        """[waves]: seconds that no completion of a choice undercuts; None where none can be faster than the best.

        Every model-stage still to be chosen counts with the fastest of the candidates it has left. Out are those that
        need more memory than what must share a device with them leaves.
        """
        floor = part.floor.copy()
        if not self.in_turn and self.bounds.shared_members:
            wave = self.bounds.shared_wave
            floor[wave] = max(floor[wave], self.bounds.shared_floor(part.rows))
            if float(self._step(floor)) + part.sync_seconds >= self.best_seconds:
                return None
        rest, left = [m for m in self.order if m not in part.rows], dict[ModelStage, Mask]()
        least = {m: self._least_idle[m] for m in rest}
        total = np.zeros(self.bounds.num_waves)
        for m in rest:
            possible = left[m] = self.sharing.fits_beside(part, m, sum(least.values()) - least[m])
            if not possible.any():
                return None
            fastest = self.bounds.fastest[m] if possible.all() else self.tables[m].seconds[possible].min(axis=0)
            if self.in_turn:
                total += fastest
            else:
                floor = np.maximum(floor, fastest)
        if self.in_turn:
            return floor if float((part.waves + total).sum()) + part.sync_seconds < self.best_seconds else None
        raised = dataclasses.replace(part, floor=floor)
        added_s = self.syncs_bound.ahead(raised, left, limit_s=self.best_seconds)
        if float(self._step(floor)) + part.sync_seconds + added_s >= self.best_seconds:
            return None
        return floor if not self._scarce or self._least_fit(raised, left) else None

    def _least_fit(self, part: Part, possible: Mapping[ModelStage, Mask]) -> bool:
        """Whether a choice can be placed together with blocks that are no larger than any still to be chosen.

        possible: the candidates that are left, of each model-stage still to be chosen.
        """
        slack_s = self.best_seconds - part.sync_seconds
        blocks, members = part.blocks, part.members
        for m, rows in possible.items():
            table = self.tables[m]
            left = rows & (self._step(np.maximum(table.seconds, part.floor)) < slack_s)
            if not left.any():
                return False
            idle, peak = self.sharing.leanest(m)
            smallest = (int(values[left].min()) for values in (table.num_devices, idle, peak))
            blocks = (*blocks, Block(len(blocks), 1, next(smallest), self.line.anywhere, *smallest))
            members = (*members, (m,))
        together = dataclasses.replace(part, blocks=blocks, members=members)
        return self._placer.place(blocks, self.sharing.conflicts(together)) is not None

    def _ordered(
        self,
        table: Candidates,
        ways: Sequence[tuple[Floats, bool]],
        floors: Floats,
        known: tuple[Pair, Floats, Mask] | None,
    ) -> Iterator[_Entry]:
        """What may still win of (bounds, sharing) ways, best bound first, less memory first among equals."""
        rows, bounds, flags = [], [], []
        for values, shares in ways:
            hopeful = np.flatnonzero(values < self.best_seconds)
            rows.append(hopeful)
            bounds.append(values[hopeful])
            flags.append(np.full(len(hopeful), shares))
        row, bound, flag = np.concatenate(rows), np.concatenate(bounds), np.concatenate(flags)
        order = np.lexsort((table.idle[row], table.active[row], ~flag, bound))
        for at, shares, seconds in zip(row[order].tolist(), flag[order].tolist(), bound[order].tolist(), strict=True):
            sync = {known[0]: 0.0 if shares else float(known[1][at])} if known else {}
            yield _Entry(at, shares, seconds, floors[at], sync)

    def _extended(self, part: Part, model_stage: ModelStage, entry: _Entry) -> Part | None:
        """`part` with one more choice, or None where its blocks cannot be placed together."""
        seconds = self.tables[model_stage].seconds[entry.row]
        waves = part.waves + seconds if self.in_turn else np.maximum(part.waves, seconds)
        shared = part.shared
        if entry.shares:
            ((source, _),) = entry.sync
            at = next(i for i, members in enumerate(part.members) if source in members)
            block = self.sharing.joined(part.blocks[at], model_stage, entry.row)
            blocks = (*part.blocks[:at], block, *part.blocks[at + 1 :])
            members = (*part.members[:at], (*part.members[at], model_stage), *part.members[at + 1 :])
            shared |= {model_stage}
        else:
            blocks = (*part.blocks, self.sharing.block(len(part.blocks), model_stage, entry.row))
            members = (*part.members, (model_stage,))
        rows = {**part.rows, model_stage: entry.row}
        child = Part(waves, entry.floor, {**part.sync, **entry.sync}, rows, blocks, members, shared)
        spans = self._placer.place(child.blocks, self.sharing.conflicts(child))
        if spans is None:
            return None
        child.spans = spans
        return child

    def _finish(self, part: Part) -> None:
        """Place a complete choice so that the shared wave is as short as can be; keep it where it is the fastest."""
        for waves, apart in self._wave_options(part):
            if float(self._step(waves)) + part.sync_seconds >= self.best_seconds:
                return
            spans = self._placer.place(part.blocks, self.sharing.conflicts(part, apart))
            if spans is None:
                continue
            where = {m: spans[i] for i, members in enumerate(part.members) for m in members}
            self.best = Combination(
                chosen={m: self.tables[m][row] for m, row in part.rows.items()},
                spans=where,
                shared=part.shared,
                wave_seconds=tuple(waves.tolist()),
                sync_seconds=dict(part.sync),
                overlapped=self.overlapped,
            )
            self.best_seconds = self.best.step_seconds
            self._narrow()
            return

    def _wave_options(self, part: Part) -> list[tuple[Floats, tuple[ModelStage, ...]]]:
        """(wave seconds, model-stages that must then stay off the crosser's devices), fastest first."""
        if self.crosser is None or self.in_turn or not self.bounds.shared_members:
            return [(part.waves, ())]
        wave, crosser = self.bounds.shared_wave, self.tables[self.crosser]
        own = float(crosser.seconds[part.rows[self.crosser], wave])
        both = {m: own + float(self.tables[m].seconds[part.rows[m], wave]) for m in self.bounds.shared_members}
        options = []
        for limit in sorted({float(part.waves[wave]), *both.values()}):
            if limit < part.waves[wave]:
                continue
            waves = part.waves.copy()
            waves[wave] = limit
            options.append((waves, tuple(m for m in self.bounds.shared_members if both[m] > limit)))
        return options

"""One candidate per model-stage and a position for each: the exact optimum of the plan space. Numbers only.

    tables of candidates -> depth first over model-stages, best bound first -> place -> the fastest that fits

A step is a sequence of waves; a wave takes as long as its most loaded device, the sum of the tasks it runs in that
wave. Model-stages of one stage lie on disjoint blocks, so a wave is the slowest of them, plus the wait of those that
share devices with a model-stage that also has a task in this wave (the trainer's old log-probabilities). Weight
synchronization between two model-stages is a cost of the pair, nothing where they share parameters.

Every cut is by a bound that holds for all completions, and partial choices that cannot be placed together are
dropped: the result is the optimum, which `tests/planner` checks against enumeration. It knows neither models nor how
candidates were priced.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nereus.plan import ModelStage
from nereus.planner.bounds import Bounds, Options
from nereus.planner.candidates import Candidate, Candidates, Floats
from nereus.planner.placement import Block, Line, place


class Placement(enum.StrEnum):
    """Who may share devices.

    colocated: all blocks begin at the first device, and every model-stage runs in turn.
    disjoint: model-stages of different roles share no device.
    free: model-stages of one stage share no device; those of different stages may.
    """

    COLOCATED = "colocated"
    DISJOINT = "disjoint"
    FREE = "free"


SyncPrice = Callable[[ModelStage, Candidate, Candidates], Floats]
"""Seconds to synchronize weights from a candidate of a (training) model-stage to each candidate of another."""


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """The chosen candidate and [start, end) of each model-stage, and what a step takes.

    shared: model-stages that use the parameters of their role's training model-stage in place.
    """

    chosen: dict[ModelStage, Candidate]
    spans: dict[ModelStage, tuple[int, int]]
    shared: frozenset[ModelStage]
    wave_seconds: tuple[float, ...]
    sync_seconds: dict[tuple[ModelStage, ModelStage], float]

    @property
    def step_seconds(self) -> float:
        return sum(self.wave_seconds) + sum(self.sync_seconds.values())


@dataclasses.dataclass(slots=True)
class _Part:
    """A partial choice. blocks[i] holds the model-stages in members[i]."""

    waves: Floats
    sync: dict[tuple[ModelStage, ModelStage], float]
    rows: dict[ModelStage, int]
    blocks: tuple[Block, ...]
    members: tuple[tuple[ModelStage, ...], ...]
    shared: frozenset[ModelStage] = frozenset()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def sync_seconds(self) -> float:
        return sum(self.sync.values())


class Combiner:
    """Finds the fastest combination of `tables` that fits on a line.

    syncs: (source, target) pairs, priced by `sync_price`. limit_s: only combinations faster than this are of interest.
    """

    def __init__(
        self,
        line: Line,
        tables: Mapping[ModelStage, Candidates],
        *,
        syncs: Sequence[tuple[ModelStage, ModelStage]],
        sync_price: SyncPrice,
        placement: Placement,
        limit_s: float = math.inf,
    ) -> None:
        self.line, self.placement = line, placement
        self.in_turn = placement is Placement.COLOCATED
        self.tables = {m: self._possible(table) for m, table in tables.items()}
        self.syncs, self.sync_price = tuple(syncs), sync_price
        self.bounds = Bounds(
            {m: Options(table.num_devices, table.seconds) for m, table in self.tables.items()},
            num_devices=line.num_devices,
            in_turn=self.in_turn,
        )
        self.crosser = self.bounds.crosser
        self.order = sorted(self.tables, key=self._priority)
        self.best: Combination | None = None
        self.best_seconds = limit_s
        self._placed: dict[tuple[tuple[Block, ...], tuple[int, ...]], tuple[tuple[int, int], ...] | None] = {}
        self.num_expanded = self.num_placed = 0

    def _possible(self, table: Candidates) -> Candidates:
        """The candidates that could run on the line if they had it alone."""
        least = np.minimum(table.active, table.shared_active)
        return table.take((table.num_devices <= self.line.num_devices) & (least <= self.line.max_capacity))

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
        if any(not len(table) for table in self.tables.values()):
            return None
        self._expand(0, _Part(np.zeros(self.bounds.num_waves), {}, {}, (), ()))
        return self.best

    def _expand(self, depth: int, part: _Part) -> None:
        if depth == len(self.order):
            self._finish(part)
            return
        self.num_expanded += 1
        model_stage = self.order[depth]
        table = self.tables[model_stage]
        bounds = self.bounds.completions(model_stage, part.rows, part.waves) + part.sync_seconds
        alone, glued, pair = self._sync_bounds(model_stage, table, part)
        entries = [(bounds + alone, False)] if alone is not None else [(bounds, False)]
        if glued is not None:
            entries.append((np.where(glued, bounds, math.inf), True))
        for row, together, bound in self._ordered(table, entries):
            if bound >= self.best_seconds:
                break
            child = self._extended(part, model_stage, row, together, pair, alone)
            if child is not None:
                self._expand(depth + 1, child)

    def _sync_bounds(
        self, model_stage: ModelStage, table: Candidates, part: _Part
    ) -> tuple[Floats | None, npt.NDArray[np.bool_] | None, tuple[ModelStage, ModelStage] | None]:
        """(seconds of synchronization per row when apart, rows that could share parameters, the pair)."""
        for source, target in self.syncs:
            if target != model_stage or source not in part.rows:
                continue
            row = part.rows[source]
            partner = self.tables[source]
            same = (
                (table.tp == partner.tp[row])
                & (table.pp == partner.pp[row])
                & (table.dp == partner.dp[row])
                & (table.grain == partner.grain[row])
                & (table.region // 2 == partner.region[row] // 2)
            )
            return self.sync_price(source, partner[row], table), same, (source, target)
        return None, None, None

    def _ordered(self, table: Candidates, entries: Sequence[tuple[Floats, bool]]) -> "list[tuple[int, bool, float]]":
        """(row, sharing, bound) of what may still win, best bound first, less memory first among equals."""
        rows, bounds, flags = [], [], []
        for values, together in entries:
            hopeful = np.flatnonzero(values < self.best_seconds)
            rows.append(hopeful)
            bounds.append(values[hopeful])
            flags.append(np.full(len(hopeful), together))
        row, bound, flag = np.concatenate(rows), np.concatenate(bounds), np.concatenate(flags)
        order = np.lexsort((table.idle[row], table.active[row], ~flag, bound))
        return list(zip(row[order].tolist(), flag[order].tolist(), bound[order].tolist(), strict=True))

    def _extended(
        self,
        part: _Part,
        model_stage: ModelStage,
        row: int,
        together: bool,
        pair: tuple[ModelStage, ModelStage] | None,
        alone: Floats | None,
    ) -> _Part | None:
        """`part` with one more choice, or None where its blocks cannot be placed together."""
        table = self.tables[model_stage]
        seconds = table.seconds[row]
        waves = part.waves + seconds if self.in_turn else np.maximum(part.waves, seconds)
        sync, shared = part.sync, part.shared
        if together:
            assert pair is not None
            at = next(i for i, m in enumerate(part.members) if pair[0] in m)
            blocks = (*part.blocks[:at], self._glued(part, at, model_stage, row), *part.blocks[at + 1 :])
            members = (*part.members[:at], (*part.members[at], model_stage), *part.members[at + 1 :])
            sync, shared = {**sync, pair: 0.0}, shared | {model_stage}
        else:
            grain = int(table.grain[row])
            groups = int(table.num_devices[row]) // grain
            idle = int(table.idle[row])
            block = Block(len(part.blocks), grain, groups, int(table.region[row]), idle, int(table.active[row]) - idle)
            blocks, members = (*part.blocks, block), (*part.members, (model_stage,))
            if pair is not None and alone is not None:
                sync = {**sync, pair: float(alone[row])}
        child = _Part(waves, sync, {**part.rows, model_stage: row}, blocks, members, shared)
        spans = self._place(child, self._conflicts(child))
        if spans is None:
            return None
        child.spans = spans
        return child

    def _glued(self, part: _Part, at: int, model_stage: ModelStage, row: int) -> Block:
        """The block of a training model-stage and one that uses its parameters in place; the stricter region holds."""
        block, table = part.blocks[at], self.tables[model_stage]
        idle = block.idle + int(table.shared_idle[row])
        peak = max(block.peak, int(table.shared_active[row] - table.shared_idle[row]))
        region = min(block.region, int(table.region[row]))
        return dataclasses.replace(block, idle=idle, peak=peak, region=region)

    def _conflicts(self, part: _Part, apart: Sequence[ModelStage] = ()) -> tuple[int, ...]:
        """For each block the mask of those it must not overlap; `apart`: model-stages to keep off the crosser."""
        masks = [0] * len(part.blocks)
        if self.in_turn:
            return tuple(masks)
        for a in range(len(part.blocks)):
            for b in range(a):
                if any(self._must_part(x, y, apart) for x in part.members[a] for y in part.members[b]):
                    masks[a] |= 1 << b
                    masks[b] |= 1 << a
        return tuple(masks)

    def _must_part(self, x: ModelStage, y: ModelStage, apart: Sequence[ModelStage]) -> bool:
        if x.stage == y.stage or (self.placement is Placement.DISJOINT and x.role != y.role):
            return True
        return (x == self.crosser and y in apart) or (y == self.crosser and x in apart)

    def _place(self, part: _Part, conflicts: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        key = (part.blocks, conflicts)
        if key not in self._placed:
            self.num_placed += 1
            self._placed[key] = place(self.line, part.blocks, conflicts, at_start=self.in_turn)
        return self._placed[key]

    def _finish(self, part: _Part) -> None:
        """Place a complete choice so that the shared wave is as short as can be; keep it where it is the fastest."""
        for waves, apart in self._wave_options(part):
            if float(waves.sum()) + part.sync_seconds >= self.best_seconds:
                return
            spans = self._place(part, self._conflicts(part, apart))
            if spans is None:
                continue
            where = {m: spans[i] for i, members in enumerate(part.members) for m in members}
            self.best = Combination(
                chosen={m: self.tables[m][row] for m, row in part.rows.items()},
                spans=where,
                shared=part.shared,
                wave_seconds=tuple(waves.tolist()),
                sync_seconds=dict(part.sync),
            )
            self.best_seconds = self.best.step_seconds
            return

    def _wave_options(self, part: _Part) -> list[tuple[Floats, tuple[ModelStage, ...]]]:
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

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
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nereus.plan import ModelStage, Stage
from nereus.planner.placement import Placement
from nereus.planner.prices.syncs import Options, Pair, SyncPrice, SyncTable
from nereus.planner.search.bounds import Bounds, step_of
from nereus.planner.search.choices import Combination, Part
from nereus.planner.search.dominance import Frontier, carefree, most_beside
from nereus.planner.search.positions import Placer
from nereus.planner.space.candidates import Candidates, Floats, Ints
from nereus.planner.space.line import Block, Line

Mask = npt.NDArray[np.bool_]

ALLOWANCES = (50, 500, math.inf)
"""Choices tried below each first candidate before the search goes on to the next; then all over with the next of these:
where memory is tight, the best bound is a poor guide, and a good plan found early spares most of the rest."""

NARROWING = 0.5
"""The search starts over when a better plan leaves less than this share of the candidates."""


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
        self._ends_matter = self.in_turn and len(line.regions) > 2
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
        self.prices = SyncTable(tables, self.syncs, self.sync_price)
        self.devices = {m: table.num_devices for m, table in tables.items()}
        self._least_idle = {m: int(np.minimum(t.idle, t.shared_idle).min(initial=1 << 62)) for m, t in tables.items()}
        self._tasks = {m: (table.seconds > 0).any(axis=0) for m, table in tables.items()}
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
        if depth == len(self.order):
            self._finish(part)
            return
        model_stage = self.order[depth]
        table = self.tables[model_stage]
        floors = self.bounds.completions(model_stage, part.rows, part.floor)
        bounds = self._step(floors) + part.sync_seconds
        if part.blocks:
            bounds[~self._fits_beside(part, model_stage, 0)] = math.inf
        bounds += self._sync_to_come(model_stage, part, floors, bounds < self.best_seconds)
        alone, glued, pair = self._sync_bounds(model_stage, part)
        frontier = Frontier(
            table,
            self._compared(model_stage, part, floors),
            alone,
            by_shape=any(model_stage == source for source, _ in self.syncs) or self._ends_matter,
        )
        apart = bounds if alone is None else bounds + alone
        beside = most_beside(self.tables, model_stage, part.rows, in_turn=self.in_turn)
        apart[frontier.needless(apart < self.best_seconds, carefree(table, beside, self.line))] = math.inf
        entries = [(apart, False)]
        if glued is not None:
            entries.append((np.where(glued, bounds, math.inf), True))
        for row, together, bound in self._ordered(table, entries):
            if bound >= self.best_seconds or self._narrowed:
                break
            if depth == 0:
                self._begun = self.num_tried
            if self.spent or self.num_tried - self._begun >= self._allowance:
                self.open_s = min(self.open_s, bound)
                break
            if frontier.dominates(row, together):
                continue
            self.num_tried += 1
            child = self._extended(part, model_stage, row, together, pair, alone)
            if child is not None:
                child.floor = floors[row]
                if self._looks_ahead(child):
                    self._expand(depth + 1, child)

    def _compared(self, m: ModelStage, part: Part, floors: Floats) -> Floats:
        """[rows of `m`, waves]: what decides between candidates that need the same devices.

        The floors, except in the shared wave: a member may have to wait for the crosser there, and what hides its own
        seconds from the floor need not hide them then.
        """
        if self.in_turn or self.crosser is None or m not in (self.crosser, *self.bounds.shared_members):
            return floors
        wave, compared = self.bounds.shared_wave, floors.copy()
        compared[:, wave] = self.tables[m].seconds[:, wave]
        if m != self.crosser:
            wait_s = self.tables[self.crosser].seconds[part.rows[self.crosser], wave]
            compared[:, wave] = np.maximum(compared[:, wave], part.floor[wave] - wait_s)
        return compared

    def _looks_ahead(self, part: Part) -> bool:
        """Whether every model-stage still to be chosen has a candidate left; raises the floor to the fastest of those.

        Out are candidates that need more memory than what must share a device with them leaves.
        """
        if not self.in_turn and self.bounds.shared_members:
            wave = self.bounds.shared_wave
            part.floor = part.floor.copy()
            part.floor[wave] = max(part.floor[wave], self.bounds.shared_floor(part.rows))
            if float(self._step(part.floor)) + part.sync_seconds >= self.best_seconds:
                return False
        rest, left = [m for m in self.order if m not in part.rows], dict[ModelStage, Mask]()
        least = {m: self._least_idle[m] for m in rest}
        total = np.zeros(self.bounds.num_waves)
        for m in rest:
            possible = left[m] = self._fits_beside(part, m, sum(least.values()) - least[m])
            if not possible.any():
                return False
            fastest = self.bounds.fastest[m] if possible.all() else self.tables[m].seconds[possible].min(axis=0)
            if self.in_turn:
                total += fastest
            else:
                part.floor = np.maximum(part.floor, fastest)
        if self.in_turn:
            return float((part.waves + total).sum()) + part.sync_seconds < self.best_seconds
        if float(self._step(part.floor)) + part.sync_seconds + self._syncs_ahead(part, left) >= self.best_seconds:
            return False
        return not self._scarce or self._least_fit(part, left)

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
            idle, peak = self._leanest(m)
            smallest = (int(values[left].min()) for values in (table.num_devices, idle, peak))
            blocks = (*blocks, Block(len(blocks), 1, next(smallest), self.line.anywhere, *smallest))
            members = (*members, (m,))
        together = dataclasses.replace(part, blocks=blocks, members=members)
        return self._placer.place(blocks, self._conflicts(together)) is not None

    def _leanest(self, m: ModelStage) -> tuple[Ints, Ints]:
        """([rows of `m`] each) idle and peak bytes at least: fewer where it may share the parameters of its source."""
        table = self.tables[m]
        idle, peak = table.idle, table.active - table.idle
        if any(m == target for _, target in self.syncs):
            idle, peak = np.minimum(idle, table.shared_idle), np.minimum(peak, table.shared_active - table.shared_idle)
        return idle, peak

    def _fits_beside(self, part: Part, m: ModelStage, others: int) -> Mask:
        """[rows of `m`]: whether memory suffices on devices that it must share; `others`: idle bytes sure to come."""
        table, room = self.tables[m], self.line.max_capacity
        idle, peak = self._leanest(m)
        if self.in_turn:
            held = sum(block.idle for block in part.blocks)
            highest = max(block.peak for block in part.blocks)
            return np.asarray(idle + held + others + np.maximum(peak, highest) <= room)
        fits = table.num_devices + self._devices_of_others(part, m) <= self.line.num_devices
        for block, members in zip(part.blocks, part.members, strict=True):
            forced = table.num_devices + block.grain * block.groups > self.line.num_devices
            if any(self._must_part(member, m, ()) for member in members):
                fits &= ~forced
            else:
                fits &= ~forced | (idle + block.idle + np.maximum(peak, block.peak) <= room)
        return fits

    def _devices_of_others(self, part: Part, m: ModelStage) -> int:
        """Devices that roles other than the one of `m` keep to themselves, at least; 0 where roles may share."""
        if self.placement is not Placement.DISJOINT:
            return 0
        held: dict[str, int] = {}
        for other in self.order:
            devices = self.tables[other].num_devices
            least = int(devices[part.rows[other]]) if other in part.rows else int(devices.min())
            held[other.role] = max(held.get(other.role, 0), least)
        return sum(devices for role, devices in held.items() if role != m.role)

    def _sync_to_come(self, model_stage: ModelStage, part: Part, floors: Floats, hopeful: Mask) -> Floats | float:
        """[rows]: seconds that bringing weights to another model-stage, chosen later, adds at least to hopeful rows."""
        total: Floats | float = 0.0
        for pair in self.prices.pairs:
            if pair[0] == model_stage and pair[1] not in part.rows and hopeful.any():
                if self.in_turn:
                    seconds = self.tables[pair[1]].seconds
                    added = seconds.sum(axis=1) - seconds.min(axis=0).sum()
                elif self.overlapped:  # what a wave adds may grow with the others
                    added = np.zeros(len(self.tables[pair[1]]))
                else:
                    added = self._lift(pair[1], part, floors[hopeful].max(axis=0))
                least_s = float(self._step(floors[hopeful]).min()) + part.sync_seconds
                added[added >= self.best_seconds - least_s] = math.inf
                total = total + self.prices.least_from(pair, hopeful, added)
        return total

    def _lift(self, m: ModelStage, part: Part, floor: Floats) -> Floats:
        """[rows of `m`]: by how much choosing it lifts a step that takes `floor` anyway, at least."""
        lifted: Floats = self._step(self.bounds.completions(m, part.rows, floor)) - self._step(floor)
        return lifted

    def _syncs_ahead(self, part: Part, possible: Mapping[ModelStage, Mask]) -> float:
        """Seconds that synchronizations to model-stages still to be chosen add at least to the floor of a choice.

        possible: the candidates that are left, of each. Only the largest is taken where the tasks of pairs meet in a
        wave, or waves overlap: what each adds alone may not add up then.
        """
        slack_s = self.best_seconds - float(self._step(part.floor)) - part.sync_seconds
        total, largest, taken = 0.0, 0.0, np.zeros(self.bounds.num_waves, dtype=np.int64)
        for pair in self.prices.pairs:
            source, target = pair
            if target in part.rows:
                continue
            if source in part.rows:
                added = self._step(np.maximum(self.tables[target].seconds, part.floor)) - self._step(part.floor)
                added[~possible[target] | (added >= slack_s)] = math.inf
                chosen = np.arange(len(self.tables[source])) == part.rows[source]
                least = float(self.prices.least_from(pair, chosen, added)[part.rows[source]])
                taken += self._tasks[target]
            elif (self._tasks[source] & self._tasks[target]).any():
                continue
            else:
                added = self._lift(target, part, part.floor)
                added[~possible[target] | (added >= slack_s)] = math.inf
                alone = self._lift(source, part, part.floor)
                before = np.zeros_like(alone) if self.overlapped else alone.copy()
                before[~possible[source] | (alone >= slack_s)] = math.inf
                least = self.prices.least_of(pair, before, added)
                taken += self._tasks[source] | self._tasks[target]
            total, largest = total + least, max(largest, least)
        return total if taken.max() <= 1 and not self.overlapped else largest

    def _sync_bounds(self, model_stage: ModelStage, part: Part) -> tuple[Floats | None, Mask | None, Pair | None]:
        """(seconds of synchronization per row when apart, rows that could share parameters, the pair)."""
        for pair in self.prices.pairs:
            if pair[1] == model_stage and pair[0] in part.rows:
                alone, alike = self.prices.apart(pair, part.rows[pair[0]])
                return alone, None if self._must_part(*pair, ()) else alike, pair
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
        part: Part,
        model_stage: ModelStage,
        row: int,
        together: bool,
        pair: Pair | None,
        alone: Floats | None,
    ) -> Part | None:
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
        child = Part(waves, part.floor, sync, {**part.rows, model_stage: row}, blocks, members, shared)
        spans = self._placer.place(child.blocks, self._conflicts(child))
        if spans is None:
            return None
        child.spans = spans
        return child

    def _glued(self, part: Part, at: int, model_stage: ModelStage, row: int) -> Block:
        """The block of a training model-stage and one that uses its parameters in place; the stricter region holds."""
        block, table = part.blocks[at], self.tables[model_stage]
        idle = block.idle + int(table.shared_idle[row])
        peak = max(block.peak, int(table.shared_active[row] - table.shared_idle[row]))
        region = min(block.region, int(table.region[row]))
        return dataclasses.replace(block, idle=idle, peak=peak, region=region)

    def _conflicts(self, part: Part, apart: Sequence[ModelStage] = ()) -> tuple[int, ...]:
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
        if self.overlapped and Stage.GENERATION in (x.stage, y.stage):
            return True
        return (x == self.crosser and y in apart) or (y == self.crosser and x in apart)

    def _finish(self, part: Part) -> None:
        """Place a complete choice so that the shared wave is as short as can be; keep it where it is the fastest."""
        for waves, apart in self._wave_options(part):
            if float(self._step(waves)) + part.sync_seconds >= self.best_seconds:
                return
            spans = self._placer.place(part.blocks, self._conflicts(part, apart))
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

"""The planner's choice as a mixed-integer program, solved by SCIP: the same optimum as `search`, found another way.

For clusters of equal nodes of one type, where model-stages of one stage share no device and others may.

Variables, by model-stage: one binary for each *pick* (a candidate that holds its own parameters, or one that uses those
of its role's training model-stage), one for each (footprint, offset in a node) of its block, an integer for the node it
starts in. By pair of model-stages: which lies left of the other, or that they overlap.

    wave w    >= the seconds of each; of two that overlap >= their sum
    memory    blocks are intervals, so sets that overlap pairwise share a device: idle bytes of all + the largest peak
    weights   sync >= price(a, .) of the target - what a cheaper source a' saves at most, for each source shape a (the
              lifted form of a big M); 0 for shared parameters, which need equal shapes and equal starts

What helps the proof, and excludes no optimum: picks that another dominates are left out; blocks start only where no
device is wasted; devices, device-seconds of a wave and device-bytes, added up over a stage, stay within the cluster's.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyscipopt
from pyscipopt import quicksum

from nereus.plan import ModelStage, Plan
from nereus.planner.prices.syncs import Pair, SyncPrice
from nereus.planner.search.optimum import stage_plan
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.candidates import Candidate, Candidates
from nereus.planner.space.line import Line

Mask = npt.NDArray[np.bool_]
Tables = Mapping[ModelStage, Candidates]
Footprint = tuple[int, int, int]

VERSION = f"{pyscipopt.Model().version()}"

SETTINGS = {"propagating/probing/maxprerounds": 0, "separating/maxrounds": 0, "separating/maxroundsroot": 0}
"""Probing fixes nothing here and costs most of presolving; cutting planes cost seconds at the root and close no gap."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What SCIP found.

    seconds: of its best step (None: it found none). bound_s: what no step undercuts. proved: whether `seconds` is the
    optimum, or nothing fits. chosen: candidate and start of each model-stage. build_s, solve_s: wall seconds.
    """

    seconds: float | None
    bound_s: float
    proved: bool
    chosen: dict[ModelStage, tuple[Candidate, int]]
    build_s: float
    solve_s: float
    num_variables: int
    num_constraints: int

    def plan(self, line: Line) -> Plan:
        """The best step's plan."""
        return Plan.of({m: stage_plan(line, m, c, start) for m, (c, start) in self.chosen.items()})


def solve(line: Line, tables: Tables, *, syncs: Sequence[Pair], sync_price: SyncPrice, limit_s: float) -> Answer:
    """The fastest combination of `tables` on a line of equal nodes, within `limit_s` seconds of solving."""
    assert len(line.runs) == 1 and len(set(line.node_sizes)) == 1, "all nodes must be equal"
    begin = time.perf_counter()
    picks = _picks(line, tables, syncs, sync_price)
    if not all(len(p.table) for p in picks.values()):
        return Answer(None, math.inf, True, {}, time.perf_counter() - begin, 0.0, 0, 0)
    program = _Program(line, picks, syncs, sync_price)
    model = program.model
    for name, value in {**SETTINGS, "limits/time": limit_s}.items():
        model.setParam(name, value)
    built = time.perf_counter()
    model.optimize()
    found = model.getNSols() > 0
    return Answer(
        seconds=model.getObjVal() if found else None,
        bound_s=model.getDualbound(),
        proved=model.getStatus() in ("optimal", "infeasible", "gaplimit"),
        chosen=program.chosen() if found else {},
        build_s=built - begin,
        solve_s=time.perf_counter() - built,
        num_variables=model.getNVars(transformed=False),
        num_constraints=model.getNConss(transformed=False),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Picks:
    """What a model-stage chooses from. table: its `active` and `idle` are those of the pick; shared: [picks]."""

    table: Candidates
    shared: Mask

    @classmethod
    def of(cls, table: Candidates, needless: Mask, sharable: Mask, capacity: int) -> "_Picks":
        own = np.flatnonzero(~needless & (table.active <= capacity))
        used = np.flatnonzero(sharable & (table.shared_active <= capacity))
        mine, theirs = table.take(own), table.take(used)
        theirs = dataclasses.replace(theirs, active=theirs.shared_active, idle=theirs.shared_idle)
        return cls(Candidates.concatenate([mine, theirs]), np.arange(len(own) + len(used)) >= len(own))


def footprints(table: Candidates) -> list[Footprint]:
    """(grain, groups, region) of each row."""
    groups = table.num_devices // table.grain
    return list(zip(table.grain.tolist(), groups.tolist(), table.region.tolist(), strict=True))


def offsets(line: Line, footprint: Footprint) -> dict[int, int]:
    """{offset in a node where such a block may start: devices from there to its end}.

    Without starts from which the block ends where it would if it started one device later: those waste a device.
    """
    grain, groups, region = footprint
    size, found = line.node_sizes[0], {}
    farthest = size if line.regions[region].one_node else line.num_devices
    for offset in range(size - grain + 1):
        end = line.end(offset, grain, groups)
        if end is not None and end <= farthest:
            found[offset] = end - offset
    return {offset: length for offset, length in found.items() if found.get(offset + 1) != length - 1}


def dominated(line: Line, tables: Tables, m: ModelStage, syncs: Sequence[Pair], sync_price: SyncPrice) -> Mask:
    """[rows of `m`]: whether another row can take its place, with parameters of its own, in any plan.

    Such a row fits inside the block, needs no more memory, is no slower in any wave, and what synchronization it adds
    at most it saves in waves that only `m` has tasks in.
    """
    table = tables[m]
    alone = [w for w in range(table.seconds.shape[1]) if sum(bool(t.seconds[:, w].any()) for t in tables.values()) == 1]
    _, first, number = np.unique(table.shape_keys, return_index=True, return_inverse=True)
    extra = _extra_sync(tables, m, first, syncs, sync_price)
    one_node = np.array([region.one_node for region in line.regions])[table.region]
    needless = np.zeros(len(table), dtype=bool)
    for row in np.lexsort((table.active, table.num_devices, table.total_seconds))[::-1].tolist():
        better = ~needless & (table.seconds <= table.seconds[row]).all(axis=1)
        better &= (table.active <= table.active[row]) & (table.idle <= table.idle[row])
        better &= (table.num_devices <= table.num_devices[row]) & (table.grain[row] % table.grain == 0)
        better &= ~one_node | one_node[row]
        better &= extra[number, number[row]] <= (table.seconds[row] - table.seconds)[:, alone].sum(axis=1)
        better[row] = False
        needless[row] = better.any()
    return needless


def _extra_sync(tables: Tables, m: ModelStage, first: Ints, syncs: Sequence[Pair], sync_price: SyncPrice) -> Floats:
    """[shapes, shapes]: seconds of synchronization that one shape of `m` adds at most in place of another."""
    extra = np.zeros((len(first), len(first)))
    for source, target in syncs:
        if not len(first) or not len(tables[source]):
            break
        if m == source:  # others may use its parameters, which takes its shape
            return np.where(np.eye(len(first), dtype=bool), 0.0, np.inf)
        if m == target:
            sources = tables[source].take(np.unique(tables[source].shape_keys, return_index=True)[1])
            prices = sync_price.matrix(source, sources, tables[m].take(first))
            extra += np.stack([(prices[:, [i]] - prices).max(axis=0) for i in range(len(first))])
    return extra


def _weighted(weights: Iterable[float], variables: Iterable[Any]) -> Any:
    return quicksum(float(w) * v for w, v in zip(weights, variables, strict=True) if w)


class _Part:
    """The variables of one model-stage; memory in shares of a device's."""

    def __init__(self, model: pyscipopt.Model, line: Line, picks: _Picks) -> None:
        self.picks, self.table, self.line, self.model = picks, picks.table, line, model
        self.chosen = [model.addVar(vtype="B") for _ in range(len(self.table))]
        model.addCons(quicksum(self.chosen) == 1)
        self.start, self.end = model.addVar(lb=0, ub=line.num_devices), model.addVar(lb=0, ub=line.num_devices)
        self._lie()
        self.devices = self._total(self.table.num_devices)
        self.idle_shares = self.table.idle / line.max_capacity
        self.idle = self._total(self.idle_shares)
        self.peak = self._total((self.table.active - self.table.idle) / line.max_capacity)
        seconds = self.table.seconds
        self.seconds = {w: self._total(seconds[:, w]) for w in range(seconds.shape[1]) if seconds[:, w].any()}

    def _total(self, values: Floats | Ints) -> Any:
        """A variable that equals the value of the pick."""
        found = self.model.addVar(lb=float(values.min(initial=0.0)), ub=float(values.max(initial=0.0)))
        self.model.addCons(found == _weighted(values, self.chosen))
        return found

    def _lie(self) -> None:
        """The block lies where its footprint allows."""
        model, line = self.model, self.line
        by_footprint: dict[Footprint, list[Any]] = {}
        for footprint, variable in zip(footprints(self.table), self.chosen, strict=True):
            by_footprint.setdefault(footprint, []).append(variable)
        begins, lengths = [], []
        for footprint, variables in by_footprint.items():
            here = [(model.addVar(vtype="B"), *item) for item in offsets(line, footprint).items()]
            model.addCons(quicksum(variables) == quicksum(at for at, _, _ in here))
            begins += [offset * at for at, offset, _ in here]
            lengths += [length * at for at, _, length in here]
        node = model.addVar(vtype="I", lb=0, ub=len(line.node_sizes) - 1)
        model.addCons(self.start == line.node_sizes[0] * node + quicksum(begins))
        model.addCons(self.end == self.start + quicksum(lengths))

    def by_shape(self, shared: bool) -> dict[int, Any]:
        """{shape key: a binary that is 1 where a pick of that shape is chosen}, of picks that share or do not."""
        keys, found = self.table.shape_keys, {}
        for key in np.unique(keys[self.picks.shared == shared]).tolist():
            rows = np.flatnonzero((keys == key) & (self.picks.shared == shared)).tolist()
            found[key] = self.model.addVar(vtype="B")
            self.model.addCons(found[key] == quicksum(self.chosen[row] for row in rows))
        return found

    def representatives(self, keys: Iterable[int]) -> Candidates:
        """A row for each of some shapes."""
        present, first = np.unique(self.table.shape_keys, return_index=True)
        return self.table.take(first[np.searchsorted(present, list(keys))])


class _Program:
    """The whole model."""

    def __init__(
        self, line: Line, picks: Mapping[ModelStage, _Picks], syncs: Sequence[Pair], sync_price: SyncPrice
    ) -> None:
        self.line, self.size = line, line.num_devices
        self.model = pyscipopt.Model()
        self.model.hideOutput()
        self.parts = {m: _Part(self.model, line, p) for m, p in picks.items()}
        stages = {m.stage: [o for o in picks if o.stage is m.stage] for m in picks}
        self.rows = list(stages.values())
        self.overlap: dict[frozenset[ModelStage], Any] = {}
        for a, b in itertools.combinations(self.parts, 2):
            self.overlap[frozenset((a, b))] = self._order(a, b)
        self._share_devices()
        self._share_memory()
        total = [self._wave(wave) for wave in range(next(iter(picks.values())).table.seconds.shape[1])]
        total += [self._synchronize(source, target, sync_price) for source, target in syncs]
        self.model.setObjective(quicksum(total), "minimize")

    def _order(self, a: ModelStage, b: ModelStage) -> Any:
        """One of two lies left of the other, or they overlap (the variable returned; 0 where they may not)."""
        model, one, other = self.model, self.parts[a], self.parts[b]
        left, right = model.addVar(vtype="B"), model.addVar(vtype="B")
        overlap = model.addVar(vtype="B", ub=0 if a.stage is b.stage else 1)
        model.addCons(left + right + overlap == 1)
        model.addCons(one.end <= other.start + self.size * (1 - left))
        model.addCons(other.end <= one.start + self.size * (1 - right))
        return overlap

    def _overlaps(self, members: Sequence[ModelStage]) -> list[Any]:
        return [self.overlap[frozenset(pair)] for pair in itertools.combinations(members, 2)]

    def _share_devices(self) -> None:
        """What lies side by side has no more devices than there are."""
        for row in self.rows:
            for m in [None, *self.parts]:
                if m is None or m not in row:
                    members = row if m is None else [*row, m]
                    needed = quicksum(self.parts[o].devices for o in members)
                    self.model.addCons(needed <= self.size * (1 + quicksum(self._overlaps(members))))
        for a, b in itertools.combinations(self.parts, 2):
            needed = self.parts[a].devices + self.parts[b].devices
            self.model.addCons(needed <= self.size * (1 + self.overlap[frozenset((a, b))]))

    def _share_memory(self) -> None:
        """Any set of one model-stage a stage that overlaps pairwise fits a device; all devices together hold all."""
        for rows in itertools.chain.from_iterable(
            itertools.combinations(self.rows, n + 1) for n in range(len(self.rows))
        ):
            for members in itertools.product(*rows):
                apart = len(self._overlaps(members)) - quicksum(self._overlaps(members))
                for active in members:
                    others = [self.parts[m] for m in members if m != active]
                    slack = sum(float(part.idle_shares.max(initial=0.0)) for part in others)
                    held = self.parts[active].idle + self.parts[active].peak + quicksum(part.idle for part in others)
                    self.model.addCons(held <= 1 + slack * apart)
        for row in self.rows:
            area = []
            for m, part in self.parts.items():
                held = (part.table.active if m in row else part.table.idle) / self.line.max_capacity
                area.append(_weighted(held * part.table.num_devices, part.chosen))
            self.model.addCons(quicksum(area) <= self.size)

    def _wave(self, wave: int) -> Any:
        """Seconds of a wave: those of its most loaded device, and no less than device-seconds over devices."""
        model, seconds = self.model, self.model.addVar(lb=0)
        parts = {m: part for m, part in self.parts.items() if wave in part.seconds}
        assert len({m.stage for m in parts}) <= 2, "of three that overlap the sum would count"
        for part in parts.values():
            model.addCons(seconds >= part.seconds[wave])
        for pair in itertools.combinations(parts, 2):
            if pair[0].stage is not pair[1].stage:
                one, other = (parts[m].seconds[wave] for m in pair)
                slack = min(float(parts[m].table.seconds[:, wave].max(initial=0.0)) for m in pair)
                model.addCons(seconds >= one + other - slack * (1 - self.overlap[frozenset(pair)]))
        work = (_weighted(p.table.num_devices * p.table.seconds[:, wave], p.chosen) for p in parts.values())
        model.addCons(quicksum(work) <= self.size * seconds)
        return seconds

    def _synchronize(self, source: ModelStage, target: ModelStage, sync_price: SyncPrice) -> Any:
        """Seconds of a synchronization."""
        model, one, other = self.model, self.parts[source], self.parts[target]
        seconds = model.addVar(lb=0)
        sources, targets = one.by_shape(False), other.by_shape(False)
        shared = other.by_shape(True)
        for key, variable in shared.items():
            model.addCons(variable <= sources.get(key, 0))
        apart = self.size * (1 - quicksum(shared.values()))
        model.addCons(one.start - other.start <= apart)
        model.addCons(other.start - one.start <= apart)
        if sources and targets:
            prices = sync_price.matrix(source, one.representatives(sources), other.representatives(targets))
            self._price(seconds, prices, list(sources.values()), list(targets.values()))
        return seconds

    def _price(self, seconds: Any, prices: Floats, sources: list[Any], targets: list[Any]) -> None:
        """seconds >= prices[source, target]; sources with equal prices count as one."""
        kinds, number = np.unique(prices, axis=0, return_inverse=True)
        groups = []
        for kind in range(len(kinds)):
            groups.append(self.model.addVar(vtype="B"))
            members = np.flatnonzero(number.ravel() == kind).tolist()
            self.model.addCons(groups[kind] == quicksum(sources[i] for i in members))
        self.model.addCons(seconds >= float(prices.min()) * quicksum(targets))
        for kind in range(len(kinds)):
            saved = np.maximum(0.0, (kinds[kind] - kinds).max(axis=1))
            self.model.addCons(seconds >= _weighted(kinds[kind], targets) - _weighted(saved, groups))

    def chosen(self) -> dict[ModelStage, tuple[Candidate, int]]:
        """Candidate and start of each model-stage in the best solution."""
        found = {}
        for m, part in self.parts.items():
            row = max(range(len(part.chosen)), key=lambda i: self.model.getVal(part.chosen[i]))
            found[m] = part.table[row], round(self.model.getVal(part.start))
        return found


def _picks(line: Line, tables: Tables, syncs: Sequence[Pair], sync_price: SyncPrice) -> dict[ModelStage, _Picks]:
    """What each model-stage chooses from."""
    source_of = {target: source for source, target in syncs}
    tables = {m: _possible(line, table) for m, table in tables.items()}
    found = {}
    for m, table in tables.items():
        sharable = np.zeros(len(table), dtype=bool)
        if m in source_of:
            sharable = np.isin(table.shape_keys, tables[source_of[m]].shape_keys)
        needless = dominated(line, tables, m, syncs, sync_price)
        found[m] = _Picks.of(table, needless, sharable, line.max_capacity)
    return found


def _possible(line: Line, table: Candidates) -> Candidates:
    """The rows that could run on the line if they had it alone."""
    somewhere = {footprint: bool(offsets(line, footprint)) for footprint in set(footprints(table))}
    lies = np.array([somewhere[footprint] for footprint in footprints(table)], dtype=bool)
    return table.take(lies & (np.minimum(table.active, table.shared_active) <= line.max_capacity))

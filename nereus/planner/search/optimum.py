"""The planner's question and its answer: which plan is fastest for this job on these devices, or why none fits.

    PlanningProblem -> sketch every model-stage -> the current plan, priced anew -> what could still beat it
                    -> combine exactly -> place near the current plan -> Choice | Refusal

`search` is a pure function of the problem and the current plan: the controller calls it at every replan, the command
line once. It decides nothing about whether a move pays (`admission`), and moves nothing.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from nereus.plan import Layout, ModelStage, Plan, Recompute, Stage, StagePlan
from nereus.planner.placement import Placement
from nereus.planner.prices.footprints import stage_memory
from nereus.planner.problem import PlanningProblem
from nereus.planner.search.bounds import Bounds, step_of
from nereus.planner.search.branch_and_bound import Combiner
from nereus.planner.search.choices import Combination
from nereus.planner.search.dominance import carefree, most_beside
from nereus.planner.search.nearest import nearest_spans
from nereus.planner.search.refusal import Refusal, refuse
from nereus.planner.space.arrays import Floats, Ints
from nereus.planner.space.candidates import Candidate, Candidates, best_settings
from nereus.planner.space.line import Line

EXACT_DEVICES = 16
"""Up to so many devices the search always proves that its choice is the fastest."""

WITHIN = (1.015, 1.03, 1.06, 1.12, 1.25, 1.5, math.inf)
"""A plan within so many times what bounds allow is looked for, then within the next: nothing much slower is priced."""

CLOSE = 1.1
"""Where a plan within so many times what bounds allow is known already, only plans faster than it are looked for."""

BUDGET = 4000
"""Choices tried on more devices, a second or two; `Choice.gap` then says what is left unproven."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A complete plan with its predicted step.

    stage_seconds: of each model-stage's tasks, as the search counted them.
    wave_seconds: the parts of the critical path, wave after wave. sync_seconds: weight synchronizations at its end.
    idle_devices: devices of the cluster that the plan leaves without work.
    gap: share by which a faster plan might undercut this one at most; 0 where it is proven the fastest.
    overlapped: generation of the next batch runs beside the other waves; a step lasts as long as the longer side.
    """

    plan: Plan
    stage_seconds: dict[ModelStage, float]
    wave_seconds: tuple[float, ...]
    sync_seconds: dict[tuple[ModelStage, ModelStage], float]
    placement: Placement
    idle_devices: tuple[int, ...]
    gap: float = 0.0
    overlapped: bool = False

    @property
    def step_seconds(self) -> float:
        waves = step_of(np.array(self.wave_seconds), overlapped=self.overlapped)
        return float(waves) + sum(self.sync_seconds.values())


def search(
    problem: PlanningProblem,
    *,
    current: Plan | None = None,
    fixed: Mapping[ModelStage, tuple[Layout, int]] | None = None,
    excluded: Mapping[ModelStage, tuple[Layout, int]] | None = None,
) -> Choice | Refusal:
    """The fastest plan that fits, or what stands against every one.

    current: limits the search where its layouts still fit; among equally fast placements, the one that moves least from
    it is taken. fixed, excluded: (layout, dp) that a model-stage must, or must not, have; for alternatives to a choice.

    `free` placement takes `colocated` where that is faster (see `Limits.turns_if_faster`), or all that fits (one
    device, two trained models): so more memory never makes the answer slower.
    """
    restricted, limits = Restriction(fixed or {}, excluded or {}), problem.limits
    placements = [limits.placement]
    if limits.placement is Placement.FREE:
        placements.append(Placement.COLOCATED)
        if current and current.takes_turns and limits.turns_if_faster:
            placements.reverse()  # what runs now limits the search best
    best: tuple[Combination, Placement] | None = None
    open_s = math.inf
    for placement in placements:
        if best and not limits.turns_if_faster:
            break
        for overlapped in (True, False) if problem.may_overlap(placement) else (False,):
            limit_s = best[0].step_seconds if best else math.inf
            found, left_s = optimum(
                problem, placement, restricted, overlapped=overlapped, current=current, limit_s=limit_s
            )
            best, open_s = (found, placement) if found else best, min(open_s, left_s)
    if best is None:
        in_turn = limits.placement is Placement.FREE
        return refuse(problem.pricing, Placement.COLOCATED if in_turn else limits.placement)
    return _choice(problem, best[0], max(0.0, 1 - open_s / best[0].step_seconds), best[1], current)


@dataclasses.dataclass(frozen=True, slots=True)
class Restriction:
    """(layout, dp) that model-stages must, or must not, have.

    crowding: what shares a device may exceed its memory, as long as each fits by itself.
    """

    fixed: Mapping[ModelStage, tuple[Layout, int]]
    excluded: Mapping[ModelStage, tuple[Layout, int]]
    crowding: bool = False

    def apply(self, table: Candidates) -> Candidates:
        for wanted, source in ((True, self.fixed), (False, self.excluded)):
            if table.model_stage in source:
                layout, dp = source[table.model_stage]
                same = (table.tp == layout.tp) & (table.pp == layout.pp) & (table.dp == dp)
                table = table.take(same if wanted else ~same)
        return table


def optimum(
    problem: PlanningProblem,
    placement: Placement,
    restriction: Restriction | None = None,
    *,
    overlapped: bool = False,
    current: Plan | None = None,
    limit_s: float = math.inf,
) -> tuple[Combination | None, float]:
    """(the fastest combination under one placement rule, None where nothing fits; seconds that no other undercuts).

    The seconds are infinite where the combination is proven the fastest, or nothing to be faster than `limit_s`.

    overlapped: generation has devices of its own and runs beside the rest of the step.
    current: where its layouts still fit, only faster combinations are looked for. limit_s: so is nothing slower.
    """
    budget = BUDGET if problem.line.num_devices > EXACT_DEVICES else None
    rule = _Rule(placement, overlapped, restriction or Restriction({}, {}))
    sketches = _Sketches(problem, rule)

    def solve(tables: Mapping[ModelStage, Candidates], limit_s: float) -> tuple[Combination | None, float]:
        combiner = _combiner(problem, tables, rule, limit_s, budget)
        return combiner.solve(), combiner.open_s

    best = solve(sketches.like(current), math.inf)[0] if current and limit_s == math.inf else None
    limit_s, open_s = best.step_seconds if best else limit_s, math.inf
    hopeful = _Hopeful(sketches, limit_s=limit_s)
    for times in WITHIN if hopeful.bound_s < limit_s else ():
        within_s = limit_s if limit_s < CLOSE * hopeful.bound_s else min(times * hopeful.bound_s, limit_s)
        found, open_s = solve(hopeful.tables(within_s), within_s)
        best = found or best
        if found is not None or within_s == limit_s:
            break
    return best, open_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """Which combinations are looked for."""

    placement: Placement
    overlapped: bool
    restriction: Restriction

    @property
    def in_turn(self) -> bool:
        return self.placement is Placement.COLOCATED


class _Sketches:
    """What every model-stage could do, under one placement rule."""

    def __init__(self, problem: PlanningProblem, rule: _Rule) -> None:
        self.line, self.rule, self.recomputes = problem.line, rule, problem.limits.space.recomputes
        self.of = {m: problem.pricing.sketch(m, in_turn=rule.in_turn) for m in problem.workflow.model_stages}

    def like(self, plan: Plan) -> dict[ModelStage, Candidates]:
        """The candidates with the layouts and data-parallel counts of a plan."""
        return self.tables({m: self._shaped(m, plan) for m in self.of})

    def _shaped(self, m: ModelStage, plan: Plan) -> Ints:
        sketch, rows = self.of[m], self.of[m].rows
        if m not in plan:
            return np.zeros(0, dtype=np.int64)
        layout, dp = plan[m].layout, plan[m].dp
        alike = (rows.tp == layout.tp) & (rows.pp == layout.pp) & (rows.dp == dp)
        return np.flatnonzero(alike & sketch.worthwhile)

    def tables(self, rows: Mapping[ModelStage, Ints]) -> dict[ModelStage, Candidates]:
        """The candidates made from some rows. Recomputation is left out where memory cannot bind without it."""
        keeping = {m: sketch.candidates(rows[m]) for m, sketch in self.of.items()}
        tables = {}
        for m, sketch in self.of.items():
            parts, scarce = [keeping[m]], rows[m]
            if sketch.trains:
                recomputes = [recompute for recompute in self.recomputes if recompute is not Recompute.NONE]
                if Recompute.NONE in self.recomputes:
                    beside = most_beside(keeping, m, {}, in_turn=self.rule.in_turn)
                    scarce = scarce[~carefree(keeping[m], beside, self.line)]
                else:
                    parts = []
                parts += [sketch.candidates(scarce, recompute) for recompute in recomputes]
            table = self.rule.restriction.apply(Candidates.concatenate(parts))
            tables[m] = table.take(np.minimum(table.active, table.shared_active) <= self.line.max_capacity)
        return tables


class _Hopeful:
    """Which rows may still be part of a step faster than `limit_s`, and some lower limit.

    bound_s: what no step undercuts that is faster than `limit_s`.
    """

    def __init__(self, sketches: _Sketches, *, limit_s: float) -> None:
        self.sketches = sketches
        fastest = {m: sketch.fastest for m, sketch in sketches.of.items()}
        self.rows = {m: self._alone(m, fastest, limit_s) for m in sketches.of}
        self.bound_s = math.inf
        if not all(map(len, self.rows.values())):
            return
        options = {m: sketch.options(self.rows[m]) for m, sketch in sketches.of.items()}
        rule = sketches.rule
        bounds = Bounds(
            options, num_devices=sketches.line.num_devices, in_turn=rule.in_turn, overlapped=rule.overlapped
        )
        nothing = np.zeros(bounds.num_waves)
        self._bounds = {m: step_of(bounds.completions(m, {}, nothing), overlapped=rule.overlapped) for m in sketches.of}
        self.bound_s = max(float(bounds.min(initial=math.inf)) for bounds in self._bounds.values())

    def _alone(self, m: ModelStage, fastest: Mapping[ModelStage, Floats], limit_s: float) -> Ints:
        """Rows of `m` with which a step is faster than the limit where every other model-stage is at its fastest."""
        sketch, others = self.sketches.of[m], [f for other, f in fastest.items() if other != m]
        rows = np.flatnonzero(sketch.worthwhile)
        if limit_s == math.inf:
            return rows
        if self.sketches.rule.in_turn:
            waves = sketch.seconds[rows] + sum(others)
        else:
            waves = np.maximum(sketch.seconds[rows], np.maximum.reduce(others))
        steps = step_of(waves, overlapped=self.sketches.rule.overlapped)
        kept: Ints = rows[steps < limit_s]
        return kept

    def tables(self, limit_s: float) -> dict[ModelStage, Candidates]:
        return self.sketches.tables({m: self.rows[m][self._bounds[m] < limit_s] for m in self.sketches.of})


def _combiner(
    problem: PlanningProblem,
    tables: Mapping[ModelStage, Candidates],
    rule: _Rule,
    limit_s: float,
    budget: int | None,
) -> Combiner:
    line = problem.line.with_capacity(1 << 60) if rule.restriction.crowding else problem.line
    return Combiner(
        line,
        {m: best_settings(table) for m, table in tables.items()},
        syncs=problem.workflow.syncs,
        sync_price=problem.pricing.sync_price,
        placement=rule.placement,
        overlapped=rule.overlapped,
        limit_s=limit_s,
        budget=budget,
    )


def _choice(
    problem: PlanningProblem, found: Combination, gap: float, placement: Placement, current: Plan | None
) -> Choice:
    """The combination as a plan of device ids, placed near the current one."""
    line = problem.line
    spans = nearest_spans(line, found, placement, current) if current else found.spans
    stages = {m: stage_plan(line, m, c, spans[m][0]) for m, c in found.chosen.items()}
    plan = Plan.of({m: _with_cache(problem, m, placed) for m, placed in stages.items()})
    used = set(plan.devices)
    return Choice(
        plan=plan,
        stage_seconds={m: sum(c.wave_seconds) for m, c in found.chosen.items()},
        wave_seconds=found.wave_seconds,
        sync_seconds=found.sync_seconds,
        placement=placement,
        idle_devices=tuple(d for d in problem.cluster.device_ids if d not in used),
        gap=gap,
        overlapped=found.overlapped,
    )


def stage_plan(line: Line, model_stage: ModelStage, candidate: Candidate, start: int) -> StagePlan:
    """A candidate on the block that starts at a position of the line, with the settings that it was priced under."""
    placed = StagePlan.of(candidate.layout, line.groups(start, candidate.grain, candidate.num_groups))
    if model_stage.stage is Stage.GENERATION:
        return placed.with_settings(max_num_seqs=candidate.micro_batch)
    if model_stage.stage is Stage.TRAINING:
        return placed.with_settings(micro_batch=candidate.micro_batch, recompute=candidate.recompute)
    return placed.with_settings(micro_batch=candidate.micro_batch)


def _with_cache(problem: PlanningProblem, m: ModelStage, chosen: StagePlan) -> StagePlan:
    """Where it generates: with the bytes that its sequences at once were priced to need of a rank's cache."""
    if m.stage is not Stage.GENERATION:
        return chosen
    assert chosen.max_num_seqs is not None
    memory = stage_memory(
        m, problem.specs[m.role], chosen.layout, dp=chosen.dp, workload=problem.workload,
        micro_batch=chosen.max_num_seqs, recompute=Recompute.NONE, precision=problem.precision,
    )  # fmt: skip
    return chosen.with_settings(cache_bytes=memory.active["kv_cache"])

"""The planner's question and its answer: which plan is fastest for this job on these devices, or why none fits.

    PlanningProblem -> sketch every model-stage -> a first plan from powers of two -> what could still beat it
                    -> combine exactly -> place near the current plan -> Choice | Refusal

`search` is a pure function of the problem and the current plan: the controller calls it at every replan, the command
line once. It decides nothing about whether a move pays (`admission`), and moves nothing.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from nereus.plan import Layout, ModelStage, Plan, StagePlan
from nereus.planner.bounds import Bounds
from nereus.planner.candidates import Candidate, Candidates, best_settings
from nereus.planner.combine import Combination, Combiner, Placement
from nereus.planner.memory import Recompute
from nereus.planner.placement import Line
from nereus.planner.pricing import Sketch
from nereus.planner.problem import PlanningProblem
from nereus.planner.rearrange import nearest_spans
from nereus.planner.refusal import Refusal, refuse

EXACT_DEVICES = 64
"""Up to so many devices the search always proves that its choice is the fastest."""

NEAR = (1.015, 1.03)
"""Plans within so many times what bounds allow are looked for first: where there is one, nothing slower is priced."""

BUDGET = 100
"""Partial choices looked into on more devices; `Choice.gap` then says what is left unproven."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How a model-stage runs within its layout, and what the planner expects of it.

    seconds: of its tasks in one step. shares_weights: uses the parameters of its role's training model-stage.
    """

    micro_batch: int
    recompute: Recompute
    seconds: float
    active_bytes: int
    idle_bytes: int
    shares_weights: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A plan with its predicted step.

    wave_seconds: the parts of the critical path, wave after wave. sync_seconds: weight synchronizations at its end.
    idle_devices: devices of the cluster that the plan leaves without work.
    gap: share by which a faster plan might undercut this one at most; 0 where it is proven the fastest.
    """

    plan: Plan
    settings: dict[ModelStage, Setting]
    wave_seconds: tuple[float, ...]
    sync_seconds: dict[tuple[ModelStage, ModelStage], float]
    placement: Placement
    idle_devices: tuple[int, ...]
    gap: float = 0.0

    @property
    def step_seconds(self) -> float:
        return sum(self.wave_seconds) + sum(self.sync_seconds.values())


def search(
    problem: PlanningProblem,
    *,
    current: Plan | None = None,
    fixed: Mapping[ModelStage, tuple[Layout, int]] | None = None,
    excluded: Mapping[ModelStage, tuple[Layout, int]] | None = None,
    budget: int | None = None,
) -> Choice | Refusal:
    """The fastest plan that fits, or what stands against every one.

    current: among equally fast placements, the one that moves least from this plan is taken.
    fixed, excluded: (layout, dp) that a model-stage must, or must not, have; for alternatives to a choice.

    budget: partial choices looked into before the best plan found is enough (default: by the number of devices).

    `free` placement falls back to `colocated` only where nothing fits otherwise (one device, two trained models).
    """
    restricted = _Restriction(fixed or {}, excluded or {})
    placements = [problem.limits.placement]
    if problem.limits.placement is Placement.FREE:
        placements.append(Placement.COLOCATED)
    for placement in placements:
        found = optimum(problem, placement, restricted, budget=budget)
        if found is not None:
            return _choice(problem, *found, placement, current)
    return refuse(problem.pricing, problem.limits.placement)


@dataclasses.dataclass(frozen=True, slots=True)
class _Restriction:
    fixed: Mapping[ModelStage, tuple[Layout, int]]
    excluded: Mapping[ModelStage, tuple[Layout, int]]

    def apply(self, table: Candidates) -> Candidates:
        for wanted, source in ((True, self.fixed), (False, self.excluded)):
            if table.model_stage in source:
                layout, dp = source[table.model_stage]
                same = (table.tp == layout.tp) & (table.pp == layout.pp) & (table.dp == dp)
                table = table.take(same if wanted else ~same)
        return table

    @property
    def empty(self) -> bool:
        return not self.fixed and not self.excluded


def optimum(
    problem: PlanningProblem,
    placement: Placement,
    restriction: "_Restriction | None" = None,
    *,
    budget: int | None = None,
) -> tuple[Combination, float] | None:
    """The fastest combination under one placement rule and the gap left unproven, or None where nothing fits."""
    in_turn, pricing, line = placement is Placement.COLOCATED, problem.pricing, problem.line
    restriction = restriction or _Restriction({}, {})
    if budget is None and line.num_devices > EXACT_DEVICES:
        budget = BUDGET
    sketches = {m: pricing.sketch(m, in_turn=in_turn) for m in problem.workflow.model_stages}
    hopeful = _Hopeful(sketches, line, in_turn=in_turn)
    for times in NEAR:
        limit_s = times * hopeful.bound_s
        near = _combiner(problem, hopeful.tables(limit_s, restriction), placement, limit_s, budget)
        found = near.solve()
        if found is not None:
            return found, near.gap
    first = None
    if not restriction.fixed:
        quick = {m: restriction.apply(s.candidates(s.powers_of_two())) for m, s in sketches.items()}
        first = _combiner(problem, quick, placement, math.inf, budget).solve()
    limit_s = first.step_seconds if first else math.inf
    combiner = _combiner(problem, hopeful.tables(limit_s, restriction), placement, limit_s, budget)
    found = combiner.solve() or first
    return (found, combiner.gap) if found else None


class _Hopeful:
    """Which candidates may still be part of a step faster than some limit. bound_s: what no step undercuts."""

    def __init__(self, sketches: Mapping[ModelStage, Sketch], line: Line, *, in_turn: bool) -> None:
        self.sketches = sketches
        bounds = Bounds({m: s.options() for m, s in sketches.items()}, num_devices=line.num_devices, in_turn=in_turn)
        nothing = np.zeros(bounds.num_waves)
        self._bounds = {m: bounds.completions(m, {}, nothing).sum(axis=1) for m in sketches}
        self.bound_s = max(float(bounds.min(initial=math.inf)) for bounds in self._bounds.values())

    def tables(self, limit_s: float, restriction: "_Restriction") -> dict[ModelStage, Candidates]:
        return {m: restriction.apply(s.candidates(self._bounds[m] < limit_s)) for m, s in self.sketches.items()}


def _combiner(
    problem: PlanningProblem,
    tables: Mapping[ModelStage, Candidates],
    placement: Placement,
    limit_s: float,
    budget: int | None,
) -> Combiner:
    return Combiner(
        problem.line,
        {m: best_settings(table) for m, table in tables.items()},
        syncs=problem.workflow.syncs,
        sync_price=problem.pricing.sync_price,
        placement=placement,
        limit_s=limit_s,
        budget=budget,
    )


def _choice(
    problem: PlanningProblem, found: Combination, gap: float, placement: Placement, current: Plan | None
) -> Choice:
    """The combination as a plan of device ids, placed near the current one."""
    line = problem.line
    spans = nearest_spans(line, found, placement, current) if current else found.spans
    plan = Plan.of({m: stage_plan(line, c, spans[m][0]) for m, c in found.chosen.items()})
    used = set(plan.devices)
    return Choice(
        plan=plan,
        settings={m: _setting(c, m in found.shared) for m, c in found.chosen.items()},
        wave_seconds=found.wave_seconds,
        sync_seconds=found.sync_seconds,
        placement=placement,
        idle_devices=tuple(d for d in problem.cluster.device_ids if d not in used),
        gap=gap,
    )


def stage_plan(line: Line, candidate: Candidate, start: int) -> StagePlan:
    """A candidate on the block that starts at a position of the line."""
    return StagePlan.of(candidate.layout, line.groups(start, candidate.grain, candidate.num_groups))


def _setting(candidate: Candidate, shares_weights: bool) -> Setting:
    return Setting(
        micro_batch=candidate.micro_batch,
        recompute=candidate.recompute,
        seconds=sum(candidate.wave_seconds),
        active_bytes=candidate.shared_active_bytes if shares_weights else candidate.active_bytes,
        idle_bytes=candidate.shared_idle_bytes if shares_weights else candidate.idle_bytes,
        shares_weights=shares_weights,
    )

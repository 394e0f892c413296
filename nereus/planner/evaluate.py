"""The price of a plan someone brings: its step, its memory device by device, and whether it fits.

A plan is priced under the settings it says; those it leaves out are filled in by the fastest that fit, so that what was
priced, is printed and runs is one complete plan.

Prices one candidate per model-stage, a row of the columns that the search fills, on the devices the plan names. How a
plan's candidates share devices, memory and waves is found from the plan alone, so that a chosen plan priced here is a
check of the search; the columns themselves are checked against plain formulas in the tests.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from nereus.cluster import Link
from nereus.errors import PlanError
from nereus.plan import ModelStage, Plan, Recompute, Stage, StagePlan
from nereus.planner.prices.cost import StageCost
from nereus.planner.prices.footprints import StageMemory, setting_memories
from nereus.planner.prices.passes import Span
from nereus.planner.problem import PlanningProblem
from nereus.planner.search.bounds import step_of
from nereus.planner.space.line import Line, speed_ranks

Setting = tuple[int, Recompute]
"""(micro-batch, recomputation); the micro-batch of a generation is its sequences at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagePrice:
    """A model-stage of a plan under its settings. micro_batch: where it generates, sequences at once."""

    micro_batch: int
    recompute: Recompute
    cost: StageCost
    memory: StageMemory
    shares_weights: bool

    @property
    def peak_bytes(self) -> int:
        """Bytes beyond its idle ones while it runs."""
        return self.memory.active_bytes - self.memory.idle_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PlanPrice:
    """A plan's step and memory. plan: with every setting said.

    device_bytes, capacity_bytes: peak and usable bytes by device id. excess_bytes: most by which a device is overfull.
    overlapped: generation of the next batch runs beside the other waves, on devices of its own.
    """

    plan: Plan
    stages: dict[ModelStage, StagePrice]
    wave_seconds: tuple[float, ...]
    sync_seconds: dict[tuple[ModelStage, ModelStage], float]
    device_bytes: dict[int, int]
    capacity_bytes: dict[int, int]
    overlapped: bool = False

    @property
    def step_seconds(self) -> float:
        waves = step_of(np.array(self.wave_seconds), overlapped=self.overlapped)
        return float(waves) + sum(self.sync_seconds.values())

    @property
    def excess_bytes(self) -> int:
        return max(self.device_bytes[d] - self.capacity_bytes[d] for d in self.device_bytes)

    @property
    def feasible(self) -> bool:
        return self.excess_bytes <= 0

    @property
    def memory_share(self) -> float:
        """Peak of the fullest device over what a plan may use of it."""
        return max(used / self.capacity_bytes[d] for d, used in self.device_bytes.items())


def price(problem: PlanningProblem, plan: Plan, *, in_turn: bool | None = None) -> PlanPrice:
    """Price a plan on its own devices; raises PlanError where the models or the cluster do not admit it.

    Settings that the plan leaves out are the fastest that fit, or else the leanest.
    in_turn: whether concurrent model-stages share devices; found from the plan by default.
    """
    check_plan(problem, plan)
    return _price(problem, plan, plan.takes_turns if in_turn is None else in_turn)


def complete(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with every setting said: its own, and where it leaves one out the fastest that fits, or the leanest.

    `plan` need not be one that the planner would consider, as long as the models and the cluster have what it names.
    """
    return plan if plan.is_complete else _price(problem, plan, plan.takes_turns).plan


def _price(problem: PlanningProblem, plan: Plan, in_turn: bool) -> PlanPrice:
    pricer = _Pricer(problem, plan, in_turn)
    held = {} if plan.is_complete else {m: pricer.idle_bytes(m) for m in plan.model_stages}
    stages = {m: pricer.stage(m, held) for m in plan.model_stages}
    return PlanPrice(
        plan=Plan.of({m: _said(m, stage_plan, stages[m]) for m, stage_plan in plan.stages}),
        stages=stages,
        wave_seconds=pricer.wave_seconds(stages),
        sync_seconds=pricer.sync_seconds(),
        device_bytes=pricer.device_bytes(stages),
        capacity_bytes={d: pricer.capacity[d] for d in plan.devices},
        overlapped=problem.workflow.max_staleness > 0 and generates_apart(plan),
    )


def _said(m: ModelStage, stage_plan: StagePlan, priced: StagePrice) -> StagePlan:
    """A model-stage's plan with the settings that it was priced under."""
    if m.stage is Stage.TRAINING:
        return stage_plan.with_settings(micro_batch=priced.micro_batch, recompute=priced.recompute)
    if m.stage is Stage.INFERENCE:
        return stage_plan.with_settings(micro_batch=priced.micro_batch)
    cache_bytes = stage_plan.cache_bytes or priced.memory.active["kv_cache"]
    return stage_plan.with_settings(max_num_seqs=priced.micro_batch, cache_bytes=cache_bytes)


def generates_apart(plan: Plan) -> bool:
    """Whether no device that generates does anything else."""
    generation = {d for m, stage_plan in plan.stages if m.stage is Stage.GENERATION for d in stage_plan.devices}
    others = {d for m, stage_plan in plan.stages if m.stage is not Stage.GENERATION for d in stage_plan.devices}
    return bool(generation) and not generation & others


def check_plan(problem: PlanningProblem, plan: Plan) -> None:
    """Raise PlanError in one line where a plan is not valid for the workflow, the models or the cluster."""
    problem.workflow.check_plan(plan)
    known = set(problem.cluster.device_ids)
    for m, stage_plan in plan.stages:
        spec = problem.specs[m.role]
        try:
            spec.check_layout(**stage_plan.layout.axes)
        except PlanError as error:
            raise PlanError(f"{m}: {error}") from None
        missing = [d for d in stage_plan.devices if d not in known]
        if missing:
            raise PlanError(f"{m}: the cluster has no device {missing[0]}; it has {len(known)}")
        _check_groups(problem, m, stage_plan)
        samples = samples_shared(problem, m)
        if stage_plan.dp > samples:
            raise PlanError(f"{m}: dp {stage_plan.dp} exceeds the {samples} samples its units share")


def samples_shared(problem: PlanningProblem, model_stage: ModelStage) -> int:
    """Samples that the units of a model-stage share out at once."""
    work = problem.workload
    return work.mini_batch_samples if model_stage.stage is Stage.TRAINING else work.num_samples


def _check_groups(problem: PlanningProblem, m: ModelStage, stage_plan: StagePlan) -> None:
    tp, node = stage_plan.layout.tp, problem.line.max_node
    valid = ", ".join(str(t) for t in problem.specs[m.role].valid_tp if t <= node)
    if tp > node:
        raise PlanError(f"{m}: tp {tp} exceeds a node of {node} devices; valid tp: {valid}")
    for unit in stage_plan.units:
        for first in range(0, len(unit), tp):
            nodes = {problem.cluster.device(d).node for d in unit[first : first + tp]}
            if len(nodes) > 1:
                group = list(unit[first : first + tp])
                raise PlanError(f"{m}: the tp group {group} lies on nodes {', '.join(sorted(nodes))}; keep it on one")


class _Pricer:
    """One plan on one problem."""

    def __init__(self, problem: PlanningProblem, plan: Plan, in_turn: bool) -> None:
        self.problem, self.plan, self.in_turn = problem, plan, in_turn
        line: Line = problem.line
        self.capacity = {device.id: line.capacity_at(place) for place, device in enumerate(line.devices)}
        self.members = {m: frozenset(stage_plan.devices) for m, stage_plan in plan.stages}
        holders = {d: tuple(m for m, members in self.members.items() if d in members) for d in plan.devices}
        self.holders = holders
        self.sharing = tuple(dict.fromkeys(holders.values()))
        self.ranks = speed_ranks(problem.cluster)
        self._tried: dict[ModelStage, dict[Setting, StageMemory]] = {}

    def accelerator(self, m: ModelStage) -> str:
        """The slowest type that a block of the model-stage reaches, in planning order."""
        last = max(place for place, d in enumerate(self.problem.line.devices) if d.id in self.members[m])
        return max((d.accelerator for d in self.problem.line.devices[: last + 1]), key=self.ranks.__getitem__)

    def span(self, m: ModelStage) -> Span:
        cluster, stage_plan = self.problem.cluster, self.plan[m]
        nodes = [{cluster.device(d).node for d in unit} for unit in stage_plan.units]
        inter = Link.INTER_NODE
        whole = len(set().union(*nodes)) == 1
        return Span(
            pp_link=inter if any(len(n) > 1 for n in nodes) else Link.INTRA_NODE,
            dp_link=Link.INTRA_NODE if whole else inter,
        )

    def memories(self, m: ModelStage, settings: Sequence[Setting]) -> tuple[StageMemory, ...]:
        """Bytes under each of the settings."""
        problem, stage_plan = self.problem, self.plan[m]
        return setting_memories(
            m, problem.specs[m.role], stage_plan.layout, tuple(settings), dp=stage_plan.dp, workload=problem.workload,
            precision=problem.precision, shares_weights=self.plan.shares_weights(m) is not None,
        )  # fmt: skip

    def cost(self, m: ModelStage, micro_batch: int, recompute: Recompute) -> StageCost:
        problem, stage_plan = self.problem, self.plan[m]
        node = problem.line.max_node
        alone = sum(other.stage is m.stage for other in self.plan.model_stages) == 1
        workers = min(len(self.members[m]), node) if alone or self.in_turn else node
        return problem.cost.stage_seconds(
            m, problem.specs[m.role], stage_plan.layout, dp=stage_plan.dp, workload=problem.workload,
            micro_batch=micro_batch, recompute=recompute, precision=problem.precision, tasks=problem.workflow.tasks,
            accelerator=self.accelerator(m), span=self.span(m), active_workers_on_node=workers,
        )  # fmt: skip

    def _settings(self, m: ModelStage) -> Iterator[Setting]:
        """Settings that the plan says; of what it leaves out everything there is."""
        unit = -(-samples_shared(self.problem, m) // self.plan[m].dp)
        space, said = self.problem.limits.space, self.plan[m]
        size = said.max_num_seqs if m.stage is Stage.GENERATION else said.micro_batch
        recomputes = space.recomputes if said.recompute is None else (said.recompute,)
        for recompute in recomputes if m.stage is Stage.TRAINING else (Recompute.NONE,):
            for micro_batch in space.micro_batches(m.stage, unit) if size is None else (size,):
                yield micro_batch, recompute

    def tried(self, m: ModelStage) -> dict[Setting, StageMemory]:
        """Every setting that the model-stage may take, with its bytes."""
        if m not in self._tried:
            settings = list(self._settings(m))
            self._tried[m] = dict(zip(settings, self.memories(m, settings), strict=True))
        return self._tried[m]

    def _at_once(self, m: ModelStage, setting: Setting) -> Setting:
        """Of so many sequences those for which the plan's cache has room at their longest; else the micro-batch."""
        room, (micro_batch, recompute) = self.plan[m].cache_bytes, setting
        if m.stage is not Stage.GENERATION or room is None:
            return setting
        needed = self.tried(m)[setting].active["kv_cache"]
        return setting if needed <= room else (max(1, micro_batch * room // needed), recompute)

    def idle_bytes(self, m: ModelStage) -> int:
        """Most bytes the model-stage may hold while others run, over its settings."""
        return max(memory.idle_bytes for memory in self.tried(m).values())

    def stage(self, m: ModelStage, held: dict[ModelStage, int]) -> StagePrice:
        """The model-stage under its settings: the fastest that fit beside what others hold, or else alone."""
        runs = {setting: self._at_once(m, setting) for setting in self.tried(m)}
        memories = dict(zip(runs, self.memories(m, list(runs.values())), strict=True))
        best = next(iter(runs)) if len(runs) == 1 else self._best(m, held, runs, memories)
        return StagePrice(*best, self.cost(m, *runs[best]), memories[best], self.plan.shares_weights(m) is not None)

    def _best(
        self,
        m: ModelStage,
        held: dict[ModelStage, int],
        runs: dict[Setting, Setting],
        memories: dict[Setting, StageMemory],
    ) -> Setting:
        """runs, memories: what runs at once under each setting, and its bytes."""
        room = min(
            self.capacity[d] - sum(held[o] for o, members in self.members.items() if o != m and d in members)
            for d in self.members[m]
        )
        alone = min(self.capacity[d] for d in self.members[m])

        def rank(setting: Setting) -> tuple[float, float]:
            needed = memories[setting].active_bytes
            if needed > alone:
                return 2.0, float(needed)
            return 0.0 if needed <= room else 1.0, self.cost(m, *runs[setting]).seconds

        return min(runs, key=rank)

    def wave_seconds(self, stages: dict[ModelStage, StagePrice]) -> tuple[float, ...]:
        """Each wave: its most loaded device. `sharing` has the sets of model-stages that meet on some device."""
        waves = self.problem.workflow.waves
        result = []
        for wave in range(1 + max(waves.values())):
            tasks = [task for task in self.problem.workflow.tasks if waves[task.name] == wave]
            busy = dict.fromkeys(stages, 0.0)
            for task in tasks:
                busy[task.model_stage] += stages[task.model_stage].cost.per_task[task.name]
            result.append(max(sum(busy[m] for m in together) for together in self.sharing))
        return tuple(result)

    def device_bytes(self, stages: dict[ModelStage, StagePrice]) -> dict[int, int]:
        """Peak bytes of each device: what all on it keep, and the most that one adds while it runs."""
        peaks = {
            together: sum(stages[m].memory.idle_bytes for m in together) + max(stages[m].peak_bytes for m in together)
            for together in self.sharing
        }
        return {device: peaks[together] for device, together in self.holders.items()}

    def sync_seconds(self) -> dict[tuple[ModelStage, ModelStage], float]:
        problem, result = self.problem, {}
        for source, target in problem.workflow.syncs:
            if self.plan.shares_weights(target) == source:
                result[source, target] = 0.0
                continue
            a, b = self.plan[source], self.plan[target]
            result[source, target] = problem.cost.sync_seconds(
                problem.specs[source.role], (a.layout, a.dp), (b.layout, b.dp),
                same_node=len(problem.cluster.nodes) == 1, precision=problem.precision,
                accelerator=max(self.accelerator(source), self.accelerator(target), key=self.ranks.__getitem__),
            )  # fmt: skip
        return result


def tokens_per_second(problem: PlanningProblem, step_seconds: float) -> float:
    """Prompt and response tokens of a step over its seconds."""
    total = problem.workload.num_samples * problem.workload.mean_tokens
    return total / step_seconds if step_seconds > 0 else math.inf

"""What differs between two plans: per model-stage, which buffers appear, which disappear and what can be read. Pure.

A buffer is kept where a device holds the same rank of the same layout before and after, whoever its unit mates are;
so equal plans, units in another order and recombined units change nothing.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from nereus.plan import MODEL_STAGES, ModelStage, Plan, Stage, StagePlan
from nereus.shards.overlap import BoolArray
from nereus.transition.operations import Infeasible, Unit
from nereus.transition.price import NO_BUFFERS, Buffers, StageState


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Change:
    """How the buffers of one model-stage must change.

    source_stage, source_plan, source: whole units to read from and their buffers; another model-stage's where this one
        has no units of its own.
    current_plan, current: its own units and their buffers on living devices.
    released: [len(current.devices)] which of them the target has not.
    target_plan: its units under the target plan, None where it then uses the parameters of training in place.
    acquired: [len(target.devices)] which target buffers are new.
    """

    model_stage: ModelStage
    state: StageState
    source_stage: ModelStage
    source_plan: StagePlan
    source: Buffers
    current_plan: StagePlan | None
    current: Buffers
    released: BoolArray
    target_plan: StagePlan | None
    target: Buffers
    acquired: BoolArray

    @property
    def acquires(self) -> bool:
        return bool(self.acquired.any())

    @property
    def units_to_build(self) -> tuple[Unit, ...]:
        """Target units with at least one new buffer."""
        if self.target_plan is None:
            return ()
        if self.acquired.all():
            return self.target_plan.units
        building = self.acquired.reshape(self.target_plan.dp, -1).any(axis=1)
        return tuple(self.target_plan.units[i] for i in np.flatnonzero(building))

    @property
    def new_buffers(self) -> Buffers:
        return self.target.where(self.acquired)

    @property
    def old_buffers(self) -> Buffers:
        return self.current.where(self.released)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Held:
    """The model-stages of a plan that hold units of their own, and their buffers; others use those of training."""

    plans: dict[ModelStage, StagePlan]
    buffers: dict[ModelStage, Buffers]

    @classmethod
    def of(cls, plan: Plan) -> "Held":
        plans = holding_stages(plan)
        return cls(plans, {model_stage: Buffers.of(stage_plan) for model_stage, stage_plan in plans.items()})


def holding_stages(plan: Plan) -> dict[ModelStage, StagePlan]:
    """The model-stages of a plan that hold units of their own; the others use those of training in place."""
    stages = plan.placed.stages  # settings move nothing
    training = {m.role: stage_plan for m, stage_plan in stages if m.stage is Stage.TRAINING}
    return {m: held for m, held in stages if m.stage is Stage.TRAINING or training.get(m.role) != held}


def diff(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], lost: Iterable[int] = ()
) -> tuple[Change, ...] | Infeasible:
    """The changes of every model-stage that changes, in the order generation, inference, training.

    lost: devices whose buffers are gone; units are recombined from what lives. Infeasible where no copy lives.
    """
    return diff_held(Held.of(current), target, states=states, lost=lost)


def diff_held(
    current: Held, target: Plan, *, states: Mapping[ModelStage, StageState], lost: Iterable[int] = ()
) -> tuple[Change, ...] | Infeasible:
    """`diff` where the buffers of the current plan are known already."""
    dead = frozenset(lost)
    named = frozenset(target.model_stages)
    dropped = [model_stage.name for model_stage in current.plans if model_stage not in named]
    if dropped:
        return Infeasible(f"the target plan drops {', '.join(dropped)}; its last copy would be destroyed")
    wanted, changes = holding_stages(target), []
    for model_stage in sorted(named, key=_STAGE_ORDER.__getitem__):
        change = _change(current, model_stage, wanted.get(model_stage), states=states, dead=dead)
        if isinstance(change, Infeasible):
            return change
        if change is not None:
            changes.append(change)
    return tuple(changes)


_BY_STAGE = sorted(MODEL_STAGES, key=lambda model_stage: tuple(Stage).index(model_stage.stage))
_STAGE_ORDER = {model_stage: place for place, model_stage in enumerate(_BY_STAGE)}


def _change(
    current: Held,
    model_stage: ModelStage,
    target: StagePlan | None,
    *,
    states: Mapping[ModelStage, StageState],
    dead: frozenset[int],
) -> Change | Infeasible | None:
    before = current.plans.get(model_stage)
    if before == target and not (dead and before is not None and dead.intersection(before.devices)):
        return None
    if dead and target is not None and dead.intersection(target.devices):
        return Infeasible(f"the target plan places {model_stage} on lost devices")
    readable = _readable(current, model_stage, dead)
    if isinstance(readable, Infeasible):
        return readable
    source_stage, source_plan, source = readable
    holds = current.buffers.get(model_stage, NO_BUFFERS)
    if dead:
        holds = holds.where(~np.isin(holds.devices, list(dead)))
    after = NO_BUFFERS if target is None else Buffers.of(target)
    if target is not None and target.layout == holds.layout and len(holds.devices):
        size = 1 + int(max(holds.devices.max(), after.devices.max()))
        acquired = holds.rank_table(size)[after.devices] != after.ranks
        released = after.rank_table(size)[holds.devices] != holds.ranks
        if not acquired.any() and not released.any():
            return None
    else:
        acquired, released = np.ones(len(after.devices), dtype=np.bool_), np.ones(len(holds.devices), dtype=np.bool_)
    return Change(
        model_stage, states[model_stage], source_stage, source_plan, source, before, holds, released, target, after,
        acquired,
    )  # fmt: skip


def _readable(
    current: Held, model_stage: ModelStage, dead: frozenset[int]
) -> tuple[ModelStage, StagePlan, Buffers] | Infeasible:
    """The whole units a model-stage can be built from: its own, else those of the training of the same role."""
    for stage in (model_stage, ModelStage(model_stage.role, Stage.TRAINING)):
        if stage not in current.plans:
            continue
        if not dead:
            return stage, current.plans[stage], current.buffers[stage]
        units = whole_units(current.plans[stage], dead)
        if units:
            found = StagePlan(current.plans[stage].layout, units)
            return stage, found, Buffers.of(found)
    lost = f" once devices {sorted(dead)} are lost" if dead else ""
    return Infeasible(f"no whole copy of {model_stage} lives{lost}; restore it from a checkpoint")


def whole_units(stage_plan: StagePlan, dead: frozenset[int]) -> tuple[Unit, ...]:
    """Units recombined from the living buffers of each rank; those without a loss stay as they are."""
    if not dead:
        return stage_plan.units
    intact = [unit for unit in stage_plan.units if dead.isdisjoint(unit)]
    broken = [unit for unit in stage_plan.units if not dead.isdisjoint(unit)]
    by_rank = [[unit[rank] for unit in broken if unit[rank] not in dead] for rank in range(stage_plan.layout.num_ranks)]
    return (*intact, *zip(*by_rank, strict=False))

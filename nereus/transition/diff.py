"""What differs between two plans: per model-stage, which buffers appear, which disappear and what can be read. Pure.

A buffer is kept where a device holds the same rank of the same layout before and after, whoever its unit mates are;
so equal plans, units in another order and recombined units change nothing.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from nereus.plan import ModelStage, Plan, Stage, StagePlan
from nereus.transition.cost import NO_BUFFERS, Buffers, StageState
from nereus.transition.overlap import BoolArray
from nereus.transition.primitives import Infeasible, Unit

STAGE_ORDER = tuple(Stage)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Change:
    """How the buffers of one model-stage must change.

    source_stage, source: whole units to read from; another model-stage's where this one has no units of its own.
    current_plan, current: its own units and their buffers on living devices.
    released: [len(current.devices)] which of them the target has not.
    target_plan: its units under the target plan, None where it then uses the parameters of training in place.
    acquired: [len(target.devices)] which target buffers are new.
    """

    model_stage: ModelStage
    state: StageState
    source_stage: ModelStage
    source: StagePlan
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
        building = self.acquired.reshape(self.target_plan.dp, -1).any(axis=1)
        if building.all():
            return self.target_plan.units
        return tuple(self.target_plan.units[i] for i in np.flatnonzero(building))

    @property
    def new_buffers(self) -> Buffers:
        return self.target.where(self.acquired)

    @property
    def old_buffers(self) -> Buffers:
        return self.current.where(self.released)


def diff(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], lost: Iterable[int] = ()
) -> tuple[Change, ...] | Infeasible:
    """The changes of every model-stage that changes, in the order generation, inference, training.

    lost: devices whose buffers are gone; units are recombined from what lives. Infeasible where no copy lives.
    """
    dead = frozenset(lost)
    dropped = [m.name for m in current.model_stages if m not in target]
    if dropped:
        return Infeasible(f"the target plan drops {', '.join(dropped)}; its last copy would be destroyed")
    changes: list[Change] = []
    for model_stage, stage_plan in sorted(target.stages, key=lambda item: STAGE_ORDER.index(item[0].stage)):
        own = stage_plan if target.holder(model_stage) == model_stage else None
        change = _change(current, model_stage, own, states=states, dead=dead)
        if isinstance(change, Infeasible):
            return change
        if change is not None:
            changes.append(change)
    return tuple(changes)


def _change(
    current: Plan,
    model_stage: ModelStage,
    target: StagePlan | None,
    *,
    states: Mapping[ModelStage, StageState],
    dead: frozenset[int],
) -> Change | Infeasible | None:
    had = current.get(model_stage)
    before = had if had is not None and current.holder(model_stage) == model_stage else None
    if before == target and not (dead and before is not None and dead.intersection(before.devices)):
        return None
    if dead and target is not None and dead.intersection(target.devices):
        return Infeasible(f"the target plan places {model_stage} on lost devices")
    found = _readable(current, model_stage, before, dead)
    if isinstance(found, Infeasible):
        return found
    source_stage, source = found
    held_now = _living(before, dead)
    after = NO_BUFFERS if target is None else Buffers.of(target)
    acquired = np.ones(len(after.devices), dtype=np.bool_)
    released = np.ones(len(held_now.devices), dtype=np.bool_)
    if target is not None and target.layout == held_now.layout and len(held_now.devices):
        size = 1 + int(max(held_now.devices.max(), after.devices.max()))
        acquired = held_now.rank_table(size)[after.devices] != after.ranks
        released = after.rank_table(size)[held_now.devices] != held_now.ranks
    if not acquired.any() and not released.any():
        return None
    return Change(
        model_stage, states[model_stage], source_stage, source, before, held_now, released, target, after, acquired
    )  # fmt: skip


def _living(before: StagePlan | None, dead: frozenset[int]) -> Buffers:
    if before is None:
        return NO_BUFFERS
    buffers = Buffers.of(before)
    if not dead:
        return buffers
    alive = ~np.isin(buffers.devices, list(dead))
    return buffers.where(alive)


def _readable(
    current: Plan, model_stage: ModelStage, before: StagePlan | None, dead: frozenset[int]
) -> tuple[ModelStage, StagePlan] | Infeasible:
    """The whole units a model-stage can be built from: its own, else those of the training of the same role."""
    training = ModelStage(model_stage.role, Stage.TRAINING)
    for stage in (model_stage, training) if model_stage != training else (training,):
        held_plan = before if stage == model_stage else current.get(stage)
        units = whole_units(held_plan, dead) if held_plan is not None else ()
        if units and held_plan is not None:
            return stage, held_plan if not dead else StagePlan(held_plan.layout, units)
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

"""The operations of one changed model-stage: Split -> Destroy -> Extend -> Merge, or Reshard which fuses them. Pure.

A chain goes through the largest common sub-layout: every device splits what it holds into a shard of that layout (a
union of the boxes of both sides), new devices get such shards, and every rank then narrows its own. A Reshard sends
each target rank only the boxes it lacks. No step of a chain can send less to a device than the Reshard does, and each
step that sends sets up a group of its own, so a chain is kept only where it is one step long: then both cost the same.
"""

import dataclasses

import numpy as np

from nereus.plan import Layout, ModelStage, StagePlan
from nereus.shards.overlap import IntArray, common_layout, enclosing_ranks
from nereus.transition.diff import Change
from nereus.transition.operations import Load, Operation, Primitive, Unit
from nereus.transition.price import NO_BUFFERS, Buffers, DeviceTable, Rates, transfer_load


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Step:
    """An operation not yet placed in the global order: the fields of `Operation`, with buffers as arrays, and its load.

    acquires, releases: the buffers it allocates at its start and frees at its end.
    readers: [n] devices of its sources.
    """

    primitive: Primitive
    model_stage: ModelStage
    source_stage: ModelStage
    source_layout: Layout
    sources: tuple[Unit, ...]
    target_layout: Layout
    targets: tuple[Unit, ...]
    acquires: Buffers
    releases: Buffers
    readers: IntArray
    load: Load

    def operation(self, index: int) -> Operation:
        """The operation at its place in the global order."""
        return Operation(
            index, self.primitive, self.model_stage, self.source_stage, self.source_layout, self.sources,
            self.target_layout, self.targets, self.acquires.device_ids, self.releases.device_ids,
        )  # fmt: skip


def destroy_step(change: Change, released: Buffers, *, rates: Rates) -> Step:
    """Free some of the change's own buffers."""
    assert change.current_plan is not None
    layout, stage, units = released.layout, change.model_stage, change.current_plan.units
    if len(released.devices) < change.current_plan.dp * layout.num_ranks:
        losing = frozenset(released.devices.tolist())
        units = tuple(unit for unit in units if not losing.isdisjoint(unit))
    return Step(
        Primitive.DESTROY, stage, stage, layout, units, layout, (), NO_BUFFERS, released, NO_BUFFERS.devices,
        Load(rates.destroy_s),
    )  # fmt: skip


def offload_step(change: Change, layout: Layout, unit: Unit, *, rates: Rates) -> Step:
    """Copy a unit to the host memory of its nodes."""
    stage = change.model_stage
    load = Load(float(change.state.buffer_bytes(layout).max()) / rates.host_bytes_per_s)
    return Step(
        Primitive.OFFLOAD, stage, stage, layout, (unit,), layout, (), NO_BUFFERS, NO_BUFFERS,
        np.array(unit, dtype=np.int64), load,
    )  # fmt: skip


def unit_step(
    change: Change,
    unit: Unit,
    new: Buffers,
    *,
    source_stage: ModelStage,
    source_layout: Layout,
    source: Unit,
    in_host: bool,
    table: DeviceTable,
    rates: Rates,
) -> Step:
    """Build the buffers `new` of one target unit from one unit that lives, on devices or in host memory."""
    primitive = Primitive.EXTEND if source_layout == new.layout else Primitive.RESHARD
    held = Buffers.of(StagePlan(source_layout, (source,)))
    load = transfer_load(change.state, held, new, devices=table, rates=rates)
    if in_host:
        primitive = Primitive.RELOAD
        seconds = float(change.state.buffer_bytes(source_layout).max()) / rates.host_bytes_per_s
        load = dataclasses.replace(load, seconds=load.seconds + seconds)
    return Step(
        primitive, change.model_stage, source_stage, source_layout, (source,), new.layout, (unit,), new, NO_BUFFERS,
        held.devices, load,
    )  # fmt: skip


def building_steps(change: Change, *, table: DeviceTable, rates: Rates, fuse: bool = True) -> tuple[Step, ...]:
    """What must run before the change's new units are whole; empty where it acquires nothing.

    fuse: False keeps to Split, Extend and Merge even where a Reshard is cheaper (but for a model-stage that reads the
        units of another: buffers of two model-stages do not form one unit).
    """
    if not change.acquires:
        return ()
    if change.source.layout == change.target.layout:
        return (_extend(change, table, rates),)
    if not fuse and change.source_stage == change.model_stage:
        return _unfused(change, table, rates)
    primitive, units = _fused_primitive(change, table), change.source_plan.units
    return (
        _step(change, primitive, change.source, units, change.target, change.units_to_build, table=table, rates=rates),
    )


def _step(
    change: Change,
    primitive: Primitive,
    source: Buffers,
    sources: tuple[Unit, ...],
    target: Buffers,
    targets: tuple[Unit, ...],
    *,
    table: DeviceTable,
    rates: Rates,
    releases: Buffers = NO_BUFFERS,
) -> Step:
    """The step that assembles the buffers `target`, part of the units `targets`, from those of the units `sources`."""
    load = transfer_load(change.state, source, target, devices=table, rates=rates)
    return Step(
        primitive, change.model_stage, change.source_stage, source.layout, sources, target.layout, targets, target,
        releases, source.devices, load,
    )  # fmt: skip


def _extend(change: Change, table: DeviceTable, rates: Rates) -> Step:
    """New replicas of a layout that lives; as many units send as are built, near ones first."""
    targets, new, source, sources = change.units_to_build, change.new_buffers, change.source, change.source_plan.units
    if len(targets) < len(sources):
        chosen = _sending_units(source, new, len(targets), table)
        size = source.layout.num_ranks
        sources = tuple(sources[i] for i in chosen.tolist())
        places = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        source = Buffers(source.layout, source.devices[places], source.ranks[places])
    return _step(change, Primitive.EXTEND, source, sources, new, targets, table=table, rates=rates)


def _sending_units(source: Buffers, receivers: Buffers, count: int, table: DeviceTable) -> IntArray:
    """Indices of the source units that send: those a receiver is part of, and up to `count` on, near ones first."""
    receives = np.zeros(table.size, dtype=np.bool_)
    receives[receivers.devices] = True
    part = receives[source.devices].reshape(-1, source.layout.num_ranks).any(axis=1)
    near = np.zeros(len(table.host_bytes), dtype=np.bool_)
    near[table.node[receivers.devices]] = True
    first_devices = source.devices[:: source.layout.num_ranks]
    preferred = np.argsort(2 - 2 * part - near[table.node[first_devices]], kind="stable")
    return np.sort(preferred[: max(count, int(part.sum()))])


def _fused_primitive(change: Change, table: DeviceTable) -> Primitive:
    """SPLIT or MERGE where the fused move is exactly that, else RESHARD."""
    source = change.source
    common = common_layout(source.layout, change.target.layout)
    if common not in (source.layout, change.target.layout):
        return Primitive.RESHARD
    own = source.rank_table(table.size)[change.target.devices]
    if own.min() < 0:
        return Primitive.RESHARD
    held = enclosing_ranks(source.layout, common)[own]
    needed = enclosing_ranks(change.target.layout, common)[change.target.ranks]
    if (held != needed).any():
        return Primitive.RESHARD
    return Primitive.MERGE if common == source.layout else Primitive.SPLIT


def _unfused(change: Change, table: DeviceTable, rates: Rates) -> tuple[Step, ...]:
    """Split to the common layout, Extend it to new devices, Merge to the target layout; steps without work left out.

    Buffers of the common layout that no target keeps are scratch: the Extend frees those it alone has read, the Merge
    the others.
    """
    common = common_layout(change.source.layout, change.target.layout)
    held = change.source
    needed = Buffers(
        common, change.target.devices, enclosing_ranks(change.target.layout, common)[change.target.ranks]
    )  # fmt: skip
    at_source = Buffers(common, held.devices, enclosing_ranks(held.layout, common)[held.ranks])
    lacking = at_source.rank_table(table.size)[needed.devices] != needed.ranks
    splits, merges = common != held.layout, common != change.target.layout
    steps: list[Step] = []

    def add(
        primitive: Primitive, source: Buffers, sources: tuple[Unit, ...], target: Buffers, targets: tuple[Unit, ...],
        *, releases: Buffers = NO_BUFFERS,
    ) -> None:  # fmt: skip
        steps.append(
            _step(change, primitive, source, sources, target, targets, table=table, rates=rates, releases=releases)
        )

    if splits:
        made = at_source if lacking.any() else needed
        add(Primitive.SPLIT, held, change.source_plan.units, made, _units_of(made))
    if lacking.any():
        surplus = needed.rank_table(table.size)[at_source.devices] != at_source.ranks
        new = needed.where(lacking)
        building = frozenset(new.devices.tolist())
        targets = tuple(unit for unit in _units_of(needed) if not building.isdisjoint(unit))
        freed = at_source.where(surplus) if splits else NO_BUFFERS
        add(Primitive.EXTEND, at_source, _units_of(at_source), new, targets, releases=freed)
    if merges and change.target_plan is not None:
        freed = needed if splits else needed.where(lacking)
        add(Primitive.MERGE, needed, _units_of(needed), change.target, change.target_plan.units, releases=freed)
    return tuple(steps)


def _units_of(buffers: Buffers) -> tuple[Unit, ...]:
    """Units made of buffers that hold every rank equally often."""
    by_rank = [buffers.devices[buffers.ranks == rank].tolist() for rank in range(buffers.layout.num_ranks)]
    return tuple(zip(*by_rank, strict=True))

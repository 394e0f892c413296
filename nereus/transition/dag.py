"""From two placed plans to one ordered DAG for all model-stages. Pure.

    diff -> per model-stage what appears, disappears and can be read
         -> shadow: old and new whole until one commit      (where both fit)
         -> in place: release before acquire, staged in host memory where nothing can be released first
         -> Infeasible(reason)

The mode holds for the whole transition. Devices of the target units are taken as given; `assignment.assign` chooses
them beforehand.
"""

from collections.abc import Iterable, Mapping

from nereus.plan import ModelStage, Plan
from nereus.transition.diff import Held, diff_held
from nereus.transition.in_place import in_place_dag
from nereus.transition.operations import Infeasible, Mode, TransitionDag
from nereus.transition.price import Buffers, DeviceTable, Rates, StageState
from nereus.transition.shadow import shadow_dag


def build_dag(
    current: Plan,
    target: Plan,
    *,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    rates: Rates,
    lost: Iterable[int] = (),
    fuse: bool = True,
) -> TransitionDag | Infeasible:
    """The operations that turn `current` into `target`, ordered, in the mode that memory allows; or why not.

    lost: devices whose state is gone; those that the table lacks are lost as well.
    fuse: False keeps to Split, Extend and Merge in a shadow transition.
    """
    held = Held.of(current)
    dead = frozenset(lost).union(*(absent_devices(buffers, table) for buffers in held.buffers.values()))
    changes = diff_held(held, target, states=states, lost=dead)
    if isinstance(changes, Infeasible):
        return changes
    if not changes:
        return TransitionDag(current, target, Mode.SHADOW)
    for change in changes:
        for device in absent_devices(change.target, table):
            return Infeasible(f"the target plan places {change.model_stage} on device {device}, which is not there")
    shadow = shadow_dag(current, target, changes, held=held, states=states, table=table, rates=rates, fuse=fuse)
    if not isinstance(shadow, Infeasible):
        return shadow
    in_place = in_place_dag(current, target, changes, states=states, table=table, rates=rates, lost=dead)
    if not isinstance(in_place, Infeasible):
        return in_place
    return Infeasible(f"shadow: {shadow.reason}; in place: {in_place.reason}")


def absent_devices(buffers: Buffers, table: DeviceTable) -> tuple[int, ...]:
    """Devices of the buffers that the table lacks."""
    there = table.has(buffers.devices)
    return () if there.all() else tuple(buffers.devices[~there].tolist())

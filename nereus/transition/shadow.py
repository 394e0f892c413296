"""A transition whose old and new units are both whole until one commit. Pure.

Memory only grows up to the commit (but for the scratch of unfused chains), so nothing waits for memory: the DAG has
local edges alone, and the order is free to be the shortest.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage, Plan
from nereus.transition.chain import Step, building_steps, destroy_step
from nereus.transition.cost import Buffers, DeviceTable, Rates, StageState
from nereus.transition.diff import Change
from nereus.transition.order import Job, best_order
from nereus.transition.overlap import IntArray
from nereus.transition.place import Placer
from nereus.transition.primitives import Infeasible, Mode, TransitionDag

GB = 10**9


def bytes_in_use(plan: Plan, states: Mapping[ModelStage, StageState], table: DeviceTable) -> IntArray:
    """[max id + 1]: bytes of every unit's buffers on each device; model-stages that share weights count once."""
    used = np.zeros(table.size, dtype=np.int64)
    for model_stage, stage_plan in plan.stages:
        if plan.holder(model_stage) == model_stage:
            buffers = Buffers.of(stage_plan)
            used[buffers.devices] += states[model_stage].buffer_bytes(stage_plan.layout)[buffers.ranks]
    return used


def first_overfull(used: IntArray, table: DeviceTable) -> str | None:
    """Which device is fullest over its limit, in words; None where all fit."""
    over = used - table.limit_bytes
    worst = int(over.argmax())
    if over[worst] <= 0 or not used[worst]:
        return None
    return f"device {worst} would hold {used[worst] / GB:.2f} GB of {max(int(table.limit_bytes[worst]), 0) / GB:.2f} GB"


def shadow_dag(
    current: Plan,
    target: Plan,
    changes: Sequence[Change],
    *,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    rates: Rates,
    fuse: bool = True,
) -> TransitionDag | Infeasible:
    """The DAG of a shadow transition, or the device on which old and new do not fit together."""
    used = bytes_in_use(current, states, table)
    chains = [building_steps(change, table=table, rates=rates, fuse=fuse) for change in changes]
    steps = [step for chain in chains for step in chain]
    owner = [index for index, chain in enumerate(chains) for _ in chain]
    order = _order(steps, owner, table)
    placer = Placer(current, target, Mode.SHADOW)
    last: dict[ModelStage, int] = {}
    readers: dict[ModelStage, list[int]] = {}
    for index in order:
        change = changes[owner[index]]
        step, state = steps[index], change.state
        used[step.acquires.devices] += state.buffer_bytes(step.acquires.layout)[step.acquires.ranks]
        problem = first_overfull(used, table)
        if problem is not None:
            return Infeasible(f"{problem} during {step.operation.primitive} of {change.model_stage}")
        used[step.releases.devices] -= state.buffer_bytes(step.releases.layout)[step.releases.ranks]
        before = (last[change.model_stage],) if change.model_stage in last else ()
        last[change.model_stage] = placer.add(step, local=before)
        readers.setdefault(step.operation.source_stage, []).append(last[change.model_stage])
    for change in changes:
        if change.released.any():
            built = [last[change.model_stage]] if change.model_stage in last else []
            waits = dict.fromkeys([*built, *readers.get(change.model_stage, ())])
            placer.add(destroy_step(change, change.old_buffers, table=table, rates=rates), local=tuple(waits))
    return placer.dag()


def _order(steps: Sequence[Step], owner: Sequence[int], table: DeviceTable) -> tuple[int, ...]:
    """The order in which the steps of all chains run; steps of one chain keep theirs."""
    if len(steps) < 2:
        return tuple(range(len(steps)))
    takes_part = np.zeros((len(steps), table.size), dtype=np.float32)
    for row, step in zip(takes_part, steps, strict=True):
        row[step.readers] = row[step.acquires.devices] = row[step.releases.devices] = 1.0
    shared = (takes_part @ takes_part.T > 0).tolist()
    jobs = [
        Job(
            step.load.seconds,
            after=sum(1 << j for j in range(i) if owner[j] == owner[i]),
            conflicts=sum(1 << j for j, both in enumerate(shared[i]) if both and j != i),
        )
        for i, step in enumerate(steps)
    ]
    return best_order(jobs)

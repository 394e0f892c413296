"""A transition whose old and new units are both whole until one commit. Pure.

Memory only grows up to the commit (but for the scratch of unfused chains), so nothing waits for memory: the DAG has
local edges alone, and the order is free to be the shortest.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage, Plan
from nereus.shards.overlap import BoolArray, IntArray
from nereus.transition.diff import Change, Held
from nereus.transition.operations import Infeasible, Mode, TransitionDag
from nereus.transition.price import Buffers, DeviceTable, Rates, StageState, readable_bytes
from nereus.transition.schedule import DagBuilder, TimedOperation, best_order
from nereus.transition.steps import Step, building_steps, destroy_step


def bytes_in_use(held: Held, states: Mapping[ModelStage, StageState], table: DeviceTable) -> IntArray:
    """[max id + 1]: bytes of every unit's buffers on each device; model-stages that share weights count once."""
    used = np.zeros(table.size, dtype=np.int64)
    for model_stage, every in held.buffers.items():
        buffers = every.where(table.has(every.devices))
        used[buffers.devices] += states[model_stage].buffer_bytes(buffers.layout)[buffers.ranks]
    return used


def shadow_dag(
    current: Plan,
    target: Plan,
    changes: Sequence[Change],
    *,
    held: Held,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    rates: Rates,
    fuse: bool = True,
) -> TransitionDag | Infeasible:
    """The DAG of a shadow transition, or the device on which old and new do not fit together. `held`: by `current`."""
    chains = [building_steps(change, table=table, rates=rates, fuse=fuse) for change in changes]
    steps = [step for chain in chains for step in chain]
    owner = [index for index, chain in enumerate(chains) for _ in chain]
    freeing = [index for index, change in enumerate(changes) if change.released.any()]
    destroys = [destroy_step(changes[index], changes[index].old_buffers, rates=rates) for index in freeing]
    shared = _shared(steps + destroys, table)
    order = _order(steps, owner, shared)
    problem = _overfull([steps[i] for i in order], bytes_in_use(held, states, table), states, table)
    if problem is not None:
        return problem
    dag_builder = DagBuilder(current, target, Mode.SHADOW)
    last: dict[int, int] = {}
    readers: dict[ModelStage, list[int]] = {}
    for index in order:
        before = (last[owner[index]],) if owner[index] in last else ()
        last[owner[index]] = dag_builder.add(steps[index], local=before)
        readers.setdefault(steps[index].source_stage, []).append(last[owner[index]])
    for i in _in_rounds([row[len(steps) :] for row in shared[len(steps) :]]):
        built = (last[freeing[i]],) if freeing[i] in last else ()
        dag_builder.add(destroys[i], local=(*built, *readers.get(destroys[i].model_stage, ())))
    return dag_builder.dag()


def _overfull(
    steps: Sequence[Step], used: IntArray, states: Mapping[ModelStage, StageState], table: DeviceTable
) -> Infeasible | None:
    """The first step that does not fit, if any; buffers that a later step frees again count up to its end."""
    if not any(len(step.releases.devices) for step in steps):
        total = used.copy()
        for step in steps:
            total[step.acquires.devices] += _sizes(step, step.acquires, states)
        if (total <= table.limit_bytes).all():
            return None
    for step in steps:
        used[step.acquires.devices] += _sizes(step, step.acquires, states)
        over = (used > table.limit_bytes) & (used > 0)
        if over.any():
            device = int((used - table.limit_bytes).argmax())
            return Infeasible(
                f"device {device} would hold {readable_bytes(used[device])} of "
                f"{readable_bytes(table.limit_bytes[device])} during {step.primitive} of {step.model_stage}"
            )
        used[step.releases.devices] -= _sizes(step, step.releases, states)
    return None


def _sizes(step: Step, buffers: Buffers, states: Mapping[ModelStage, StageState]) -> IntArray:
    sizes: IntArray = states[step.model_stage].buffer_bytes(buffers.layout)[buffers.ranks]
    return sizes


def _shared(steps: Sequence[Step], table: DeviceTable) -> list[list[bool]]:
    """[n][n]: whether two steps have a device in common."""
    takes_part = np.zeros((len(steps), table.size), dtype=np.bool_)
    for row, step in zip(takes_part, steps, strict=True):
        row[step.readers] = row[step.acquires.devices] = row[step.releases.devices] = True
    bits = np.packbits(takes_part, axis=1)
    shared: BoolArray = np.logical_or.reduce(bits[:, None] & bits[None], axis=2)
    rows: list[list[bool]] = shared.tolist()
    return rows


def _order(steps: Sequence[Step], owner: Sequence[int], shared: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """The order in which the steps of all chains run; steps of one chain keep theirs."""
    if len(steps) < 2:
        return tuple(range(len(steps)))
    jobs = [
        TimedOperation(
            step.load.seconds,
            after=sum(1 << j for j in range(i) if owner[j] == owner[i]),
            conflicts=sum(1 << j for j in range(len(steps)) if shared[i][j] and j != i),
        )
        for i, step in enumerate(steps)
    ]
    return best_order(jobs)


def _in_rounds(shared: Sequence[Sequence[bool]]) -> list[int]:
    """Destroys, all equally short, in an order that lets as many as possible run at once."""
    order: list[int] = []
    left = list(range(len(shared)))
    while left:
        now: list[int] = []
        for i in left:
            if not any(shared[i][j] for j in now):
                now.append(i)
        order += now
        left = [i for i in left if i not in now]
    return order

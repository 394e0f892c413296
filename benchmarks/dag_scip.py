"""The ordering problem of a transition DAG as a mixed-integer program, solved by SCIP.

Minimise the end of the last operation. Variables: the start of every operation, and for each two that share a device
which of them runs first. Constraints: local edges; operations that share a device do not overlap; on every device,
what is held when an operation starts (what was there, plus and minus what the operations before it acquired and freed)
and what it acquires fit under the limit. The end is no earlier than the work of any one device, which helps the proof.
Resource edges are not given: SCIP may free memory in any order.
"""

import dataclasses
import time
from typing import Any

import pyscipopt

from nereus.plan import ModelStage
from nereus.transition.diff import Held
from nereus.transition.operations import EdgeKind, Mode, Operation, Primitive, TransitionDag
from nereus.transition.price import DeviceTable, StageState
from nereus.transition.shadow import bytes_in_use


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The best schedule SCIP found (None: none), its lower bound, and whether it proved the optimum in time."""

    seconds: float | None
    bound_s: float
    optimal: bool
    took_s: float


def solve(dag: TransitionDag, *, states: dict[ModelStage, StageState], table: DeviceTable, limit_s: float) -> Schedule:
    """The shortest schedule of the DAG's operations within `limit_s` seconds."""
    operations, seconds = dag.operations, dag.seconds
    horizon = sum(seconds)
    model = pyscipopt.Model()
    model.hideOutput()
    model.setParam("limits/time", limit_s)
    start = [model.addVar(f"start{i}", lb=0.0, ub=horizon) for i in range(len(operations))]
    end = model.addVar("end", lb=max(seconds), ub=horizon)
    first: dict[tuple[int, int], Any] = {}
    fixed = _fixed_order(dag)
    for device in {device for operation in operations for device in operation.devices}:
        model.addCons(end >= sum(s for s, o in zip(seconds, operations, strict=True) if device in o.devices))
    for i, earlier in enumerate(operations):
        model.addCons(start[i] + seconds[i] <= end)
        for j in range(i + 1, len(operations)):
            if not earlier.devices & operations[j].devices and (i, j) not in fixed:
                continue
            if (i, j) in fixed:
                model.addCons(start[j] >= start[i] + seconds[i])
                first[i, j], first[j, i] = 1, 0
                continue
            before = model.addVar(f"before{i}_{j}", vtype="B")
            first[i, j], first[j, i] = before, 1 - before
            model.addCons(start[j] >= start[i] + seconds[i] - horizon * (1 - before))
            model.addCons(start[i] >= start[j] + seconds[j] - horizon * before)
    if dag.mode is Mode.IN_PLACE:
        _limit_memory(model, dag, first, states, table)
    model.setObjective(end, "minimize")
    began = time.perf_counter()
    model.optimize()
    found = model.getObjVal() if model.getNSols() else None
    return Schedule(found, model.getDualbound(), model.getStatus() == "optimal", time.perf_counter() - began)


def _fixed_order(dag: TransitionDag) -> set[tuple[int, int]]:
    """Pairs ordered by local edges, and in a shadow transition everything staged before every Destroy."""
    fixed = {(edge.before, edge.after) for edge in dag.edges if edge.kind is EdgeKind.LOCAL}
    if dag.mode is Mode.SHADOW:
        fixed |= {(i, j) for i in range(dag.num_staged) for j in range(dag.num_staged, len(dag.operations))}
    return fixed


def _limit_memory(
    model: pyscipopt.Model,
    dag: TransitionDag,
    first: dict[tuple[int, int], Any],
    states: dict[ModelStage, StageState],
    table: DeviceTable,
) -> None:
    used = bytes_in_use(Held.of(dag.current), states, table)
    changes = [_changes(operation, states) for operation in dag.operations]
    for i, operation in enumerate(dag.operations):
        for device in operation.acquires:
            before = [
                (first[j, i], sum(changes[j][device]))
                for j in range(len(dag.operations))
                if j != i and device in changes[j]
            ]
            room = int(table.limit_bytes[device]) - int(used[device]) - changes[i][device][0]
            scale = max(1, abs(room), *(abs(delta) for _, delta in before)) if before else max(1, abs(room))
            held = pyscipopt.quicksum(chosen * (delta / scale) for chosen, delta in before)
            model.addCons(held <= room / scale)


def _changes(operation: Operation, states: dict[ModelStage, StageState]) -> dict[int, tuple[int, int]]:
    """By device: (bytes acquired at the start, minus bytes freed at the end)."""
    result: dict[int, tuple[int, int]] = {}
    new = states[operation.model_stage].buffer_bytes(operation.target_layout)
    for device, rank in operation.target_ranks().items():
        result[device] = int(new[rank]), 0
    if operation.primitive in (Primitive.DESTROY, Primitive.MERGE):
        old, ranks = states[operation.source_stage].buffer_bytes(operation.source_layout), operation.source_ranks()
        for device in operation.releases:
            result[device] = result.get(device, (0, 0))[0], -int(old[ranks[device]])
    return result

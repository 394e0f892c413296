"""Which device takes which place of the target plan, so that most state is in place already. Pure.

The planner says which devices a plan uses and which places share a node; which of those devices takes which place is
free, as long as nodes stay together. Two exact assignment problems, by bytes already held, one inside the other:

1. whole nodes trade places, for all model-stages at once (nodes of one device type with equally many devices in use);
   the worth of a node in another's place is the best assignment of its devices to the places there;
2. within each node, and for each model-stage alone, devices trade ranks.

Units of one model-stage are interchangeable, since their boxes are equal: only ranks count. Equal patterns of nodes are
solved once. Assignments that keep equally many bytes keep most places as they were.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from nereus.cluster import Cluster
from nereus.plan import ModelStage, Plan, Stage, StagePlan
from nereus.shards.overlap import FloatArray, IntArray, overlap
from nereus.transition.price import Buffers, DeviceTable, StageState


def minimum_assignment(cost: FloatArray | IntArray) -> IntArray:
    """[n]: the column of each row of a square cost matrix [n, n], one to one, of least total cost.

    Shortest augmenting paths with potentials (Jonker and Volgenant 1987), O(n^3); exact for integer costs.
    """
    size = len(cost)
    by_row, by_column = np.zeros(size + 1, dtype=cost.dtype), np.zeros(size + 1, dtype=cost.dtype)
    row_of, came_from = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    far = np.iinfo(np.int64).max // 4 if cost.dtype.kind == "i" else np.inf
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        nearest, used = np.full(size + 1, far, dtype=cost.dtype), np.zeros(size + 1, dtype=np.bool_)
        while True:
            used[column] = True
            here = row_of[column]
            reduced = cost[here - 1] - by_row[here] - by_column[1:]
            better = ~used[1:] & (reduced < nearest[1:])
            nearest[1:][better] = reduced[better]
            came_from[1:][better] = column
            following = int(np.where(used[1:], far, nearest[1:]).argmin()) + 1
            step = nearest[following]
            by_row[row_of[used]] += step
            by_column[used] -= step
            nearest[~used] -= step
            column = following
            if row_of[column] == 0:
                break
        while column:
            row_of[column] = row_of[came_from[column]]
            column = int(came_from[column])
    columns = np.zeros(size, dtype=np.int64)
    columns[row_of[1:] - 1] = np.arange(size)
    return columns


def most_kept(kept: IntArray) -> IntArray:
    """[n]: the device of each place, where `kept[place, device]` is bytes kept; of equal totals the most unchanged."""
    size = len(kept)
    if (kept.diagonal() >= kept.max(axis=1)).all():
        return np.arange(size)
    return minimum_assignment(-(kept * (size + 1) + np.eye(size, dtype=np.int64)))


def most_transported(worth: IntArray, supply: IntArray, demand: IntArray) -> IntArray:
    """[rows, columns]: how many of each row's `supply` go to each column's `demand` for the most total worth.

    The assignment problem with equal rows and equal columns counted, not repeated; supply and demand have one sum.
    Successive shortest augmenting paths, each found by relaxing all arcs at once until nothing changes.
    """
    flow = np.zeros(worth.shape, dtype=np.int64)
    supply, demand, far = supply.copy(), demand.copy(), np.iinfo(np.int64).max // 4
    rows, columns = np.arange(worth.shape[0]), np.arange(worth.shape[1])
    while supply.any():
        to_row = np.where(supply > 0, 0, far)
        row_from, to_column = np.full(len(rows), -1), np.full(len(columns), far)
        column_from = np.zeros(len(columns), dtype=np.int64)
        while True:
            reach = np.where((to_row < far)[:, None], to_row[:, None] - worth, far)
            column_from = np.where(reach.min(axis=0) < to_column, reach.argmin(axis=0), column_from)
            to_column = np.minimum(to_column, reach.min(axis=0))
            back = np.where(flow > 0, to_column[None, :] + worth, far)
            nearer = back.min(axis=1) < to_row
            if not nearer.any():
                break
            row_from[nearer] = back.argmin(axis=1)[nearer]
            to_row[nearer] = back.min(axis=1)[nearer]
        column = int(np.where(demand > 0, to_column, far).argmin())
        path, end = [], column
        while True:
            row = int(column_from[column])
            path.append((row, column, 1))
            if row_from[row] < 0:
                break
            column = int(row_from[row])
            path.append((row, column, -1))
        amount = min([int(supply[row]), int(demand[end]), *(int(flow[r, c]) for r, c, sign in path if sign < 0)])
        for r, c, sign in path:
            flow[r, c] += sign * amount
        supply[row] -= amount
        demand[end] -= amount
    return flow


MAX_KINDS = 256
"""Different nodes up to which whole nodes trade places; more are left where they are."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Worth:
    """Of one model-stage: the rank each device holds and is to hold (-1: none), and bytes kept by rank pair.

    held, wanted: [max id + 1]. kept: [source ranks + 1, target ranks + 1]; the last row and column are zero.
    """

    held: IntArray
    wanted: IntArray
    kept: IntArray

    @classmethod
    def of(cls, source: StagePlan, target: StagePlan, state: StageState, size: int) -> "_Worth":
        common = overlap(state.spec, source.layout, target.layout) * state.element_bytes
        kept = np.zeros((common.shape[0] + 1, common.shape[1] + 1), dtype=np.int64)
        kept[:-1, :-1] = common
        return cls(Buffers.of(source).rank_table(size), Buffers.of(target).rank_table(size), kept)

    def matrix(self, places: IntArray, devices: IntArray) -> IntArray:
        """[places, devices]: bytes that each device keeps at each place; places are named by device ids as well."""
        matrix: IntArray = self.kept[self.held[devices][None, :], self.wanted[places][:, None]]
        return matrix


def assign(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, cluster: Cluster
) -> Plan:
    """The target plan with its devices in the places that keep the most bytes where they are.

    Which devices are used, which places share a node and which model-stages share weights stays as it was.
    """
    found = _assigned(current.placed, target.placed, states=states, table=table, cluster=cluster)
    return Plan.of({m: dataclasses.replace(stage_plan, units=found[m].units) for m, stage_plan in target.stages})


def _assigned(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, cluster: Cluster
) -> Plan:
    """`assign` of plans without settings."""
    if current == target:
        return target
    target = _trade_nodes(current, target, states=states, table=table, cluster=cluster)
    stages: dict[ModelStage, StagePlan] = {}
    for model_stage, stage_plan in target.stages:
        source = _source(current, model_stage)
        if target.holder(model_stage) == model_stage and source is not None:
            worth = _Worth.of(source, stage_plan, states[model_stage], table.size)
            stages[model_stage] = _trade_ranks(stage_plan, worth, table)
        else:
            stages[model_stage] = stage_plan
    for model_stage, _ in target.stages:
        stages[model_stage] = stages[target.holder(model_stage)]
    return Plan.of(stages)


def _source(current: Plan, model_stage: ModelStage) -> StagePlan | None:
    return current.get(model_stage) or current.get(ModelStage(model_stage.role, Stage.TRAINING))


def _worths(current: Plan, target: Plan, states: Mapping[ModelStage, StageState], table: DeviceTable) -> list[_Worth]:
    result: list[_Worth] = []
    for model_stage, stage_plan in target.stages:
        source = _source(current, model_stage)
        if target.holder(model_stage) == model_stage and source is not None:
            result.append(_Worth.of(source, stage_plan, states[model_stage], table.size))
    return result


def _trade_nodes(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, cluster: Cluster
) -> Plan:
    worths = _worths(current, target, states, table)
    in_use = np.array(target.devices, dtype=np.int64)
    groups: dict[tuple[str, int], list[IntArray]] = {}
    kind = {device.id: device.accelerator for device in cluster.devices}
    for devices in _by_node(in_use, table):
        groups.setdefault((kind[int(devices[0])], len(devices)), []).append(devices)
    device_at = np.arange(table.size)
    for members in groups.values():
        _trade_group(np.stack(members), worths, device_at)
    if (device_at == np.arange(table.size)).all():
        return target
    return Plan.of({model_stage: _relabelled(stage_plan, device_at) for model_stage, stage_plan in target.stages})


def _by_node(devices: IntArray, table: DeviceTable) -> list[IntArray]:
    """The devices of each node, in their order."""
    nodes = table.node[devices]
    order = np.argsort(nodes, kind="stable")
    return np.split(devices[order], np.flatnonzero(np.diff(nodes[order])) + 1)


def _trade_group(members: IntArray, worths: list[_Worth], device_at: IntArray) -> None:
    """Assign the nodes of `members` [nodes, devices] to each other's places and write the devices chosen."""
    place_kind, places = _kinds(np.concatenate([worth.wanted[members] for worth in worths], axis=1), members)
    node_kind, nodes = _kinds(np.concatenate([worth.held[members] for worth in worths], axis=1), members)
    if max(len(places), len(nodes)) > MAX_KINDS:
        return
    kept = np.zeros((len(places), len(nodes)), dtype=np.int64)
    chosen: dict[tuple[int, int], IntArray] = {}
    for p, place in enumerate(places):
        for n, node in enumerate(nodes):
            matrix = np.zeros((members.shape[1],) * 2, dtype=np.int64)
            for worth in worths:
                matrix += worth.matrix(place, node)
            chosen[p, n] = most_kept(matrix)
            kept[p, n] = matrix[np.arange(len(matrix)), chosen[p, n]].sum()
    node_at = _node_of_each_place(kept, place_kind, node_kind)
    for index, node_index in enumerate(node_at.tolist()):
        within = chosen[int(place_kind[index]), int(node_kind[node_index])]
        device_at[members[index]] = members[node_index][within]


def _kinds(patterns: IntArray, members: IntArray) -> tuple[IntArray, IntArray]:
    """(kind of each node [nodes], devices of one node of each kind [kinds, devices]) by pattern [nodes, width]."""
    _, first, kind = np.unique(patterns, axis=0, return_index=True, return_inverse=True)
    return kind.reshape(-1), members[first]


def _node_of_each_place(kept: IntArray, place_kind: IntArray, node_kind: IntArray) -> IntArray:
    """[nodes]: the node that takes each place, where `kept` [place kinds, node kinds] is bytes kept."""
    same = np.arange(len(place_kind))
    supply, demand = (np.bincount(k, minlength=n) for k, n in zip((place_kind, node_kind), kept.shape, strict=True))
    flow = most_transported(kept, supply, demand)
    if (flow * kept).sum() == kept[place_kind, node_kind].sum():
        return same
    node_at, free = np.full(len(same), -1), np.ones(len(same), dtype=np.bool_)
    for place in same.tolist():  # those that may stay do
        pair = place_kind[place], node_kind[place]
        if flow[pair] > 0:
            flow[pair] -= 1
            node_at[place], free[place] = place, False
    left = {kind: np.flatnonzero(free & (node_kind == kind)).tolist() for kind in range(kept.shape[1])}
    for place in np.flatnonzero(node_at < 0).tolist():
        kind = int(flow[place_kind[place]].argmax())
        flow[place_kind[place], kind] -= 1
        node_at[place] = left[kind].pop()
    return node_at


def _relabelled(stage_plan: StagePlan, device_at: IntArray) -> StagePlan:
    return StagePlan.of(stage_plan.layout, device_at[Buffers.of(stage_plan).devices].tolist())


def _trade_ranks(stage_plan: StagePlan, worth: _Worth, table: DeviceTable) -> StagePlan:
    """Devices of one model-stage trade places within each node."""
    devices = Buffers.of(stage_plan).devices
    device_at = np.arange(table.size)
    solved: dict[tuple[bytes, bytes], IntArray] = {}
    for here in _by_node(devices, table):
        pattern = worth.wanted[here].tobytes(), worth.held[here].tobytes()
        if pattern not in solved:
            solved[pattern] = most_kept(worth.matrix(here, here))
        device_at[here] = here[solved[pattern]]
    if (device_at[devices] == devices).all():
        return stage_plan
    return _relabelled(stage_plan, device_at)

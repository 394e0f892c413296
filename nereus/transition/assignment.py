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
from nereus.transition.cost import Buffers, DeviceTable, StageState
from nereus.transition.overlap import FloatArray, IntArray, overlap


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

    def of_all(self) -> int:
        """Bytes kept as the target plan stands."""
        return int(self.kept[self.held, self.wanted].sum())


def assign(
    current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, cluster: Cluster
) -> Plan:
    """The target plan with its devices in the places that keep the most bytes where they are.

    Which devices are used, which places share a node and which model-stages share weights stays as it was.
    """
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


def bytes_in_place(current: Plan, target: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable) -> int:
    """Bytes of the target plan that its devices hold already."""
    return sum(worth.of_all() for worth in _worths(current, target, states, table))


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
    nodes = table.node[in_use]
    for node in dict.fromkeys(nodes.tolist()):
        devices = in_use[nodes == node]
        groups.setdefault((cluster.device(int(devices[0])).accelerator, len(devices)), []).append(devices)
    device_at = np.arange(table.size)
    for members in groups.values():
        _trade_group(np.stack(members), worths, device_at)
    if (device_at == np.arange(table.size)).all():
        return target
    return Plan.of({model_stage: _relabelled(stage_plan, device_at) for model_stage, stage_plan in target.stages})


def _trade_group(members: IntArray, worths: list[_Worth], device_at: IntArray) -> None:
    """Assign the nodes of `members` [nodes, devices] to each other's places and write the devices chosen."""
    wanted = np.concatenate([worth.wanted[members] for worth in worths], axis=1)
    held = np.concatenate([worth.held[members] for worth in worths], axis=1)
    _, place_kind = np.unique(wanted, axis=0, return_inverse=True)
    _, node_kind = np.unique(held, axis=0, return_inverse=True)
    solved: dict[tuple[int, int], tuple[int, IntArray]] = {}
    first_place = {kind: i for i, kind in reversed(list(enumerate(place_kind.tolist())))}
    first_node = {kind: i for i, kind in reversed(list(enumerate(node_kind.tolist())))}
    kept = np.zeros((len(first_place), len(first_node)), dtype=np.int64)
    for place in first_place:
        for node in first_node:
            matrix = sum(
                (worth.matrix(members[first_place[place]], members[first_node[node]]) for worth in worths),
                start=np.zeros((members.shape[1],) * 2, dtype=np.int64),
            )
            chosen = most_kept(matrix)
            kept[place, node] = matrix[np.arange(len(chosen)), chosen].sum()
            solved[place, node] = int(kept[place, node]), chosen
    node_at = most_kept(kept[place_kind[:, None], node_kind[None, :]])
    for place, node in enumerate(node_at.tolist()):
        _, chosen = solved[int(place_kind[place]), int(node_kind[node])]
        device_at[members[place]] = members[node][chosen]


def _relabelled(stage_plan: StagePlan, device_at: IntArray) -> StagePlan:
    return StagePlan.of(stage_plan.layout, device_at[Buffers.of(stage_plan).devices].tolist())


def _trade_ranks(stage_plan: StagePlan, worth: _Worth, table: DeviceTable) -> StagePlan:
    """Devices of one model-stage trade places within each node."""
    devices = Buffers.of(stage_plan).devices
    nodes, device_at = table.node[devices], np.arange(table.size)
    order = np.argsort(nodes, kind="stable")
    solved: dict[tuple[bytes, bytes], IntArray] = {}
    for here in np.split(devices[order], np.flatnonzero(np.diff(nodes[order])) + 1):
        pattern = worth.wanted[here].tobytes(), worth.held[here].tobytes()
        if pattern not in solved:
            solved[pattern] = most_kept(worth.matrix(here, here))
        device_at[here] = here[solved[pattern]]
    if (device_at[devices] == devices).all():
        return stage_plan
    return _relabelled(stage_plan, device_at)

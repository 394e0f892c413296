"""What a transition costs: bytes that must cross links, seconds of one operation, seconds of the whole. Pure.

An operation is as slow as its slowest device: what it receives, and what its ranks' holders send, over the bandwidth
of each link class, plus the set-up of the group. Which holder serves whom is not decided here: demand is spread evenly
over the holders of a rank, and a device is served inside its node where the node holds what it lacks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from nereus.cluster import Cluster, Link
from nereus.model import ModelSpec
from nereus.plan import Layout, StagePlan
from nereus.transition.overlap import BoolArray, FloatArray, IntArray, allocated, held, overlap
from nereus.transition.primitives import TransitionDag

HEADROOM = 0.10
"""Share of a device's memory that no plan and no transition may use."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageState:
    """What a unit of a model-stage holds: the parameters of `spec`, `element_bytes` for each element.

    element_bytes counts every kind of state: 2 for bf16 parameters, 14 with fp32 masters and two moments.
    """

    spec: ModelSpec
    element_bytes: int

    def buffer_bytes(self, layout: Layout) -> IntArray:
        """[num_ranks]: bytes each rank allocates."""
        sizes: IntArray = allocated(self.spec, layout) * self.element_bytes
        return sizes


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeviceTable:
    """Devices as arrays, made once for a supply.

    node: [max id + 1] node of each device id, -1 where there is none.
    limit_bytes: [max id + 1] what state and buffers of a transition may use, headroom and reserve taken off.
    host_bytes: [num_nodes] free host memory for staged units.
    """

    node: IntArray
    limit_bytes: IntArray
    host_bytes: IntArray

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        *,
        headroom: float = HEADROOM,
        reserved_bytes: Mapping[int, int] | None = None,
        host_bytes_per_node: int = 0,
    ) -> "DeviceTable":
        """The table of a cluster; `reserved_bytes`: per device id, what is in use and is no unit's state."""
        size = max(cluster.device_ids) + 1
        node, limit = np.full(size, -1), np.zeros(size, dtype=np.int64)
        for index, devices in enumerate(cluster.nodes.values()):
            for device in devices:
                node[device.id] = index
                limit[device.id] = int(device.memory_bytes * (1 - headroom)) - (reserved_bytes or {}).get(device.id, 0)
        return cls(node, limit, np.full(len(cluster.nodes), host_bytes_per_node))

    @property
    def size(self) -> int:
        return len(self.node)


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Speeds that price a transition; bandwidths are bytes per second of one device in one direction.

    setup_s: building the group of an operation that communicates. destroy_s: freeing a unit's buffers.
    node_bytes_per_s: what all devices of a node share towards other nodes; None where each has its own adapter.
    """

    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    copy_bytes_per_s: float
    host_bytes_per_s: float
    setup_s: float = 0.05
    destroy_s: float = 0.001
    node_bytes_per_s: float | None = None

    @classmethod
    def of(cls, cluster: Cluster, *, efficiency: Mapping[Link, float] | None = None, setup_s: float = 0.05) -> "Rates":
        """Peaks of the slowest accelerator of a cluster, times the learned efficiency of each link class."""
        kinds, share = cluster.accelerators, efficiency or {}
        return cls(
            min(a.intra_node_bytes_per_s for a in kinds) * share.get(Link.INTRA_NODE, 0.7),
            min(a.inter_node_bytes_per_s for a in kinds) * share.get(Link.INTER_NODE, 0.7),
            min(a.memory_bytes_per_s for a in kinds) * share.get(Link.SELF, 0.5) / 2,
            min(a.host_bytes_per_s for a in kinds) * 0.8,
            setup_s=setup_s,
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Buffers:
    """Buffers of one layout: `devices[i]` holds, or is to hold, the shards of `ranks[i]`. Both [n]."""

    layout: Layout
    devices: IntArray
    ranks: IntArray

    @staticmethod
    def of(stage_plan: StagePlan) -> "Buffers":
        """The buffers of every unit, unit after unit. Do not modify."""
        return _buffers_of(stage_plan)

    def rank_table(self, size: int) -> IntArray:
        """[size]: rank of each device id, -1 where it holds none."""
        table = np.full(size, -1)
        table[self.devices] = self.ranks
        return table

    def where(self, chosen: BoolArray) -> "Buffers":
        """The buffers marked in `chosen` [n]."""
        return Buffers(self.layout, self.devices[chosen], self.ranks[chosen])


@functools.lru_cache(maxsize=64)
def _buffers_of(stage_plan: StagePlan) -> Buffers:
    count, size = stage_plan.dp, stage_plan.layout.num_ranks
    devices = np.fromiter(itertools.chain.from_iterable(stage_plan.units), dtype=np.int64, count=count * size)
    return Buffers(stage_plan.layout, devices, np.arange(count * size) % size)


NO_BUFFERS = Buffers(Layout(), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Load:
    """What one operation asks of devices and links.

    seconds: on idle links, group set-up included. received_bytes: over all devices, what must arrive.
    node_bytes: [num_nodes] what enters each node.
    """

    seconds: float
    received_bytes: int
    node_bytes: FloatArray


def missing_elements(spec: ModelSpec, source: Buffers, target: Buffers, table_size: int) -> IntArray:
    """[n]: elements each target device lacks, given what its own source buffer holds.

    Their sum is the lower bound of what a move must send: nothing a device lacks can come from itself.
    """
    own = source.rank_table(table_size)[target.devices]
    common = overlap(spec, source.layout, target.layout)[own, target.ranks]
    lacking: IntArray = held(spec, target.layout)[target.ranks] - np.where(own >= 0, common, 0)
    return lacking


def transfer_load(state: StageState, source: Buffers, target: Buffers, *, devices: DeviceTable, rates: Rates) -> Load:
    """The load of assembling the target buffers from the source buffers."""
    spec = state.spec
    lacking = missing_elements(spec, source, target, devices.size) * state.element_bytes
    total, num_nodes = int(lacking.sum()), len(devices.host_bytes)
    copied = (held(spec, target.layout)[target.ranks] * state.element_bytes - lacking).max(initial=0)
    copy_s = float(copied) / rates.copy_bytes_per_s
    if not total:
        return Load(copy_s, 0, np.zeros(num_nodes))
    share = _holder_share(spec, source.layout, target.layout)
    near = _near_share(share, source, target, devices)
    intra, inter = lacking * near, lacking * (1 - near)
    receive_s = max(
        float(intra.max()) / rates.intra_node_bytes_per_s, float(inter.max()) / rates.inter_node_bytes_per_s
    )
    holders = np.bincount(source.ranks, minlength=source.layout.num_ranks)
    send_s = max(
        _busiest_sender(intra, share, target, holders) / rates.intra_node_bytes_per_s,
        _busiest_sender(inter, share, target, holders) / rates.inter_node_bytes_per_s,
    )
    node_bytes = np.bincount(devices.node[target.devices], weights=inter, minlength=num_nodes).astype(np.float64)
    node_s = float(node_bytes.max()) / rates.node_bytes_per_s if rates.node_bytes_per_s else 0.0
    return Load(rates.setup_s + max(receive_s, send_s, node_s, copy_s), total, node_bytes)


def _holder_share(spec: ModelSpec, source: Layout, target: Layout) -> FloatArray:
    """[source ranks, target ranks]: share of a target rank's box that each source rank serves; columns sum to 1."""
    common = overlap(spec, source, target).astype(np.float64)
    share: FloatArray = common / common.sum(axis=0)
    if source == target:  # replicated parameters come along with the rest from the same rank
        share = np.eye(source.num_ranks)
    return share


def _near_share(share: FloatArray, source: Buffers, target: Buffers, devices: DeviceTable) -> FloatArray:
    """[n]: share of what each target device lacks that its own node holds."""
    present = np.zeros((len(devices.host_bytes), source.layout.num_ranks))
    present[devices.node[source.devices], source.ranks] = 1.0
    own = source.rank_table(devices.size)[target.devices]
    own_share = np.where(own >= 0, share[own, target.ranks], 0.0)
    near = (present @ share)[devices.node[target.devices], target.ranks] - own_share
    rest = np.maximum(1.0 - own_share, 1e-12)
    shares: FloatArray = np.clip(near / rest, 0.0, 1.0)
    return shares


def _busiest_sender(wanted: FloatArray, share: FloatArray, target: Buffers, holders: IntArray) -> float:
    """Bytes that the busiest source device sends, demand spread evenly over the holders of a rank."""
    by_target_rank = np.bincount(target.ranks, weights=wanted, minlength=share.shape[1])
    return float((share @ by_target_rank / np.maximum(holders, 1)).max())


def start_times(dag: TransitionDag) -> tuple[float, ...]:
    """Start of every operation in seconds when each runs as soon as its edges and its devices allow."""
    free_at: dict[int, float] = {}
    before: dict[int, list[int]] = {}
    for edge in dag.edges:
        before.setdefault(edge.after, []).append(edge.before)
    starts: list[float] = []
    for operation, seconds in zip(dag.operations, dag.seconds, strict=True):
        ready = max((starts[i] + dag.seconds[i] for i in before.get(operation.id, ())), default=0.0)
        used = operation.devices
        ready = max(ready, max((free_at.get(device, 0.0) for device in used), default=0.0))
        starts.append(ready)
        free_at.update(dict.fromkeys(used, ready + seconds))
    return tuple(starts)


def schedule_seconds(dag: TransitionDag) -> float:
    """Critical path of the DAG and its devices, every link idle but for the operation that uses it."""
    ends = [start + seconds for start, seconds in zip(start_times(dag), dag.seconds, strict=True)]
    return max(ends, default=0.0)

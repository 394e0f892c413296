"""What an operation of a transition costs: bytes that must cross links, and seconds. Pure.

An operation is as slow as its slowest device: what it receives, and what its ranks' holders send, over the bandwidth
of each link class, plus the set-up of the group. Which holder serves whom is not decided here: demand is spread evenly
over the holders of a rank, and a device is served inside its node where the node holds what it lacks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from nereus.cluster import HEADROOM, Cluster, Link
from nereus.model import ModelSpec
from nereus.plan import Layout, StagePlan
from nereus.shards.overlap import BoolArray, FloatArray, IntArray, allocated, held, overlap
from nereus.transition.operations import Load


def readable_bytes(count: int) -> str:
    """Such as `1.50 GB`; nothing below zero."""
    size = float(max(count, 0))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


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
        host_bytes_per_node: int | None = 0,
    ) -> "DeviceTable":
        """The table of a cluster.

        reserved_bytes: per device id, what is in use and is no unit's state.
        host_bytes_per_node: what staged units may take; None for as much as the largest device of a node has, which
            is enough to exchange what any two devices hold.
        """
        size = max(cluster.device_ids) + 1
        node, limit = np.full(size, -1), np.zeros(size, dtype=np.int64)
        host = np.zeros(len(cluster.nodes), dtype=np.int64)
        for index, devices in enumerate(cluster.nodes.values()):
            largest = max(device.memory_bytes for device in devices)
            host[index] = largest if host_bytes_per_node is None else host_bytes_per_node
            for device in devices:
                node[device.id] = index
                limit[device.id] = int(device.memory_bytes * (1 - headroom)) - (reserved_bytes or {}).get(device.id, 0)
        return cls(node, limit, host)

    @property
    def size(self) -> int:
        return len(self.node)

    def has(self, devices: IntArray) -> BoolArray:
        """[n]: which of the devices are there."""
        there: BoolArray = self.node.take(devices, mode="clip") >= 0
        return there & (devices < self.size)


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
    """Buffers of one layout: `devices[i]` holds, or is to hold, the shards of `ranks[i]`. Both [n], never modified.

    ids: the devices as integers, where they are known that way already.
    """

    layout: Layout
    devices: IntArray
    ranks: IntArray
    ids: tuple[int, ...] | None = None

    @staticmethod
    def of(stage_plan: StagePlan) -> "Buffers":
        """The buffers of every unit, unit after unit."""
        return _buffers_of(stage_plan)

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(self.devices.tolist()) if self.ids is None else self.ids

    def rank_table(self, size: int) -> IntArray:
        """[size]: rank of each device id, -1 where it holds none. Do not modify."""
        return _rank_table(self, size)

    def where(self, chosen: BoolArray) -> "Buffers":
        """The buffers marked in `chosen` [n]."""
        if chosen.all():
            return self
        return Buffers(self.layout, self.devices[chosen], self.ranks[chosen])


@functools.lru_cache(maxsize=256)
def _buffers_of(stage_plan: StagePlan) -> Buffers:
    ids = tuple(itertools.chain.from_iterable(stage_plan.units))
    ranks = np.arange(len(ids)) % stage_plan.layout.num_ranks
    return Buffers(stage_plan.layout, np.fromiter(ids, dtype=np.int64, count=len(ids)), ranks, ids)


@functools.lru_cache(maxsize=256)
def _rank_table(buffers: Buffers, size: int) -> IntArray:
    table = np.full(size, -1)
    table[buffers.devices] = buffers.ranks
    return table


NO_BUFFERS = Buffers(Layout(), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Conversion:
    """From one layout to another, in elements. The last row stands for a device that holds no source buffer.

    lacking: [source ranks + 1, target ranks] what a device that holds a source rank lacks of a target rank.
    share: [source ranks + 1, target ranks] share of a target rank that each source rank serves; columns sum to 1.
    """

    lacking: IntArray
    share: FloatArray


@functools.lru_cache(maxsize=1024)
def _conversion(spec: ModelSpec, source: Layout, target: Layout) -> _Conversion:
    common = overlap(spec, source, target)
    shape = (source.num_ranks + 1, target.num_ranks)
    lacking, share = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    lacking[:] = held(spec, target)
    lacking[:-1] -= common
    # Between equal layouts replicated parameters come along with the rest from the same rank.
    share[:-1] = np.eye(source.num_ranks) if source == target else common / common.sum(axis=0)
    return _Conversion(lacking, share)


def _pairs(source: Buffers, target: Buffers, table_size: int) -> IntArray:
    """[n]: index into a flattened table of `_Conversion` for each target device: its rank now and to be."""
    own = source.rank_table(table_size).take(target.devices)
    pairs: IntArray = np.where(own < 0, source.layout.num_ranks, own) * target.layout.num_ranks + target.ranks
    return pairs


def lacking_elements(spec: ModelSpec, source: Buffers, target: Buffers, table_size: int) -> IntArray:
    """[n]: elements each target device lacks, given what its own source buffer holds.

    Their sum is the lower bound of what a move must send: nothing a device lacks can come from itself.
    """
    table = _conversion(spec, source.layout, target.layout).lacking
    lacking: IntArray = table.take(_pairs(source, target, table_size))
    return lacking


def transfer_load(state: StageState, source: Buffers, target: Buffers, *, devices: DeviceTable, rates: Rates) -> Load:
    """The load of assembling the target buffers from the source buffers."""
    tables, size = _conversion(state.spec, source.layout, target.layout), state.element_bytes
    pairs = _pairs(source, target, devices.size)
    lacking = tables.lacking.take(pairs)
    total = int(lacking.sum()) * size
    whole = tables.lacking[-1].take(target.ranks)
    copy_s = int((whole - lacking).max(initial=0)) * size / rates.copy_bytes_per_s
    if not total:
        return Load(copy_s)
    intra, inter = _by_link(lacking.astype(np.float64) * size, tables.share, pairs, source, target, devices)
    holders = np.maximum(np.bincount(source.ranks, minlength=len(tables.share)), 1)
    slowest_s = max(
        copy_s,
        _busiest(intra, tables.share, target, holders) / rates.intra_node_bytes_per_s,
        _busiest(inter, tables.share, target, holders) / rates.inter_node_bytes_per_s,
    )
    if rates.node_bytes_per_s is None:
        return Load(rates.setup_s + slowest_s, total)
    entering = np.bincount(devices.node[target.devices], weights=inter, minlength=len(devices.host_bytes))
    slowest_s = max(slowest_s, float(entering.max()) / rates.node_bytes_per_s)
    return Load(rates.setup_s + slowest_s, total, tuple(entering.tolist()))


def _by_link(
    wanted: FloatArray, share: FloatArray, pairs: IntArray, source: Buffers, target: Buffers, devices: DeviceTable
) -> tuple[FloatArray, FloatArray]:
    """[n] each: what every target device gets inside its node, and from other nodes."""
    present = np.zeros((len(devices.host_bytes), len(share)))
    present.put(devices.node.take(source.devices) * len(share) + source.ranks, 1.0)
    own_share = share.take(pairs)
    places = devices.node.take(target.devices) * share.shape[1] + target.ranks
    near = (present @ share).take(places) - own_share
    intra = wanted * np.minimum(near / np.maximum(1.0 - own_share, 1e-9), 1.0)
    return intra, wanted - intra


def _busiest(wanted: FloatArray, share: FloatArray, target: Buffers, holders: IntArray) -> float:
    """Bytes of the busiest device: what one receives, or one sends when demand is spread over the holders of a rank."""
    most = float(wanted.max())
    if not most:
        return 0.0
    by_target_rank = np.bincount(target.ranks, weights=wanted, minlength=share.shape[1])
    return max(most, float((share @ by_target_rank / holders).max()))

"""Devices, nodes and links: what a plan is placed on. Values only.

A cluster is written `8x8xh200` (nodes x devices x type), given as YAML, or found by a runtime.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Iterable

from nereus.errors import ClusterError


class Link(enum.StrEnum):
    """Class of the path between two devices. Each has its own learned efficiency."""

    SELF = "self"
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """Peaks of one accelerator type. Bandwidths are per device, one direction."""

    name: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    host_bytes_per_s: float = 25e9


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Device:
    """One accelerator, or one CPU worker that stands for one."""

    id: int
    node: str
    accelerator: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The devices available now. `cores_per_node`: processor cores that CPU workers of one node share, else None."""

    devices: tuple[Device, ...]
    accelerators: tuple[Accelerator, ...]
    cores_per_node: int | None = None

    def __post_init__(self) -> None:
        known = {a.name for a in self.accelerators}
        for device in self.devices:
            if device.accelerator not in known:
                raise ClusterError(
                    f"device {device.id} has unknown type {device.accelerator!r}; known: {sorted(known)}"
                )
        if len({d.id for d in self.devices}) != len(self.devices):
            raise ClusterError("device ids repeat")

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(d.id for d in self.devices)

    @property
    def nodes(self) -> dict[str, tuple[Device, ...]]:
        """Devices of each node, in order of first appearance."""
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.node, []).append(device)
        return {node: tuple(devices) for node, devices in found.items()}

    def device(self, device_id: int) -> Device:
        return _by_id(self)[device_id]

    def accelerator(self, name: str) -> Accelerator:
        return next(a for a in self.accelerators if a.name == name)

    def link(self, a: int, b: int) -> Link:
        if a == b:
            return Link.SELF
        return Link.INTRA_NODE if self.device(a).node == self.device(b).node else Link.INTER_NODE

    def restricted(self, device_ids: Iterable[int]) -> "Cluster":
        """The cluster with only these devices."""
        keep = set(device_ids)
        return dataclasses.replace(self, devices=tuple(d for d in self.devices if d.id in keep))


@functools.lru_cache(maxsize=64)
def _by_id(cluster: Cluster) -> dict[int, Device]:
    return {device.id: device for device in cluster.devices}


_SHORT = re.compile(r"^(\d+)x(\d+)x([a-z0-9._-]+)$", re.IGNORECASE)

GB = 10**9


def _accelerator(
    name: str, tflops: float, memory_gb: float, memory_gb_per_s: float, intra_gb_per_s: float, inter_gb_per_s: float
) -> Accelerator:
    return Accelerator(
        name, tflops * 1e12, int(memory_gb * GB), memory_gb_per_s * GB, intra_gb_per_s * GB, inter_gb_per_s * GB
    )


ACCELERATORS = {
    a.name: a
    for a in (
        _accelerator("cpu", 0.16, 4, 4.0, 4.0, 1.0),
        _accelerator("a100-40gb", 312, 40, 1555, 300, 25),
        _accelerator("a100", 312, 80, 2039, 300, 25),
        _accelerator("h100", 989, 80, 3350, 450, 50),
        _accelerator("h200", 989, 141, 4800, 450, 50),
        _accelerator("b200", 2250, 180, 8000, 900, 50),
    )
}
"""Dense bf16 peaks (fp32 for `cpu`, one core of this kind) from the vendors' data sheets."""


def parse_cluster(text: str) -> Cluster:
    """The cluster of `8x8xh200`: nodes x devices per node x type."""
    match = _SHORT.match(text.strip())
    if not match:
        raise ClusterError(f"cluster {text!r}: write NODESxDEVICESxTYPE such as 8x8xh200")
    kind = match[3].lower()
    if kind not in ACCELERATORS:
        raise ClusterError(f"cluster {text!r}: unknown type {kind!r}; known: {', '.join(ACCELERATORS)}")
    return uniform_cluster(num_nodes=int(match[1]), devices_per_node=int(match[2]), accelerator=ACCELERATORS[kind])


def uniform_cluster(
    *, num_nodes: int, devices_per_node: int, accelerator: Accelerator, cores_per_node: int | None = None
) -> Cluster:
    """Nodes of equal size and one type; device ids count through the nodes."""
    if num_nodes < 1 or devices_per_node < 1:
        raise ClusterError("a cluster needs at least one node with one device")
    devices = tuple(
        Device(node * devices_per_node + i, f"node{node}", accelerator.name, accelerator.memory_bytes)
        for node in range(num_nodes)
        for i in range(devices_per_node)
    )
    return Cluster(devices, (accelerator,), cores_per_node)

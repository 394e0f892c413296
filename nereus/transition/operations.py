"""What a transition is made of: primitives, operations over groups of units, and the DAG that orders them. Values only.

A **unit** is written as its device tuple, rank by rank. A buffer is what one device holds of one model-stage: the
shards of one (layout, rank). Which unit mates a device has does not matter to its buffer, so units that are only
renumbered or recombined from equal (layout, rank) buffers move nothing.
"""

import dataclasses
import enum
import itertools
from typing import NamedTuple

from nereus.plan import Layout, ModelStage, Plan

Unit = tuple[int, ...]
"""Devices of one replica, rank by rank."""


class Primitive(enum.StrEnum):
    """What an operation does with units of one model-stage.

    SPLIT: a unit becomes several of a smaller layout on the same devices; gathered inside each device's position.
    MERGE: several units become one of a larger layout on the same devices; every rank narrows what it holds.
    EXTEND: new replicas of a layout that lives; each rank is copied from a holder of the same rank.
    DESTROY: buffers are freed. Only while another copy lives.
    RESHARD: Split, Extend and Merge fused: every target rank gets the boxes it lacks straight from their holders.
    OFFLOAD: a unit is copied to the host memory of its own nodes; a copy in host memory lives.
    RELOAD: target units are assembled from a copy in host memory, which is freed at the end.
    """

    SPLIT = "split"
    MERGE = "merge"
    EXTEND = "extend"
    DESTROY = "destroy"
    RESHARD = "reshard"
    OFFLOAD = "offload"
    RELOAD = "reload"


class Mode(enum.StrEnum):
    """How a transition treats old units.

    SHADOW: old and new are both whole until one commit; every Destroy comes after it; an abort restores the old.
    IN_PLACE: every Destroy commits on its own, and needs another living copy; an abort refills from that copy.
    """

    SHADOW = "shadow"
    IN_PLACE = "in_place"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One primitive over a group of units of one model-stage.

    id: place in the global order of the transition.
    model_stage: whose units are produced or freed. source_stage: whose units are read (they differ where a
        model-stage that used the parameters of training in place gets units of its own).
    sources: whole units read, in `source_layout`; of a Destroy, the units that lose buffers.
    targets: units produced, in `target_layout`. Devices of them outside `acquires` hold their buffer already.
    acquires: devices that allocate a buffer of `target_layout`, at the rank `targets` gives them.
    releases: devices that free their buffer of `source_layout` of `source_stage` when the operation ends.
    """

    id: int
    primitive: Primitive
    model_stage: ModelStage
    source_stage: ModelStage
    source_layout: Layout
    sources: tuple[Unit, ...]
    target_layout: Layout
    targets: tuple[Unit, ...]
    acquires: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()

    @property
    def devices(self) -> frozenset[int]:
        """Every device that takes part: it reads, allocates or frees."""
        if self.primitive is Primitive.DESTROY:
            return frozenset(self.releases)
        return frozenset(itertools.chain(self.acquires, self.releases, *self.sources))

    def target_ranks(self) -> dict[int, int]:
        """Rank in its target unit of each device in `acquires`."""
        ranks = {device: rank for unit in self.targets for rank, device in enumerate(unit)}
        return {device: ranks[device] for device in self.acquires}

    def source_ranks(self) -> dict[int, int]:
        """Rank in its source unit of each source device."""
        return {device: rank for unit in self.sources for rank, device in enumerate(unit)}

    @property
    def name(self) -> str:
        """Such as `3 extend actor-training`."""
        return f"{self.id} {self.primitive} {self.model_stage}"

    def __str__(self) -> str:
        read = f"{len(self.sources)} x {self.source_layout}"
        made = f" -> {len(self.targets)} x {self.target_layout}" if self.targets else ""
        return f"{self.name}: {read}{made}"


class EdgeKind(enum.StrEnum):
    """Why an operation waits: LOCAL for the state it reads or frees, RESOURCE for memory that another frees."""

    LOCAL = "local"
    RESOURCE = "resource"


class Edge(NamedTuple):
    """`after` starts when `before` has ended; both are operation ids."""

    before: int
    after: int
    kind: EdgeKind


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one operation is predicted to ask of devices and links.

    seconds: on idle links, group set-up included. received_bytes: over all devices, what arrives from another.
    node_bytes: [num_nodes] what enters each node, where the devices of a node share its link; else empty.
    """

    seconds: float
    received_bytes: int = 0
    node_bytes: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionDag:
    """The operations of one transition in one global topological order, with what each waits for.

    Every rank runs its own operations in this order; operations that share a device never overlap.
    loads: predicted for each operation.
    """

    current: Plan
    target: Plan
    mode: Mode
    operations: tuple[Operation, ...] = ()
    edges: tuple[Edge, ...] = ()
    loads: tuple[Load, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.operations)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted duration of each operation on idle links."""
        return tuple(load.seconds for load in self.loads)

    @property
    def moved_bytes(self) -> int:
        """Bytes that arrive at a device from another, over all operations."""
        return sum(load.received_bytes for load in self.loads)

    @property
    def num_staged(self) -> int:
        """Operations before the commit point: in shadow mode those ahead of the Destroys, in place all."""
        if self.mode is Mode.IN_PLACE:
            return len(self.operations)
        return sum(operation.primitive is not Primitive.DESTROY for operation in self.operations)

    @property
    def resource_edges(self) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.kind is EdgeKind.RESOURCE)

    def after(self, operation_id: int) -> tuple[int, ...]:
        """Ids of the operations that must end before this one starts."""
        return tuple(edge.before for edge in self.edges if edge.after == operation_id)

    def of_device(self, device: int) -> tuple[Operation, ...]:
        """The operations that a device takes part in, in the order it runs them."""
        return tuple(operation for operation in self.operations if device in operation.devices)


@dataclasses.dataclass(frozen=True, slots=True)
class Infeasible:
    """A transition refused, and why."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionReport:
    """What one transition did. Bytes are of state that crossed from one device to another."""

    operations: tuple[str, ...]
    mode: str
    bytes_moved: int
    bytes_lower_bound: int
    seconds: float
    verified: bool

"""What the executor tells one worker to move, and what the worker answers. Values that cross between processes."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from nereus.comm.buffers import Handle
from nereus.comm.groups import GroupSpec
from nereus.engine_facts import BUCKET_BYTES
from nereus.model import ModelSpec
from nereus.moving.verify import Digests
from nereus.plan import Layout, ModelStage
from nereus.shards.moves import DeviceMoves, Holding, Moves, plan_moves
from nereus.shards.state import Counters, StateKind


class BufferKey(NamedTuple):
    """What one device holds of one model-stage: the shards of one rank of one layout.

    in_host: a copy that the device's worker keeps in host memory, beside the device's own buffers.
    """

    model_stage: ModelStage
    layout: Layout
    rank: int
    in_host: bool = False

    def __str__(self) -> str:
        return f"{self.model_stage} {self.layout} rank {self.rank}{' in host memory' if self.in_host else ''}"


Kinds = tuple[tuple[StateKind, torch.dtype], ...]
"""Kinds of state that move, in the order they are sent, with their dtypes."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageKinds:
    """What a model-stage holds: the model and the kinds of state with their dtypes."""

    spec: ModelSpec
    kinds: Kinds

    @property
    def element_bytes(self) -> int:
        """Bytes of all kinds together for one element."""
        return sum(dtype.itemsize for _, dtype in self.kinds)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The part of one device in one move.

    key: unique in the job; names the group and, with the plan, what the ranks agree on before they send.
    source, target: the buffers the device reads from and fills; None where it has no such part.
    allocates: the target buffer is new; otherwise it exists and is written over.
    group: whom the device exchanges bytes with across nodes; None where all its peers share its node.
    keeps_group: the move will be repeated, as weight synchronization is: its group and the peers' mapped memory stay.
    source_in_host: every source buffer of the move, this device's or a peer's, is a copy in host memory.
    """

    key: str
    device: int
    spec: ModelSpec
    kinds: Kinds
    source: BufferKey | None
    target: BufferKey | None
    moves: DeviceMoves
    allocates: bool
    group: GroupSpec | None
    keeps_group: bool
    fingerprint: int
    bucket_bytes: int = BUCKET_BYTES
    source_in_host: bool = False

    @property
    def keeps_buffer(self) -> bool:
        """Whether source and target are one buffer, so that nothing needs to be copied."""
        return self.source is not None and self.source == self.target


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
    """How peers reach a source buffer, and the counters that go with it."""

    handles: dict[StateKind, Handle]
    counters: Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """What one device did in one move. Bytes count what crossed between devices, alignment gaps not counted.

    peak_extra_bytes: most that staging buffers took at once.
    """

    device: int
    bytes_shared: int
    bytes_group: int
    seconds: float
    peak_extra_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDigests:
    """Digests of what a device was to send, from its own memory, and of what it was to receive, from its target."""

    sent: Digests
    received: Digests


@dataclasses.dataclass(frozen=True, slots=True)
class MoveOrder:
    """One move of one model-stage between two holdings, before it is cut into the parts of its devices.

    source_in_host, target_in_host: the buffers of that side are copies in host memory, not the devices' own.
    """

    key: str
    state: StageKinds
    source_stage: ModelStage
    target_stage: ModelStage
    moves: Moves
    allocates: bool
    keeps_group: bool = False
    bucket_bytes: int = BUCKET_BYTES
    source_in_host: bool = False
    target_in_host: bool = False

    @classmethod
    def plan(
        cls,
        key: str,
        state: StageKinds,
        source_stage: ModelStage,
        source: Holding,
        target_stage: ModelStage,
        target: Holding,
        *,
        node_of: Callable[[int], str] | None = None,
        allocates: bool = True,
        keeps_group: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        source_in_host: bool = False,
        target_in_host: bool = False,
    ) -> "MoveOrder":
        moves = plan_moves(state.spec, source, target, node_of=node_of)
        return cls(
            key, state, source_stage, target_stage, moves, allocates, keeps_group, bucket_bytes,
            source_in_host, target_in_host,
        )  # fmt: skip

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between devices."""
        return self.moves.numel_moved * self.state.element_bytes

    @property
    def reuses_buffers(self) -> bool:
        """Whether a device whose source and target have one layout and rank has them in one buffer."""
        return self.source_stage == self.target_stage and self.source_in_host == self.target_in_host

    def per_device(self) -> dict[int, DeviceOrder]:
        """The part of every device that takes part."""
        source, target = dict(self.moves.source.ranks), dict(self.moves.target.ranks)
        group = self.moves.group_devices
        members = frozenset(group)
        spec = GroupSpec(f"move/{self.key}", group) if group else None
        read, filled = self.moves.source.layout, self.moves.target.layout
        fingerprint = hash_with(self.moves.fingerprint, self.key)

        def order(device: int) -> DeviceOrder:
            held, wanted = source.get(device), target.get(device)
            return DeviceOrder(
                key=self.key,
                device=device,
                spec=self.state.spec,
                kinds=self.state.kinds,
                source=None if held is None else BufferKey(self.source_stage, read, held, self.source_in_host),
                target=None if wanted is None else BufferKey(self.target_stage, filled, wanted, self.target_in_host),
                moves=self.moves.of_device(device),
                allocates=self.allocates,
                group=spec if device in members else None,
                keeps_group=self.keeps_group,
                fingerprint=fingerprint,
                bucket_bytes=self.bucket_bytes,
                source_in_host=self.source_in_host,
            )

        return {device: order(device) for device in sorted({*self.moves.devices, *target})}


def hash_with(fingerprint: int, key: str) -> int:
    """63 bits of a plan's fingerprint and a key."""
    digest = hashlib.blake2b(f"{fingerprint}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

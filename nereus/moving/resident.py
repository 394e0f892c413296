"""The state a worker holds, and its part in moving it.

    an epoch --names--> buffers (model-stage, layout, rank) --are--> RankState

A buffer is named by what it holds, so two epochs under which a device holds the same rank of the same layout
share it. Buffers that a move fills belong to no epoch until `adopt`; whatever no epoch names goes with the
next `free`. A buffer is torn from the moment a move may write to it until `settle` says that its digests are
verified: nothing computes on a torn one, reads from it, saves it or names it anew. A copy in host memory is a buffer
like any other, but its memory is shared processor memory and is not counted as the device's. Nothing here decides:
the executor orders, compares and commits.
"""

import time
import traceback
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from nereus.comm.buffers import Memory, SharedMemory, memory_on
from nereus.comm.groups import BackendName, Group
from nereus.errors import NereusError, TornStateError, TransitionAborted
from nereus.model import ModelSpec
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt
from nereus.moving.transport import Exchange, Flats, pull
from nereus.moving.verify import Digests, move_digests
from nereus.plan import Layout, ModelStage, Plan
from nereus.shards.moves import Move
from nereus.shards.state import Counters, RankState, Side, StateKind


class Residents:
    """Every RankState of one worker.

    Between `prepare` and `adopt` a buffer is staged: it can be moved into and read from, and no epoch names it.
    memory: of the device's buffers; host_memory: of the copies in host memory, which peers of the node can read too.
    """

    def __init__(self, device: int, torch_device: torch.device) -> None:
        self._device = device
        self._torch_device = torch_device
        self.memory = memory_on(torch_device)
        self.host_memory = SharedMemory()
        self._backend: BackendName = "nccl" if torch_device.type == "cuda" else "gloo"
        self._buffers: dict[BufferKey, RankState] = {}
        self._torn: set[BufferKey] = set()
        self._epochs: dict[int, dict[ModelStage, BufferKey]] = {}
        self._groups: dict[str, Group] = {}

    def allocate(
        self,
        epoch: int,
        model_stage: ModelStage,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        dtypes: dict[StateKind, torch.dtype],
    ) -> RankState:
        """Zeroed state of a model-stage under an epoch."""
        key = BufferKey(model_stage, layout, rank)
        state = RankState.allocate(spec, layout, rank, dtypes=dtypes, allocator=self.memory)
        self._buffers[key] = state
        self._epochs.setdefault(epoch, {})[model_stage] = key
        return state

    def state(self, epoch: int, model_stage: ModelStage) -> RankState:
        """What a model-stage holds under an epoch; raises TornStateError where that is not whole."""
        key = self._epochs[epoch][model_stage]
        self._check_whole(key)
        return self._buffers[key]

    def holds(self, epoch: int, model_stage: ModelStage) -> bool:
        return model_stage in self._epochs.get(epoch, {})

    def buffer(self, key: BufferKey) -> RankState:
        """A buffer by what it holds, whether an epoch names it or not."""
        return self._buffers[key]

    @property
    def keys(self) -> tuple[BufferKey, ...]:
        """Every buffer, staged and torn ones included."""
        return tuple(self._buffers)

    @property
    def whole_keys(self) -> tuple[BufferKey, ...]:
        """Every buffer that is not torn."""
        return tuple(key for key in self._buffers if key not in self._torn)

    def prepare(self, order: DeviceOrder) -> Export | None:
        """Allocate the target buffer where the order says so; returns how peers reach the source buffer."""
        if order.source is not None:
            self._check_whole(order.source)
        if order.target is not None and not order.keeps_buffer:
            self._tear(order, order.target)
        if order.source is None:
            return None
        state = self._held(order, order.source)
        memory = self._memory(in_host=order.source_in_host)
        return Export({kind: memory.handle(state.flats[kind]) for kind, _ in order.kinds}, state.counters)

    def _tear(self, order: DeviceOrder, target: BufferKey) -> None:
        """Mark the target as torn; a new one is allocated, in place of one that an earlier move left torn."""
        if order.allocates:
            if target in self._torn:
                self._drop(target)
            if target in self._buffers:
                raise TransitionAborted(order.key, f"device {self._device} already holds {target}")
            self._buffers[target] = RankState.allocate(
                order.spec,
                target.layout,
                target.rank,
                dtypes=dict(order.kinds),
                allocator=self._memory(in_host=target.in_host),
            )
        self._torn.add(target)

    def move(
        self,
        order: DeviceOrder,
        exports: Mapping[int, Export],
        counters: Counters,
        *,
        store: Store | None,
        timeout: timedelta,
    ) -> Receipt:
        """Fill the target buffer and serve the peers of other nodes; returns when this device has done its part.

        exports: of every source device this one reads on its own node. counters: those of the sources.
        """
        try:
            return self._move(order, exports, counters, store=store, timeout=timeout)
        except NereusError as error:
            _let_go(error)
            raise

    def _move(
        self,
        order: DeviceOrder,
        exports: Mapping[int, Export],
        counters: Counters,
        *,
        store: Store | None,
        timeout: timedelta,
    ) -> Receipt:
        begun = time.monotonic()
        source = self._flats(order, order.source)
        target = self._flats(order, order.target)
        peak, through_group = 0, 0
        if order.group is not None:
            peak = self._move_between_nodes(order, source, target, store=store, timeout=timeout)
            through_group = sum(m.numel for m in order.moves.incoming if not m.same_node)
        shared = self._move_within_node(order, exports, source, target)
        if order.target is not None and not order.keeps_buffer:
            self._held(order, order.target).counters = counters
        element_bytes = sum(dtype.itemsize for _, dtype in order.kinds)
        return Receipt(
            self._device, shared * element_bytes, through_group * element_bytes, time.monotonic() - begun, peak
        )

    def digests(self, order: DeviceOrder) -> DeviceDigests:
        """Digests of what this device was to send and of what it was to receive, from memory as it is now."""
        local = () if order.moves.local is None or order.keeps_buffer else (order.moves.local,)
        sent = self._digests(order, (*order.moves.outgoing, *local), order.source, "source")
        return DeviceDigests(sent, self._digests(order, (*order.moves.incoming, *local), order.target, "target"))

    def settle(self, keys: Iterable[BufferKey]) -> None:
        """These buffers are whole: what a move wrote to them has been verified."""
        self._torn.difference_update(keys)

    def adopt(self, epoch: int, plan: Plan) -> None:
        """Let an epoch name the buffers its plan needs; raises TransitionAborted where one is not whole."""
        named: dict[ModelStage, BufferKey] = {}
        for model_stage, stage_plan in plan.stages:
            position = stage_plan.position(self._device)
            if position is None or plan.shares_weights(model_stage):
                continue
            key = BufferKey(model_stage, stage_plan.layout, position[1])
            if key not in self._buffers or key in self._torn:
                raise TransitionAborted(f"adopt epoch {epoch}", f"device {self._device} lacks {key}")
            named[model_stage] = key
        self._epochs[epoch] = named

    def release(self, keys: Iterable[BufferKey]) -> None:
        """Free buffers; those that are not there are left out.

        Epochs still name them, so that a buffer which is filled again on the way back is found under its old name.
        """
        self._detach()
        for key in keys:
            self._drop(key)

    def free(self, epoch: int) -> None:
        """Forget an epoch with its kept groups, and free every buffer that no other epoch names, staged ones
        included."""
        self._detach()
        self._epochs.pop(epoch, None)
        named = {key for stages in self._epochs.values() for key in stages.values()}
        for key in [key for key in self._buffers if key not in named]:
            self._drop(key)
        for name in [name for name in self._groups if name.startswith(f"move/e{epoch}/")]:
            self._groups.pop(name).close()

    def _detach(self) -> None:
        """Let go of peers' memory that repeated moves kept mapped; else it would outlive its buffer's release."""
        for memory in (self.memory, self.host_memory):
            memory.detach()

    def _drop(self, key: BufferKey) -> None:
        """Free a buffer. Its tensors go now, even where an engine still holds the RankState."""
        state = self._buffers.pop(key, None)
        self._torn.discard(key)
        if state is not None:
            state.flats.clear()

    def _memory(self, *, in_host: bool) -> Memory:
        return self.host_memory if in_host else self.memory

    def _check_whole(self, key: BufferKey) -> None:
        if key not in self._buffers:
            raise TornStateError(self._device, str(key), "it is gone")
        if key in self._torn:
            raise TornStateError(self._device, str(key), "a move left it unfinished or unverified")

    def _held(self, order: DeviceOrder, key: BufferKey) -> RankState:
        if key not in self._buffers:
            raise TransitionAborted(order.key, f"device {self._device} does not hold {key}")
        return self._buffers[key]

    def _flats(self, order: DeviceOrder, key: BufferKey | None) -> Flats | None:
        """The flat tensors of a buffer, of the kinds that move."""
        if key is None:
            return None
        state = self._held(order, key)
        return {kind: state.flats[kind] for kind, _ in order.kinds}

    def _move_within_node(
        self, order: DeviceOrder, exports: Mapping[int, Export], source: Flats | None, target: Flats | None
    ) -> int:
        """Copy what this process reaches; returns the elements taken from peers."""
        if target is None:
            return 0
        if order.moves.local is not None and source is not None and not order.keeps_buffer:
            pull(order.moves.local, source, target)
        numel, memory = 0, self._memory(in_host=order.source_in_host)
        for move in order.moves.incoming:
            if move.same_node:
                handles = exports[move.source].handles
                opened = {kind: memory.open(handles[kind], keep=order.keeps_group) for kind in target}
                pull(move, opened, target)
                numel += move.numel
        return numel

    def _move_between_nodes(
        self, order: DeviceOrder, source: Flats | None, target: Flats | None, *, store: Store | None, timeout: timedelta
    ) -> int:
        """Exchange over the order's group; returns the most bytes that were staged at once."""
        assert order.group is not None and store is not None
        group = self._groups.pop(order.group.name, None)
        if group is None:
            group = order.group.join(store, self._device, timeout=timeout, backend=self._backend)
        exchange = Exchange(order, group, self._torch_device)
        kept = False
        try:
            exchange.run(source, target)
            kept = order.keeps_group
        finally:
            if kept:
                self._groups[order.group.name] = group
            else:
                group.close()
        return exchange.peak_staged_bytes

    def _digests(self, order: DeviceOrder, moves: Iterable[Move], key: BufferKey | None, side: Side) -> Digests:
        found: Digests = {}
        flats = self._flats(order, key)
        for move in moves:
            assert flats is not None
            found |= move_digests(move, flats, side, kinds=flats, bucket_bytes=order.bucket_bytes)
        return found


def _let_go(error: BaseException) -> None:
    """Drop what the frames of an error hold: they would keep buffers alive that an abort frees to make room."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__

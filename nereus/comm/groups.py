"""Process groups as values: built from a store, a name, a rank and a size, with no global world.

A group belongs to one epoch of a plan and carries that epoch in its name, so groups of two epochs
live side by side. Nothing here knows plans, layouts or state.

The store that ranks meet at is `store.py`; it lives in the driver, not on a worker.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store
from torch.distributed import ReduceOp

from nereus.comm.store import KeyValueStore, StoreServer, connect_store, serve_store
from nereus.errors import GroupError

__all__ = [
    "BackendName",
    "Group",
    "GroupSpec",
    "StoreServer",
    "Work",
    "build_group",
    "connect_store",
    "serve_store",
]

Tensors = list[torch.Tensor]
BackendName = Literal["gloo", "nccl"]
Operator = Literal["sum", "max", "min"]


class Waitable(Protocol):
    """What a torch process group returns from an operation."""

    def wait(self) -> object: ...


class ProcessGroup(Protocol):
    """The methods of torch's process groups that `Group` calls; none of them looks a rank up in a global world."""

    def allreduce(self, tensors: Tensors, options: Any) -> Waitable: ...
    def allgather(self, outputs: list[Tensors], inputs: Tensors) -> Waitable: ...
    def broadcast(self, tensor: torch.Tensor, root: int) -> Waitable: ...
    def barrier(self) -> Waitable: ...
    def send(self, tensors: Tensors, peer: int, tag: int) -> Waitable: ...
    def recv(self, tensors: Tensors, peer: int, tag: int) -> Waitable: ...
    def abort(self) -> None: ...


_OPERATORS: dict[Operator, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


class Work:
    """A transfer in flight. It keeps its tensor alive; `wait` returns when the tensor may be used again."""

    __slots__ = ("_tensor", "_what", "_work")

    def __init__(self, what: str, work: Waitable | None, tensor: torch.Tensor) -> None:
        self._what, self._work, self._tensor = what, work, tensor

    def wait(self) -> None:
        """Block until done; raises GroupError where a peer died or was late. A second call returns at once."""
        if self._work is not None:
            _wait(self._what, self._work)
            self._work = None


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """One rank's end of a process group. Tensors must be contiguous and of equal size and dtype on all ranks.

    Every method that waits raises GroupError where a peer died or did not come within `timeout`. A size mismatch
    between ranks cannot be caught (gloo ends the process): `agree` on a fingerprint before sending.
    """

    name: str
    rank: int
    size: int
    timeout: timedelta
    backend: BackendName
    process_group: ProcessGroup | None = dataclasses.field(repr=False)
    store: Store | None = dataclasses.field(default=None, repr=False)
    observe: Callable[[str, int, float], None] | None = dataclasses.field(default=None, repr=False)
    """Told of every collective and receive: (operation, bytes of the tensor, seconds, waiting for peers included)."""

    @classmethod
    def single(cls, name: str = "single") -> "Group":
        """The group of one rank: free, and every collective leaves its tensor as it is."""
        return cls(name, 0, 1, timedelta(0), "gloo", None)

    def all_reduce(self, tensor: torch.Tensor, op: Operator = "sum", *, timeout: timedelta | None = None) -> None:
        """Reduce in place over all ranks; `timeout` replaces the group's."""
        if self.size > 1:
            options = AllreduceOptions()
            options.reduceOp = _OPERATORS[op]
            options.timeout = timeout or self.timeout
            self._run("all_reduce", tensor, lambda group: group.allreduce([tensor], options))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each rank, in rank order; a copy, except that a group of one returns the tensor itself."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run("all_gather", tensor, lambda group: group.allgather([gathered], [tensor]))
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill the tensor on every rank with that of rank `source`."""
        if self.size > 1:
            self._run("broadcast", tensor, lambda group: group.broadcast(tensor, source))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.size > 1:
            self._run("barrier", None, lambda group: group.barrier())

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Start to send; leave the tensor unchanged until the work is waited for. Any tensor, no global order."""
        return self._start(f"send to {peer}", tensor, lambda group: group.send([tensor], peer, tag))

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Start to receive into the tensor."""
        return self._start(f"recv from {peer}", tensor, lambda group: group.recv([tensor], peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> None:
        """Receive into the tensor and return when it is there."""
        begun = time.perf_counter()
        self.irecv(tensor, peer, tag).wait()
        self._tell("point_to_point", tensor, begun)

    def agree(self, fingerprint: int, *, device: torch.device | None = None) -> None:
        """Raise GroupError on every rank unless all came with the same 63-bit fingerprint of what they will do."""
        seen = torch.cat(self.all_gather(torch.tensor([fingerprint], dtype=torch.int64, device=device))).tolist()
        if len(set(seen)) > 1:
            raise GroupError(self.name, f"ranks disagree on what to do: fingerprints {seen}")

    def close(self) -> None:
        """Give the group up: pending operations end with an error, threads and connections go with the last user.

        Its name is free again when every rank has closed it. Close only after a collective (or a failure) has shown
        that every rank has joined or given up. Where a peer is stopped rather than dead the connections go when the
        peer does; kill it first.
        """
        if self.process_group is not None:
            self.process_group.abort()
            self.process_group = None
            _forget(self.store, self.name)
            self.store = None

    def _run(self, what: str, tensor: torch.Tensor | None, start: Callable[[ProcessGroup], Waitable]) -> None:
        begun = time.perf_counter()
        _wait(f"{self.name}, {what}", self._begin(what, start))
        if tensor is not None:
            self._tell(what, tensor, begun)

    def _tell(self, what: str, tensor: torch.Tensor, begun: float) -> None:
        if self.observe is not None:
            self.observe(what, tensor.numel() * tensor.element_size(), time.perf_counter() - begun)

    def _start(self, what: str, tensor: torch.Tensor, start: Callable[[ProcessGroup], Waitable]) -> Work:
        return Work(f"{self.name}, {what}", self._begin(what, start), tensor)

    def _begin(self, what: str, start: Callable[[ProcessGroup], Waitable]) -> Waitable:
        if self.process_group is None:
            problem = "the group is closed" if self.size > 1 else "a group of one has no such peer"
            raise GroupError(f"{self.name}, {what}", problem)
        try:
            return start(self.process_group)
        except RuntimeError as error:
            raise GroupError(f"{self.name}, {what}", _first_line(error)) from None


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group before it stands: a name unique in the job and its devices in rank order."""

    name: str
    devices: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.devices)

    def join(self, store: Store, device: int, *, timeout: timedelta, backend: BackendName = "gloo") -> Group:
        """Take the place of `device`; returns when every rank has joined."""
        return build_group(
            store, self.name, rank=self.devices.index(device), size=self.size, timeout=timeout, backend=backend
        )


def build_group(
    store: Store, name: str, *, rank: int, size: int, timeout: timedelta, backend: BackendName = "gloo"
) -> Group:
    """Join the group `name` as `rank`; returns when all `size` ranks have joined, GroupError after `timeout`.

    A name can be used again when every rank of its earlier group has closed it or failed to join it.
    """
    if size == 1:
        return dataclasses.replace(Group.single(name), timeout=timeout, backend=backend)
    build = {"gloo": _build_gloo, "nccl": _build_nccl}[backend]
    try:
        process_group = build(store, name, rank, size, timeout)
    except (RuntimeError, GroupError) as error:
        _forget(store, name)
        raise GroupError(f"group {name}", _first_line(error)) from None
    return Group(name, rank, size, timeout, backend, process_group, store)


def _build_gloo(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [_gloo_device(store.local_address if isinstance(store, KeyValueStore) else "127.0.0.1")]
    options._threads = 2
    return cast(ProcessGroup, gloo(PrefixStore(name, store), rank, size, options))


def _build_nccl(store: Store, name: str, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds of torch

    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return cast(ProcessGroup, nccl(PrefixStore(name, store), rank, size, options))


@functools.lru_cache(maxsize=8)
def _gloo_device(address: str) -> Any:
    """The event loop of this process on one network address; every group of the process shares it."""
    return ProcessGroupGloo.create_device(hostname=address)


def _forget(store: Store | None, name: str) -> None:
    """Remove what a group left in its corner of the store; where the store is gone so is that."""
    if isinstance(store, KeyValueStore):
        with contextlib.suppress(GroupError):
            store.forget(f"{name}/")


def _wait(what: str, work: Waitable) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupError(what, _first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

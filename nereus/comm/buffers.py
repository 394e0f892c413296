"""Flat tensors that other processes of the same node can read in place.

On the processor a buffer is an anonymous file in memory (memfd) that its owner maps; a peer opens it through
`/proc/<pid>/fd/<fd>` and maps the same pages. The file has no name, so when its last holder ends, however it ends, the
memory is gone: nothing is ever left in /dev/shm. On CUDA a buffer is an ordinary allocation that peers open through
CUDA IPC. Nothing here knows what the elements mean.
"""

import abc
import dataclasses
import functools
import mmap
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nereus.errors import NereusError

__all__ = ["CudaMemory", "Handle", "Memory", "SharedMemory", "StaleHandle", "memory_on", "node_identity"]


class StaleHandle(NereusError):
    """A handle whose memory is gone, is another's by now, or lies on another node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """Where a flat tensor of another process lies. Small and picklable; says nothing about how long it stays.

    opener: (pid, fd, inode) on the processor, what `torch.multiprocessing` made on CUDA.
    """

    node: str
    numel: int
    dtype: torch.dtype
    opener: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Memory(abc.ABC):
    """Allocates flat tensors on one device and lets peers of the node open them."""

    @abc.abstractmethod
    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed, touched flat tensor; its memory is given back when its last view is dropped."""

    @abc.abstractmethod
    def handle(self, flat: torch.Tensor) -> Handle:
        """The handle of a tensor this object allocated and that still lives."""

    @abc.abstractmethod
    def open(self, handle: Handle, *, keep: bool = False) -> torch.Tensor:
        """The tensor behind a handle, sharing its memory, to be read; raises StaleHandle where it is not there.

        keep: it will be opened again, so stay attached until `detach`; its memory cannot go before.
        """

    @abc.abstractmethod
    def detach(self) -> None:
        """Let go of every tensor that was opened to be kept."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the tensors this object allocated that still live."""


class SharedMemory(Memory):
    """Processor memory shared within a node."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}
        self._attached: dict[Handle, torch.Tensor] = {}

    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = max(numel, 1) * dtype.itemsize
        fd = os.memfd_create("nereus", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fails here, with an error, where memory is short; not on first use
            flat = _mapped(fd, nbytes, numel, dtype, touched=True)
        except OSError:
            os.close(fd)
            raise
        key = id(flat)
        self._live[key] = (fd, nbytes)
        weakref.finalize(flat, _forget, self._live, key).atexit = False
        return flat

    def handle(self, flat: torch.Tensor) -> Handle:
        fd, _ = self._live[id(flat)]
        return Handle(node_identity(), flat.numel(), flat.dtype, (os.getpid(), fd, os.fstat(fd).st_ino))

    def open(self, handle: Handle, *, keep: bool = False) -> torch.Tensor:
        if handle in self._attached:
            return self._attached[handle]
        flat = self._open(handle)
        if keep:
            self._attached[handle] = flat
        return flat

    def detach(self) -> None:
        self._attached.clear()

    def _open(self, handle: Handle) -> torch.Tensor:
        pid, fd, inode = handle.opener
        if handle.node != node_identity():
            raise StaleHandle(f"buffer of process {pid} lies on node {handle.node}, not on {node_identity()}")
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StaleHandle(f"buffer {fd} of process {pid}: {error.strerror}") from None
        try:
            found = os.fstat(own)
            if found.st_ino != inode or found.st_size < handle.nbytes:
                raise StaleHandle(f"buffer {fd} of process {pid} is another file by now")
            return _mapped(own, found.st_size, handle.numel, handle.dtype, touched=False)
        finally:
            os.close(own)

    @property
    def num_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._live.values())


class CudaMemory(Memory):
    """Memory of one CUDA device; peers of the node open it through CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live: dict[int, int] = {}

    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.zeros(max(numel, 1), dtype=dtype, device=self._device)[:numel]
        key = id(flat)
        self._live[key] = flat.nbytes
        weakref.finalize(flat, self._live.pop, key, 0).atexit = False
        return flat

    def handle(self, flat: torch.Tensor) -> Handle:
        torch.cuda.synchronize(self._device)
        reduce: Callable[[torch.Tensor], tuple[Any, ...]] = reduce_tensor
        return Handle(node_identity(), flat.numel(), flat.dtype, reduce(flat))

    def detach(self) -> None:
        """Nothing to do: torch attaches to a peer's memory once and counts the tensors that use it."""

    def open(self, handle: Handle, *, keep: bool = False) -> torch.Tensor:
        rebuild: Callable[..., torch.Tensor] = handle.opener[0]
        return rebuild(*handle.opener[1])

    @property
    def num_bytes(self) -> int:
        return sum(self._live.values())


def memory_on(device: torch.device) -> Memory:
    """The allocator of a worker's device."""
    return CudaMemory(device) if device.type == "cuda" else SharedMemory()


@functools.lru_cache(maxsize=1)
def node_identity() -> str:
    """Names what processes must have in common to open each other's buffers: the boot and the process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def _mapped(fd: int, nbytes: int, numel: int, dtype: torch.dtype, *, touched: bool) -> torch.Tensor:
    """A flat tensor over the first elements of a file; the mapping lives as long as the tensor's storage.

    touched: map every page now; a peer reads only a part and maps what it reads. (The mapping holds a duplicate of fd.)
    """
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if touched else 0))
    whole = torch.frombuffer(mapping, dtype=dtype, count=max(numel, 1))
    return whole if numel else whole[:0]


def _forget(live: dict[int, tuple[int, int]], key: int) -> None:
    fd, _ = live.pop(key)
    os.close(fd)

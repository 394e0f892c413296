"""Shared buffers reach other processes, name the wrong memory as such, and leave nothing behind."""

import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from nereus.comm.buffers import CudaMemory, Handle, SharedMemory, StaleHandle, memory_on, node_identity


def descriptors() -> int:
    """Open file descriptors of this process once all garbage is gone."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("numel", [0, 1, 7, 513, 262147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_buffer_starts_zeroed_and_its_handle_opens_the_same_memory(numel: int, dtype: torch.dtype) -> None:
    memory = SharedMemory()
    flat = memory(numel, dtype)
    assert flat.shape == (numel,) and flat.dtype == dtype and not flat.any()
    seen = memory.open(memory.handle(flat))
    flat.fill_(3)
    assert torch.equal(seen, flat) and seen.dtype == dtype


def test_memory_and_descriptor_go_with_the_last_view() -> None:
    memory, before = SharedMemory(), descriptors()
    flat = memory(1000, torch.float32)
    view = flat[10:20]
    assert memory.num_bytes == 4000 and descriptors() > before
    del flat
    gc.collect()
    assert memory.num_bytes == 4000 and not view.any()
    del view
    gc.collect()
    assert memory.num_bytes == 0 and descriptors() <= before


def test_an_opened_buffer_outlives_its_owner_and_then_leaves_no_descriptor() -> None:
    memory, before = SharedMemory(), descriptors()
    flat = memory(1000, torch.float32)
    flat.fill_(5)
    seen = memory.open(memory.handle(flat))
    del flat
    gc.collect()
    assert bool((seen == 5).all())
    del seen
    gc.collect()
    assert descriptors() <= before


def test_a_handle_whose_memory_is_gone_is_stale() -> None:
    memory = SharedMemory()
    flat = memory(10, torch.float32)
    handle = memory.handle(flat)
    del flat
    gc.collect()
    with pytest.raises(StaleHandle):
        memory.open(handle)
    other = memory(10, torch.float32)
    with pytest.raises(StaleHandle, match="another file|No such file"):
        memory.open(handle)
    assert not other.any()


def test_what_is_opened_to_be_kept_stays_attached_until_detached() -> None:
    memory, before = SharedMemory(), descriptors()
    flat = memory(10, torch.float32)
    handle = memory.handle(flat)
    assert memory.open(handle, keep=True) is memory.open(handle)
    del flat
    memory.detach()
    gc.collect()
    assert descriptors() <= before


def test_a_handle_of_another_node_is_refused() -> None:
    memory = SharedMemory()
    handle = memory.handle(memory_kept := memory(10, torch.float32))
    moved = Handle("elsewhere/1/2", handle.numel, handle.dtype, handle.opener)
    with pytest.raises(StaleHandle, match="lies on node elsewhere"):
        memory.open(moved)
    assert node_identity() == handle.node and memory_kept.numel() == 10


def _share(pipe: Connection) -> None:
    memory = SharedMemory()
    flat = memory(1 << 20, torch.float32)
    flat.copy_(torch.arange(1 << 20))
    pipe.send(memory.handle(flat))
    pipe.recv()
    flat.fill_(-1)
    pipe.send("written")
    pipe.recv()


def test_a_peer_process_is_read_and_leaves_nothing_when_killed() -> None:
    """protocol.md: a crash leaves no memory behind."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_share, args=(theirs,), daemon=True)
    shm_before = sorted(os.listdir("/dev/shm"))
    process.start()
    memory, handle = SharedMemory(), ours.recv()
    seen = memory.open(handle)
    assert torch.equal(seen, torch.arange(1 << 20, dtype=torch.float32))
    ours.send("write")
    ours.recv()
    assert bool((seen == -1).all())
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert bool((seen == -1).all()), "what was opened stays until it is dropped"
    with pytest.raises(StaleHandle):
        memory.open(handle)
    assert sorted(os.listdir("/dev/shm")) == shm_before


def test_the_memory_of_a_device_fits_its_type() -> None:
    assert isinstance(memory_on(torch.device("cpu")), SharedMemory)
    assert isinstance(memory_on(torch.device("cuda", 0)), CudaMemory)


def _read_cuda(pipe: Connection) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    pipe.send(memory.open(pipe.recv()).sum().item())


@pytest.mark.gpu
def test_a_cuda_buffer_is_read_by_a_peer_process() -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    flat = memory(1000, torch.float32)
    flat.fill_(2)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_read_cuda, args=(theirs,), daemon=True)
    process.start()
    ours.send(memory.handle(flat))
    assert ours.recv() == 2000 and memory.num_bytes == 4000
    process.join(30)

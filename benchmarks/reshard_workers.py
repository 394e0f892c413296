"""Real processes that hold state and move it: one process a device, calls over pipes. No Ray, no engines."""

import contextlib
import dataclasses
import multiprocessing
import pickle
import socket
import struct
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nereus.comm.groups import GroupSpec
from nereus.comm.store import connect_store, serve_store
from nereus.errors import NereusError, WorkerError
from nereus.model import Param
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt, StageKinds
from nereus.moving.executor import Movers
from nereus.moving.resident import Residents
from nereus.plan import Layout, ModelStage, Plan
from nereus.shards.boxes import Box, shard_table, shards
from nereus.shards.moves import Holding
from nereus.shards.state import Counters, RankState, StateKind

TIMEOUT = timedelta(seconds=120)
PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "nereus.moving.resident",
    "nereus.moving.executor",
]
"""Imported once by the process that the others are forked from."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One range of one tensor that a rank fetches from a holder, as a host-side tensor store would serve it."""

    source: int
    stage: ModelStage
    name: str
    kind: StateKind
    box: Box


def values(param: Param, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Known contents of a box: the element's place in its tensor, so that a misplaced element shows."""
    columns = param.shape[-1]
    rows = torch.arange(box.start[0], box.stop[0]) if len(param.shape) == 2 else torch.zeros(1, dtype=torch.int64)
    place = (rows * columns % 8191)[:, None] + (torch.arange(box.start[-1], box.stop[-1]) % 8191)[None, :]
    return place.to(dtype).reshape(box.shape)


def fill(state: RankState) -> None:
    """Write the known contents of every kind of state."""
    for shard in state.shards:
        known = values(shard.param, shard.box, torch.float32)
        for kind in state.flats:
            state.view(shard.param.name, kind).copy_(known)


def holds_values(state: RankState) -> bool:
    for shard in state.shards:
        known = values(shard.param, shard.box, torch.float32)
        for kind, flat in state.flats.items():
            if not torch.equal(state.view(shard.param.name, kind), known.to(flat.dtype)):
                return False
    return True


def shard_requests(
    state: StageKinds, stage: ModelStage, source: Holding, target: Holding, device: int
) -> list[Request]:
    """What a target rank lacks, tensor by tensor and holder by holder."""
    rank, held = dict(target.ranks)[device], dict(source.ranks)
    own = shard_table(state.spec, source.layout, held[device]) if device in held else {}
    found: list[Request] = []
    for shard in shards(state.spec, target.layout, rank):
        name = shard.param.name
        rest = shard.box.subtract(own[name].box) if name in own else [shard.box]
        for holder in _rotated(source.devices, device):
            table = shard_table(state.spec, source.layout, held[holder])
            if name not in table:
                continue
            parts = [part for box in rest if (part := box.intersect(table[name].box)) is not None]
            rest = [left for box in rest for left in box.subtract(table[name].box)]
            found += [Request(holder, stage, name, kind, part) for part in parts for kind, _ in state.kinds]
    return found


def _rotated(devices: tuple[int, ...], by: int) -> tuple[int, ...]:
    return devices[by % len(devices) :] + devices[: by % len(devices)]


class BenchWorker:
    """One device in a process of its own."""

    def __init__(self, device: int, store: tuple[str, int]) -> None:
        torch.set_num_threads(1)
        self.device, self.residents = device, Residents(device, torch.device("cpu"))
        self.store = connect_store(*store, timeout=TIMEOUT)
        self._scratch: dict[str, torch.Tensor] = {}
        self._server: socket.socket | None = None

    def allocate(self, epoch: int, stage: ModelStage, state: StageKinds, layout: Layout, rank: int) -> None:
        unit = self.residents.allocate(epoch, stage, state.spec, layout, rank, dict(state.kinds))
        unit.counters = Counters(1, 1)
        fill(unit)

    def prepare(self, order: DeviceOrder) -> Export | None:
        return self.residents.prepare(order)

    def move(self, order: DeviceOrder, exports: Mapping[int, Export], counters: Counters) -> Receipt:
        return self.residents.move(order, exports, counters, store=self.store, timeout=TIMEOUT)

    def move_watched(self, order: DeviceOrder, exports: Mapping[int, Export], counters: Counters) -> int:
        """Move, and return the most memory it took beyond the buffers: by how much private memory grew, or what was
        staged where the allocator had kept that memory from an earlier move. Watching takes time of its own."""
        with PrivateMemory() as private:
            receipt = self.move(order, exports, counters)
        return max(private.growth_bytes, receipt.peak_extra_bytes)

    def digests(self, order: DeviceOrder) -> DeviceDigests:
        return self.residents.digests(order)

    def settle(self, keys: tuple[BufferKey, ...]) -> None:
        self.residents.settle(keys)

    def census(self) -> tuple[BufferKey, ...]:
        return self.residents.whole_keys

    def release(self, keys: tuple[BufferKey, ...]) -> None:
        self.residents.release(keys)

    def adopt(self, epoch: int, plan: Plan) -> None:
        self.residents.adopt(epoch, plan)

    def free(self, epoch: int) -> None:
        self.residents.free(epoch)

    def holds_values(self, key: BufferKey) -> bool:
        return holds_values(self.residents.buffer(key))

    def num_shared_bytes(self) -> int:
        return self.residents.memory.num_bytes

    def plain_copy(self, nbytes: int) -> float:
        """Seconds to copy so many bytes between two touched buffers of this process."""
        source, target = self._touched("source", nbytes), self._touched("target", nbytes)
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun

    def raw_send(self, name: str, devices: tuple[int, ...], nbytes: dict[tuple[int, int], int]) -> float:
        """Seconds for one large send a pair over a group that stands, all pairs at once."""
        group = GroupSpec(name, devices).join(self.store, self.device, timeout=TIMEOUT)
        sizes = {pair: n for pair, n in nbytes.items() if self.device in pair}
        buffers = {pair: self._touched(f"{pair}", n) for pair, n in sizes.items()}
        group.barrier()
        begun = time.perf_counter()
        place = {device: index for index, device in enumerate(devices)}
        rounds = sorted(sizes, key=lambda pair: ((place[pair[1]] - place[pair[0]]) % len(devices), pair[0]))
        works = [
            group.send(buffers[s, t], place[t]) if s == self.device else group.irecv(buffers[s, t], place[s])
            for s, t in rounds
        ]
        for work in works:
            work.wait()
        seconds = time.perf_counter() - begun
        group.barrier()
        group.close()
        return seconds

    def serve_shards(self, epoch: int) -> int:
        """Start to answer ranges of this device's tensors; returns the port."""
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(self._server, epoch), daemon=True).start()
        return int(self._server.getsockname()[1])

    def stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def fetch_shards(self, requests: list[Request], ports: dict[int, int], layout: Layout, rank: int) -> float:
        """Seconds to fetch every range, one request at a time, into the staged target buffers."""
        connections = {d: socket.create_connection(("127.0.0.1", port)) for d, port in ports.items()}
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        for request in requests:
            state = self.residents.buffer(BufferKey(request.stage, layout, rank))
            view = state.view(request.name, request.kind)[request.box.within(state.shard(request.name).box)]
            _ask(connections[request.source], request)
            view.copy_(_receive_tensor(connections[request.source], view.shape, view.dtype))
        seconds = time.perf_counter() - begun
        for connection in connections.values():
            connection.close()
        return seconds

    def _serve(self, server: socket.socket, epoch: int) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection, epoch), daemon=True).start()

    def _answer(self, connection: socket.socket, epoch: int) -> None:
        with connection:
            while (request := _read_request(connection)) is not None:
                state = self.residents.state(epoch, request.stage)
                part = state.view(request.name, request.kind)[request.box.within(state.shard(request.name).box)]
                connection.sendall(part.contiguous().view(torch.uint8).numpy().data)

    def _touched(self, name: str, nbytes: int) -> torch.Tensor:
        if name not in self._scratch or self._scratch[name].numel() != nbytes:
            self._scratch[name] = torch.ones(nbytes, dtype=torch.uint8)
        return self._scratch[name]

    def reset(self) -> None:
        """Back to a worker that holds nothing."""
        self.residents.free(0)
        self._scratch.clear()

    def drop_scratch(self) -> None:
        self._scratch.clear()


def _ask(connection: socket.socket, request: Request) -> None:
    body = pickle.dumps(request)
    connection.sendall(struct.pack("<I", len(body)) + body)


def _read_request(connection: socket.socket) -> Request | None:
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    request: Request = pickle.loads(connection.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
    return request


def _receive_tensor(connection: socket.socket, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    rest = tensor.view(-1).view(torch.uint8).numpy().data
    while len(rest):
        rest = rest[connection.recv_into(rest) :]
    return tensor


class PrivateMemory:
    """Samples this process's private memory every 2 ms while it is entered."""

    def __enter__(self) -> "PrivateMemory":
        self._before = self._peak = _private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, _private_bytes())

    @property
    def growth_bytes(self) -> int:
        return max(self._peak - self._before, 0)


def _private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def worker_main(device: int, store: tuple[str, int], pipe: Connection, worker_class: type[BenchWorker]) -> None:
    """Serve calls until the pipe closes."""
    worker = worker_class(device, store)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except NereusError as error:
            pipe.send((False, error))
        except Exception as error:
            pipe.send((False, WorkerError(device, method, repr(error))))


class ProcessMovers(Movers):
    """Workers in processes of their own."""

    def __init__(self, num_devices: int, *, worker_class: type[BenchWorker] = BenchWorker) -> None:
        self.server = serve_store()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for device in range(num_devices):
            ours, theirs = context.Pipe()
            store = self.server.host, self.server.port
            process = context.Process(target=worker_main, args=(device, store, theirs, worker_class), daemon=True)
            process.start()
            theirs.close()
            self.pipes[device], self.processes[device] = ours, process

    def each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of several workers at once; raises the first error after all have answered."""
        results, errors, asked = {}, [], []
        for device, args in arguments.items():
            try:
                self.pipes[device].send((method, args))
                asked.append(device)
            except BrokenPipeError:
                errors.append(WorkerError(device, method, "died"))
        for device in asked:
            try:
                if not self.pipes[device].poll(TIMEOUT.total_seconds()):
                    raise WorkerError(device, method, "was late")
                ok, value = self.pipes[device].recv()
            except (EOFError, ConnectionError):
                ok, value = False, WorkerError(device, method, "died")
            if ok:
                results[device] = value
            else:
                errors.append(value)
        if errors:
            raise errors[0]
        return results

    def prepare(self, orders: Mapping[int, DeviceOrder]) -> dict[int, Export | None]:
        return self.each("prepare", {d: (order,) for d, order in orders.items()})

    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> dict[int, Receipt]:
        return self.each("move", {d: (order, exports, counters) for d, order in orders.items()})

    def digests(self, orders: Mapping[int, DeviceOrder]) -> dict[int, DeviceDigests]:
        return self.each("digests", {d: (order,) for d, order in orders.items()})

    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self.each("settle", {d: (of_device,) for d, of_device in keys.items()})

    def census(self) -> dict[int, tuple[BufferKey, ...]]:
        found: dict[int, tuple[BufferKey, ...]] = {}
        for device in self.pipes:
            with contextlib.suppress(NereusError):
                found |= self.each("census", {device: ()})
        return found

    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self.each("release", {d: (of_device,) for d, of_device in keys.items()})

    def seat(self, epoch: int, plan: Plan) -> None:
        self.each("adopt", dict.fromkeys(plan.devices, (epoch, plan)))

    def retire(self, epoch: int) -> None:
        self.each("free", {d: (epoch,) for d in self.pipes if self.processes[d].is_alive()})

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
        self.server.handle.close()

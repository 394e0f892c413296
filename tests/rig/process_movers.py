"""Workers of a transition as processes: each has its own residents, memory and store client. Calls travel by pipe."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from nereus.comm.groups import Group, GroupSpec
from nereus.comm.store import connect_store, serve_store
from nereus.errors import NereusError, WorkerError
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt
from nereus.moving.executor import Movers
from nereus.moving.resident import Residents
from nereus.plan import Plan
from nereus.shards.state import Counters

TIMEOUT = timedelta(seconds=60)


class ProcessWorker:
    """What lives in one process."""

    def __init__(self, device: int, host: str, port: int) -> None:
        self.device, self.residents = device, Residents(device, torch.device("cpu"))
        self._store = connect_store(host, port, timeout=TIMEOUT)
        self._groups: dict[int, Group] = {}
        self.dies_when_seated = False

    def prepare(self, order: DeviceOrder) -> Export | None:
        return self.residents.prepare(order)

    def move(self, order: DeviceOrder, exports: Mapping[int, Export], counters: Counters) -> Receipt:
        return self.residents.move(order, exports, counters, store=self._store, timeout=TIMEOUT)

    def digests(self, order: DeviceOrder) -> DeviceDigests:
        return self.residents.digests(order)

    def settle(self, keys: tuple[BufferKey, ...]) -> None:
        self.residents.settle(keys)

    def census(self) -> tuple[BufferKey, ...]:
        return self.residents.whole_keys

    def release(self, keys: tuple[BufferKey, ...]) -> None:
        self.residents.release(keys)

    def seat(self, epoch: int, plan: Plan) -> None:
        if self.dies_when_seated:
            os.kill(os.getpid(), signal.SIGKILL)
        self.residents.adopt(epoch, plan)
        group = GroupSpec(f"e{epoch}", plan.devices)
        self._groups[epoch] = group.join(self._store, self.device, timeout=TIMEOUT)

    def retire(self, epoch: int) -> None:
        group = self._groups.pop(epoch, None)
        if group is not None:
            group.close()
        self.residents.free(epoch)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function of this worker, for filling and checking."""
        return function(self, *args)


def _serve(device: int, host: str, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    worker = ProcessWorker(device, host, port)
    while (request := pipe.recv()) is not None:
        method, args = request
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except NereusError as error:
            pipe.send((False, error))
        except Exception as error:
            pipe.send((False, WorkerError(device, method, repr(error))))


class ProcessMovers(Movers):
    """`num_devices` processes. Operations on disjoint devices may call at once: a pipe serves one caller at a time."""

    def __init__(self, num_devices: int) -> None:
        self._server = serve_store()
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[int, Connection] = {}
        self._processes = []
        for device in range(num_devices):
            self._pipes[device], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(device, self._server.host, self._server.port, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self._pipes.values():
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(60)
            assert process.exitcode in (0, -signal.SIGKILL)

    def prepare(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, Export | None]:
        return self._each("prepare", {device: (order,) for device, order in orders.items()})

    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> Mapping[int, Receipt]:
        return self._each("move", {device: (order, exports, counters) for device, order in orders.items()})

    def digests(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, DeviceDigests]:
        return self._each("digests", {device: (order,) for device, order in orders.items()})

    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each("settle", {device: (of_device,) for device, of_device in keys.items()})

    def census(self) -> Mapping[int, tuple[BufferKey, ...]]:
        found: dict[int, tuple[BufferKey, ...]] = {}
        for device in self._pipes:
            with contextlib.suppress(NereusError):
                found |= self._each("census", {device: ()})
        return found

    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each("release", {device: (of_device,) for device, of_device in keys.items()})

    def seat(self, epoch: int, plan: Plan) -> None:
        self._each("seat", dict.fromkeys(plan.devices, (epoch, plan)))

    def retire(self, epoch: int) -> None:
        self._each("retire", dict.fromkeys(self._pipes, (epoch,)))

    def apply(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """What a function returns for the worker of every process."""
        return self._each("apply", dict.fromkeys(self._pipes, (function, *args)))

    def kill(self, device: int) -> None:
        """End a process at once, with all it holds."""
        self._processes[device].kill()
        self._processes[device].join(60)

    def apply_on(self, device: int, function: Callable[..., Any], *args: Any) -> Any:
        """The same for one worker."""
        return self._each("apply", {device: (function, *args)})[device]

    def _each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        errors: list[NereusError] = []
        asked: list[int] = []
        for device, args in arguments.items():
            try:
                self._pipes[device].send((method, args))
                asked.append(device)
            except BrokenPipeError:
                errors.append(WorkerError(device, method, "died"))
        for device in asked:
            if not self._pipes[device].poll(2 * TIMEOUT.total_seconds()):
                raise WorkerError(device, method, "no answer")
            try:
                done, value = self._pipes[device].recv()
            except (EOFError, ConnectionError):
                done, value = False, WorkerError(device, method, "died")
            if done:
                results[device] = value
            else:
                errors.append(value)
        if errors:
            raise errors[0]
        return results

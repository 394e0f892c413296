"""Worker processes of the coordination trials: devices that refuse to hold more than their memory, and launch times."""

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from reshard_workers import BenchWorker, ProcessMovers, holds_values

from nereus.comm.buffers import SharedMemory
from nereus.errors import NereusError
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt
from nereus.moving.executor import Movers
from nereus.moving.resident import Residents
from nereus.plan import ModelStage, Plan
from nereus.shards.state import Counters


class OutOfMemory(NereusError):
    """A device was asked for more than it has."""


class CappedMemory(SharedMemory):
    """Memory of a device that has so many bytes and no more."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        wanted = self.num_bytes + numel * dtype.itemsize
        if wanted > self._limit_bytes:
            raise OutOfMemory(f"{wanted} bytes wanted of {self._limit_bytes}")
        return super().__call__(numel, dtype)


class CappedWorker(BenchWorker):
    """One device with little memory."""

    def start_over(self, limit_bytes: int) -> None:
        """Hold nothing, and from now on no more than so many bytes."""
        self.residents = Residents(self.device, torch.device("cpu"))
        self.residents.memory = CappedMemory(limit_bytes)

    def holds_exactly(self, keys: tuple[BufferKey, ...]) -> bool:
        """Whether these are all its buffers, each with the contents it must have."""
        held = self.residents
        return set(held.keys) == set(keys) and all(holds_values(held.buffer(key)) for key in keys)


class CappedMovers(ProcessMovers):
    """Calls from several threads; one call at a time on each device, as its one worker takes them."""

    def __init__(self, num_devices: int) -> None:
        super().__init__(num_devices, worker_class=CappedWorker)
        self._locks = {device: threading.Lock() for device in range(num_devices)}

    def each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        with ExitStack() as held:
            for device in sorted(arguments):
                held.enter_context(self._locks[device])
            return super().each(method, arguments)


class LaunchedMovers(Movers):
    """The movers of a transition in which each model-stage can first be touched at its launch time.

    launch_s: by model-stage, in seconds after this is made.
    """

    def __init__(self, movers: Movers, launch_s: Mapping[ModelStage, float]) -> None:
        self._movers, self._launch_s, self._begun = movers, launch_s, time.monotonic()

    def _launched(self, model_stage: ModelStage) -> None:
        time.sleep(max(self._begun + self._launch_s[model_stage] - time.monotonic(), 0))

    def prepare(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, Export | None]:
        for order in orders.values():
            for key in (order.source, order.target):
                if key is not None:
                    self._launched(key.model_stage)
        return self._movers.prepare(orders)

    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> Mapping[int, Receipt]:
        return self._movers.move(orders, exports, counters)

    def digests(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, DeviceDigests]:
        return self._movers.digests(orders)

    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._movers.settle(keys)

    def census(self) -> Mapping[int, tuple[BufferKey, ...]]:
        return self._movers.census()

    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        for of_device in keys.values():
            for key in of_device:
                self._launched(key.model_stage)
        self._movers.release(keys)

    def seat(self, epoch: int, plan: Plan) -> None:
        self._movers.seat(epoch, plan)

    def retire(self, epoch: int) -> None:
        self._movers.retire(epoch)

"""Workers as threads of this process: the same workers and the same collectives without Ray.

    caller --submit--> queue of one thread a worker --result--> future

For numerical tests and small jobs. A worker here cannot die alone, and all share one interpreter.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from nereus.cluster import ACCELERATORS, Cluster, uniform_cluster
from nereus.comm.groups import StoreServer, serve_store
from nereus.errors import ClusterError, NereusError, WorkerError
from nereus.runtime.seam import Pool
from nereus.runtime.worker import Worker, WorkerSettings

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(Pool):
    """Up to `num_devices` workers, each on a thread of its own.

    timeout: of a group. num_nodes: how many equal nodes to stand for; state crosses between them as between machines.
    """

    def __init__(
        self, num_devices: int, *, timeout: timedelta, memory_bytes: int | None = None, num_nodes: int = 1
    ) -> None:
        self._num_devices, self._timeout, self._memory_bytes = num_devices, timeout, memory_bytes
        self._num_nodes = num_nodes
        self._store: StoreServer | None = None
        self._workers: dict[int, tuple[ThreadPoolExecutor, Worker]] = {}

    def start(self, devices: Iterable[int]) -> None:
        if self._store is None:
            self._store = serve_store(timeout=self._timeout)
        settings = WorkerSettings(
            (self._store.host, self._store.port),
            self._timeout,
            memory_bytes=self._memory_bytes,
            owns_process=False,
        )
        for device in devices:
            if not 0 <= device < self._num_devices:
                raise ClusterError(
                    f"device {device} does not exist; there are {self._num_devices}: 0 to {self._num_devices - 1}"
                )
            if device not in self._workers:
                thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"worker {device}")
                self._workers[device] = thread, thread.submit(Worker, device, settings).result()

    def call(
        self, device: int, method: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        thread, worker = self._workers[device]
        return thread.submit(_named(device, method), worker, *args, **kwargs)

    def share(self, value: T) -> T:
        return value

    def stop(self, devices: Iterable[int]) -> None:
        for device in list(devices):
            thread, worker = self._workers.pop(device)
            thread.submit(worker.close).result()
            thread.shutdown()

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._workers))

    @functools.cached_property
    def cluster(self) -> Cluster:
        accelerator = ACCELERATORS["cpu"]
        if self._memory_bytes is not None:
            accelerator = dataclasses.replace(accelerator, memory_bytes=self._memory_bytes)
        per_node = -(-self._num_devices // self._num_nodes)
        return uniform_cluster(num_nodes=self._num_nodes, devices_per_node=per_node, accelerator=accelerator)

    def close(self) -> None:
        self.stop(self.devices)
        self._store = None


def _named(device: int, method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate[Worker, P], T]:
    """The method with errors that name the device and the task."""

    def run(worker: Worker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(worker, *args, **kwargs)
        except NereusError:
            raise
        except Exception as error:
            raise WorkerError(device, method.__name__, f"{type(error).__name__}: {error}") from error

    return run

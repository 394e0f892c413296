"""A pool of threads whose workers fail where a test says, and the faults."""

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, TypeVar

from nereus.cluster import Cluster
from nereus.errors import WorkerError
from nereus.plan import ACTOR_TRAINING
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import Worker
from nereus.shards.state import StateKind

P = ParamSpec("P")
T = TypeVar("T")


class FaultyPool(ThreadPool):
    """`faults[device, method]` runs once on the worker's thread before the method, or after it (`after move`)."""

    faults: dict[tuple[int, str], Callable[[Worker], None]]
    device_bytes: int | None = None
    """What transitions are planned for; the workers themselves are not limited."""
    dead: frozenset[int] = frozenset()
    """Workers that do nothing any more, until they are ended and started anew."""

    def stop(self, devices: Iterable[int]) -> None:
        ended = tuple(devices)
        self.dead -= frozenset(ended)
        super().stop(ended)

    def kill(self, device: int) -> Callable[[Worker], None]:
        """A fault that is the death of a worker, in what it is doing and for good."""

        def die(worker: Worker) -> None:
            self.dead |= {device}
            raise WorkerError(device, "a call", "the worker's process has died")

        return die

    @property
    def cluster(self) -> Cluster:
        cluster = super().cluster
        if self.device_bytes is None:
            return cluster
        devices = (dataclasses.replace(device, memory_bytes=self.device_bytes) for device in cluster.devices)
        return dataclasses.replace(cluster, devices=tuple(devices))

    def call(
        self, device: int, method: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        def run(worker: Worker, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if device in self.dead:
                raise WorkerError(device, method.__name__, "the worker's process has died")
            self.faults.pop((device, method.__name__), nothing)(worker)
            result = method(worker, *args, **kwargs)
            self.faults.pop((device, f"after {method.__name__}"), nothing)(worker)
            return result

        run.__name__ = method.__name__
        return super().call(device, run, *args, **kwargs)


def nothing(worker: Worker) -> None:
    pass


def fail(worker: Worker) -> None:
    raise RuntimeError("no memory")


def flip_a_moment(worker: Worker) -> None:
    """Change one element of what has just been received."""
    key = next(key for key in reversed(worker.residents.keys) if key.model_stage == ACTOR_TRAINING)
    worker.residents.buffer(key).flats[StateKind.EXP_AVG_SQ][5] += 1e-9

"""Workers as Ray actors, one process a device. The only importer of Ray.

    driver --actor call--> process of the worker --object--> future

Ray is started here with as many slots as the job wants workers, or joined where an address is given; what is joined
is left running. State never passes through Ray: workers move it among themselves.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

import nereus
from nereus.cluster import ACCELERATORS, Cluster, Device
from nereus.errors import ClusterError, NereusError, WorkerError
from nereus.runtime.base import Pool, WorkerSettings
from nereus.runtime.groups import StoreServer, serve_store
from nereus.runtime.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT = timedelta(seconds=120)


class _Actor:
    """The process of one worker."""

    def __init__(self, device: int, settings: WorkerSettings) -> None:
        self._worker = Worker(device, settings)

    def ready(self) -> str:
        """The address of the node it runs on."""
        return str(ray.util.get_node_ip_address())

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: tuple[Any, ...]) -> Any:
        """Call a method; `shared` holds the arguments that travelled as objects, in the order of their places."""
        values = iter(ray.get(list(shared)))
        full = [next(values) if isinstance(arg, _Place) else arg for arg in args]
        return getattr(self._worker, method)(*full, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """A value put into the object store once."""

    ref: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a shared value belongs among the arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class RaySettings:
    """How the Ray pool starts. `address` None: start a local Ray with `num_workers` slots."""

    num_workers: int
    timeout: timedelta
    address: str | None = None
    device: str = "cpu"
    memory_bytes: int | None = None
    cores_per_node: int | None = None


class RayPool(Pool):
    """Workers on a Ray cluster. Device ids are slots; the nodes of those not started yet are where they would go."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._store: StoreServer | None = None
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._started_ray = False

    def connect(self) -> None:
        """Start or join Ray; raises ClusterError where the cluster has fewer slots than the job wants."""
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._settings.address is None:
            ray.init(num_cpus=self._settings.num_workers, include_dashboard=False, **quiet)
            self._started_ray = True
        else:
            package = str(Path(nereus.__file__).parent)
            try:
                ray.init(
                    self._settings.address,
                    runtime_env={"py_modules": [package]},
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
            except ConnectionError as error:
                raise ClusterError(f"cluster.address {self._settings.address}: {error}") from None
        self._check_slots()

    def _check_slots(self) -> None:
        kind = "GPU" if self._settings.device == "cuda" else "CPU"
        available = {n["NodeManagerAddress"]: int(n["Resources"].get(kind, 0)) for n in ray.nodes() if n["Alive"]}
        if sum(available.values()) < self._settings.num_workers:
            per_node = ", ".join(f"{node}: {count}" for node, count in available.items())
            raise ClusterError(
                f"cluster.workers needs {self._settings.num_workers} devices; Ray has {sum(available.values())} {kind} "
                f"slots ({per_node})"
            )

    def check_shared(self, folder: Path) -> None:
        """On a joined cluster, raise ClusterError naming the nodes that do not see `folder`."""
        if self._settings.address is None:
            return
        mark = folder / ".seen-by-every-node"
        mark.touch()
        seen = ray.remote(num_cpus=0)(_exists)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
        answers = ray.get(
            [
                seen.options(scheduling_strategy=strategy(node, soft=False)).remote(str(mark.absolute()))
                for node in nodes
            ],
            timeout=START_TIMEOUT.total_seconds(),
        )
        mark.unlink()
        blind = [address for address, answer in zip(nodes.values(), answers, strict=True) if not answer]
        if blind:
            raise ClusterError(
                f"{folder.absolute()} is not seen by {', '.join(blind)}; name a folder that all nodes share"
            )

    def start(self, devices: Iterable[int]) -> None:
        self.connect()
        if self._store is None:
            self._store = serve_store(_own_address(self._settings), timeout=self._settings.timeout)
        settings = WorkerSettings(
            store=(self._store.host, self._store.port),
            timeout=self._settings.timeout,
            device=self._settings.device,
            memory_bytes=self._settings.memory_bytes,
        )
        new = [device for device in devices if device not in self._actors]
        for device in new:
            self._actors[device] = self._actor_class().remote(device, settings)
        try:
            nodes = ray.get([self._actors[d].ready.remote() for d in new], timeout=START_TIMEOUT.total_seconds())
        except (GetTimeoutError, RayActorError) as error:
            self.stop(new)
            raise ClusterError(
                f"{len(new)} workers did not start within {START_TIMEOUT.total_seconds():g} s: {error}"
            ) from None
        self._nodes |= dict(zip(new, nodes, strict=True))

    def _actor_class(self) -> Any:
        if self._settings.device == "cuda":
            return ray.remote(num_gpus=1, num_cpus=0, max_restarts=0)(_Actor)
        return ray.remote(num_cpus=1, max_restarts=0)(_Actor)

    def call(
        self, device: int, method: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        shared = [arg.ref for arg in args if isinstance(arg, _Shared)]
        places = tuple(_Place() if isinstance(arg, _Shared) else arg for arg in args)
        ref = self._actors[device].run.remote(method.__name__, places, kwargs, shared)
        return _translated(ref, device, method.__name__)

    def share(self, value: T) -> T:
        return _Shared(ray.put(value))  # type: ignore[return-value]

    def stop(self, devices: Iterable[int]) -> None:
        for device in list(devices):
            actor = self._actors.pop(device)
            self._nodes.pop(device, None)
            ray.kill(actor, no_restart=True)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._actors))

    @property
    def cluster(self) -> Cluster:
        accelerator = ACCELERATORS["cpu"]
        memory = self._settings.memory_bytes or accelerator.memory_bytes
        devices = tuple(
            Device(d, self._nodes.get(d, "node0"), accelerator.name, memory) for d in range(self._settings.num_workers)
        )
        return Cluster(devices, (accelerator,), self._settings.cores_per_node or os.cpu_count())

    def close(self) -> None:
        if self._actors:
            self.stop(self.devices)
        self._store = None
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


def _exists(path: str) -> bool:
    return Path(path).exists()


def _own_address(settings: RaySettings) -> str:
    return "127.0.0.1" if settings.address is None else str(ray.util.get_node_ip_address())


def _translated(ref: Any, device: int, task: str) -> Future[Any]:
    """Ray's future with its errors turned into ours."""
    result: Future[Any] = Future()

    def done(source: Future[Any]) -> None:
        error = source.exception()
        if error is None:
            result.set_result(source.result())
        elif isinstance(error, RayTaskError) and isinstance(error.cause, NereusError):
            result.set_exception(error.cause)
        else:
            cause = error.cause if isinstance(error, RayTaskError) else error
            result.set_exception(WorkerError(device, task, f"{type(cause).__name__}: {cause}"))

    ref.future().add_done_callback(done)
    return result

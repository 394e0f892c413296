"""Workers as Ray actors, one process a device. The only importer of Ray.

    driver --actor call--> process of the worker --object--> future

Ray is started here with as many slots as the job wants workers, or joined where an address is given; what is joined
is left running; its nodes may join and drain, which `RaySupply` tells. State never passes through Ray: workers move it
among themselves.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import ray.util.client
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import nereus
from nereus.cluster import ACCELERATORS, Accelerator, Cluster, cluster_of, similar_accelerator
from nereus.comm.groups import StoreServer, serve_store
from nereus.errors import ClusterError, NereusError, WorkerError
from nereus.plan import format_devices
from nereus.runtime.seam import Pool
from nereus.runtime.worker import Worker, WorkerSettings
from nereus.supply.slots import Node, Slot, SlotMap
from nereus.supply.supply import Supply, SupplyView

P = ParamSpec("P")
T = TypeVar("T")

ACCELERATOR_PREFIX = "accelerator_type:"
START_TIMEOUT = timedelta(seconds=120)
END_TIMEOUT = timedelta(seconds=2)
"""A worker told to end does so within this time, or it is stopped."""


class _Actor:
    """The process of one worker."""

    def __init__(self, device: int, settings: WorkerSettings) -> None:
        self._worker = Worker(device, settings)

    def ready(self) -> tuple[str, int]:
        """The address of the node it runs on and its process."""
        return str(ray.util.get_node_ip_address()), os.getpid()

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
    """How the Ray pool starts. `address` None: start a local Ray with `num_workers` slots.

    min_workers: how many slots there must be at the start (None: all); the others may come later.
    """

    num_workers: int
    timeout: timedelta
    address: str | None = None
    device: str = "cpu"
    memory_bytes: int | None = None
    cores_per_node: int | None = None
    min_workers: int | None = None


class RayPool(Pool):
    """Workers on a Ray cluster. Device ids count the slots of its nodes at the start, node after node."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._store: StoreServer | None = None
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._processes: dict[int, int] = {}
        self._calls: dict[Future[Any], tuple[int, str]] = {}
        self._slots: SlotMap | None = None
        self._connected = False

    def connect(self) -> None:
        """Start or join Ray; raises ClusterError where the cluster has fewer slots than the job wants."""
        if ray.is_initialized():
            return
        self._connected = True
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            self._init()
        except Exception as error:  # Ray raises plain Exceptions where its processes do not come up
            where = "" if self._settings.address is None else f" at cluster.address {self._settings.address}"
            raise ClusterError(f"Ray{where} cannot be used: {_first_line(error)}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)  # Ray has put its own there, which ends the process at once
        nodes = self._living_nodes()
        self._check_slots(nodes)
        self._slots = SlotMap(self._settings.num_workers, nodes)

    def _living_nodes(self) -> list[Node]:
        return living_nodes("GPU" if self._settings.device == "cuda" else "CPU")

    def supply(self) -> SupplyView:
        """What the cluster has for this job now; slots that have joined get their device ids here."""
        assert self._slots is not None, "the pool is not connected"
        self._slots.update(self._living_nodes(), self._actors)
        return self._slots.view(self._actors, now_s=time.time())

    def _init(self) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._settings.address is None:
            ray.init(
                "local",  # without an address Ray would join whatever cluster it finds on this machine
                num_cpus=self._settings.num_workers,
                include_dashboard=False,
                _system_config={"memory_monitor_refresh_ms": 0},  # it ends workers, whose state is nowhere else
                **quiet,
            )
        else:
            package = str(Path(nereus.__file__).parent)
            ray.init(self._settings.address, runtime_env={"py_modules": [package]}, **quiet)

    def _check_slots(self, nodes: Iterable[Node]) -> None:
        """Raise ClusterError where nodes that take workers have too few slots for the start."""
        kind = "GPU" if self._settings.device == "cuda" else "CPU"
        needed = self._settings.min_workers or self._settings.num_workers
        counts = [(node.address, node.num_slots) for node in nodes if not node.drains]
        available = sum(count for _, count in counts)
        if available < needed:
            per_node = ", ".join(f"{address}: {count}" for address, count in counts)
            raise ClusterError(
                f"cluster.workers: {needed} devices are needed, {available} {kind} slots are available ({per_node})"
            )

    def check_shared(self, path: Path) -> None:
        """On a joined cluster, raise ClusterError naming the nodes that do not see a file, or what is written in a
        folder."""
        if self._settings.address is None:
            return
        mark = path
        if path.is_dir():
            mark = path / f".seen-by-every-node-{uuid.uuid4().hex}"
            mark.touch()
        try:
            blind = self._blind_nodes(mark)
        finally:
            if mark != path:
                mark.unlink()
        if blind:
            raise ClusterError(
                f"{path.absolute()} is not seen by {', '.join(blind)}; name a place that all nodes share"
            )

    def _blind_nodes(self, mark: Path) -> list[str]:
        """Addresses of the nodes on which a file does not exist."""
        seen = ray.remote(num_cpus=0)(_exists)
        strategy = NodeAffinitySchedulingStrategy
        nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
        answers = ray.get(
            [
                seen.options(scheduling_strategy=strategy(node, soft=False)).remote(str(mark.absolute()))
                for node in nodes
            ],
            timeout=START_TIMEOUT.total_seconds(),
        )
        return [address for address, answer in zip(nodes.values(), answers, strict=True) if not answer]

    def start(self, devices: Iterable[int]) -> None:
        self.connect()
        new = [device for device in devices if device not in self._actors]
        if not new:
            return
        assert self._slots is not None
        if not self._slots.starts_on(new):
            raise ClusterError(f"device {format_devices(new)} has no node that takes a worker")
        if self._store is None:
            self._store = serve_store(_own_address(self._settings), timeout=self._settings.timeout)
        settings = WorkerSettings(
            store=(self._store.host, self._store.port),
            timeout=self._settings.timeout,
            device=self._settings.device,
            memory_bytes=self._settings.memory_bytes,
        )
        for device in new:
            place = NodeAffinitySchedulingStrategy(self._slots.slots[device].node_id, soft=False)
            self._actors[device] = self._actor_class().options(scheduling_strategy=place).remote(device, settings)
        try:
            places = ray.get([self._actors[d].ready.remote() for d in new], timeout=START_TIMEOUT.total_seconds())
        except RayError as error:
            self.stop(new)
            raise ClusterError(
                f"{len(new)} workers did not start within {START_TIMEOUT.total_seconds():g} s: {_first_line(error)}"
            ) from None
        for device, (node, process) in zip(new, places, strict=True):
            self._nodes[device], self._processes[device] = node, process

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
        result = _translated(ref, device, method.__name__)
        self._calls[result] = device, method.__name__
        result.add_done_callback(lambda future: self._calls.pop(future, None))
        return result

    def share(self, value: T) -> T:
        return _Shared(ray.put(value))  # type: ignore[return-value]

    def stop(self, devices: Iterable[int]) -> None:
        for device in list(devices):
            ray.kill(self._actors.pop(device), no_restart=True)
            node, process = self._nodes.pop(device, None), self._processes.pop(device, None)
            if process is not None and node == ray.util.get_node_ip_address():
                _wait_for_end(process)
            for call, (of, task) in list(self._calls.items()):
                if of == device:
                    _fail(call, WorkerError(device, task, "the worker was ended"))

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self._actors))

    @property
    def cluster(self) -> Cluster:
        """Before `connect` all devices are taken to be processor slots of one node."""
        unknown = Slot("node0", "", ACCELERATORS["cpu"])
        slots = self._slots.slots if self._slots else (unknown,) * self._settings.num_workers
        return _cluster_of(slots, self._settings.memory_bytes, self._settings.cores_per_node or os.cpu_count())

    def close(self) -> None:
        if self._actors:
            self.stop(self.devices)
        self._store = None
        if self._connected:
            ray.shutdown()
            self._connected = False


class RaySupply(Supply):
    """The devices of a joined cluster: those of living nodes; a node that drains is announced with its deadline."""

    def __init__(self, pool: RayPool) -> None:
        self._pool = pool

    def at(self, time_s: float) -> SupplyView:
        return self._pool.supply()


def living_nodes(kind: str) -> list[Node]:
    """The nodes of the joined cluster that have GPUs (`GPU`), or processor slots (`CPU`)."""
    through_client = ray.util.client.ray.is_connected()  # a client server does not tell which nodes drain
    draining = {} if through_client else ray._private.state.state.get_draining_nodes()  # Ray has no public name for it
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"][kind]),
            _accelerator(node["Resources"], kind),
            draining[node["NodeID"]] / 1000 if node["NodeID"] in draining else None,
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(kind, 0) >= 1
    ]


@functools.lru_cache(maxsize=4)
def _cluster_of(slots: tuple[Slot, ...], memory_bytes: int | None, cores_per_node: int | None) -> Cluster:
    """The same value as long as the slots are the same."""
    return cluster_of(((slot.node, slot.accelerator, memory_bytes) for slot in slots), cores_per_node=cores_per_node)


def print_slots(address: str) -> None:
    """Print what a running cluster has for a job, as a JSON line of `slots` or of the `error` that kept it from saying.

    slots: [node, type, processor cores of the node] of every GPU, or where no node has any, of every processor slot;
    nodes that drain are left out. For a process of its own: Ray waits for minutes where an address does not answer.
    """
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        nodes = [node for node in living_nodes("GPU") or living_nodes("CPU") if not node.drains]
        slots = [
            (node.slot.node, dataclasses.asdict(node.accelerator), node.num_slots)
            for node in nodes
            for _ in range(node.num_slots)
        ]
        print(json.dumps({"slots": slots}))
    except Exception as error:  # Ray raises plain Exceptions where it cannot be joined
        print(json.dumps({"error": _first_line(error)}))


def _accelerator(resources: Mapping[str, Any], kind: str) -> Accelerator:
    """What a node's slots are: Ray names its GPUs by a resource such as `accelerator_type:H100`."""
    if kind == "CPU":
        return ACCELERATORS["cpu"]
    names = [key.removeprefix(ACCELERATOR_PREFIX) for key in resources if key.startswith(ACCELERATOR_PREFIX)]
    if not names:
        raise ClusterError(
            "a node has GPUs of a type Ray does not know; start it with a resource accelerator_type:NAME"
        )
    return similar_accelerator(names[0])


def _exists(path: str) -> bool:
    return Path(path).exists()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _wait_for_end(process: int) -> None:
    """Return when a worker's process on this node is gone; one that is stopped, and so cannot end itself, is killed."""
    deadline = time.monotonic() + END_TIMEOUT.total_seconds()
    while Path(f"/proc/{process}/fd/0").is_symlink():
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            return
        time.sleep(0.005)


def _fail(call: Future[Any], error: WorkerError) -> None:
    """Give a call its error unless its answer has just come."""
    with contextlib.suppress(InvalidStateError):
        call.set_exception(error)


def _own_address(settings: RaySettings) -> str:
    return "127.0.0.1" if settings.address is None else str(ray.util.get_node_ip_address())


def _as_ours(error: BaseException, device: int, task: str) -> NereusError:
    """The worker's own error where it is one of ours, else what happened to the worker."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, NereusError):
            return cause
        return WorkerError(device, task, f"{type(cause).__name__}: {_first_line(cause)}")
    if isinstance(error, RayActorError):
        return WorkerError(device, task, "the worker's process has died")
    return WorkerError(device, task, f"{type(error).__name__}: {_first_line(error)}")


def _translated(ref: Any, device: int, task: str) -> Future[Any]:
    """Ray's future with its errors turned into ours."""
    result: Future[Any] = Future()

    def done(source: Future[Any]) -> None:
        error = source.exception()
        with contextlib.suppress(InvalidStateError):  # the worker was ended meanwhile
            if error is None:
                result.set_result(source.result())
            else:
                result.set_exception(_as_ours(error, device, task))

    ref.future().add_done_callback(done)
    return result

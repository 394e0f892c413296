"""Workers of a transition as threads of this process: the real `Residents`, groups and buffers, without engines."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

from nereus.comm.groups import Group, GroupSpec
from nereus.comm.store import KeyValueStore, connect_store, serve_store
from nereus.errors import GroupError, NereusError, WorkerError
from nereus.model import ModelSpec
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt, StageKinds
from nereus.moving.executor import Movers
from nereus.moving.resident import Residents
from nereus.plan import ModelStage, Plan
from nereus.shards.boxes import shards
from nereus.shards.state import Counters, RankState, StateKind, shard_view

T = TypeVar("T")
Point = tuple[int, str]
"""(device, method): where a fault is injected."""


@dataclasses.dataclass
class ThreadWorker:
    """One device: its residents, its own store client, its thread."""

    device: int
    residents: Residents
    store: KeyValueStore
    thread: ThreadPoolExecutor
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)


class ThreadMovers(Movers):
    """`num_devices` workers. `faults[device, method]` runs on the worker's thread before (or, named `after move`,
    after) the method; `delay_s` delays every call of every worker by up to so much. Workers in `dead` do nothing any
    more; every call of one is an error."""

    def __init__(self, num_devices: int, *, timeout_s: float = 30.0, delay_s: float = 0.0, seed: int = 0) -> None:
        self.server = serve_store()
        self.timeout = timedelta(seconds=timeout_s)
        self.faults: dict[Point, Callable[[ThreadWorker], None]] = {}
        self.dead: set[int] = set()
        self.workers = {d: self._worker(d) for d in range(num_devices)}
        self._delay_s, self._random = delay_s, random.Random(seed)

    def _worker(self, device: int) -> ThreadWorker:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"device {device}")
        store = connect_store(self.server.host, self.server.port, timeout=self.timeout)
        return ThreadWorker(device, Residents(device, torch.device("cpu")), store, thread)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.thread.shutdown()

    def prepare(self, orders: Mapping[int, DeviceOrder]) -> dict[int, Export | None]:
        return self._each("prepare", orders, lambda w, order: w.residents.prepare(order))

    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> dict[int, Receipt]:
        return self._each(
            "move",
            orders,
            lambda w, order: w.residents.move(order, exports, counters, store=w.store, timeout=self.timeout),
        )

    def digests(self, orders: Mapping[int, DeviceOrder]) -> dict[int, DeviceDigests]:
        return self._each("digests", orders, lambda w, order: w.residents.digests(order))

    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each("settle", keys, lambda w, of_device: w.residents.settle(of_device))

    def census(self) -> dict[int, tuple[BufferKey, ...]]:
        found: dict[int, tuple[BufferKey, ...]] = {}
        for device in self.workers:
            with contextlib.suppress(NereusError):
                found |= self._each("census", {device: None}, lambda w, _: w.residents.whole_keys)
        return found

    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        self._each("release", keys, lambda w, of_device: w.residents.release(of_device))

    def seat(self, epoch: int, plan: Plan) -> None:
        group = GroupSpec(f"e{epoch}", plan.devices)

        def join(worker: ThreadWorker, _: None) -> None:
            worker.residents.adopt(epoch, plan)
            worker.groups[epoch] = group.join(worker.store, worker.device, timeout=self.timeout)

        self._each("seat", dict.fromkeys(plan.devices), join)

    def retire(self, epoch: int) -> None:
        def leave(worker: ThreadWorker, _: None) -> None:
            group = worker.groups.pop(epoch, None)
            if group is not None:
                group.close()
            worker.residents.free(epoch)

        self._each("retire", dict.fromkeys(self.workers), leave)

    def _each(self, method: str, per_device: Mapping[int, T], call: Callable[[ThreadWorker, T], Any]) -> dict[int, Any]:
        def run(worker: ThreadWorker, argument: T, delay_s: float) -> Any:
            time.sleep(delay_s)
            try:
                if worker.device in self.dead:
                    raise WorkerError(worker.device, method, "died")
                self._inject(worker, method)
                result = call(worker, argument)
                self._inject(worker, f"after {method}")
                return result
            except NereusError:
                raise
            except Exception as error:
                raise WorkerError(worker.device, method, repr(error)) from error

        futures: dict[int, Future[Any]] = {}
        for device, argument in per_device.items():
            worker, delay_s = self.workers[device], self._random.uniform(0, self._delay_s)
            futures[device] = worker.thread.submit(run, worker, argument, delay_s)
        errors = [error for future in futures.values() if (error := future.exception(120)) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, GroupError)), errors[0])
        return {device: future.result() for device, future in futures.items()}

    def _inject(self, worker: ThreadWorker, point: str) -> None:
        fault = self.faults.pop((worker.device, point), None)
        if fault is not None:
            fault(worker)

    def fill(self, epoch: int, plan: Plan, states: Mapping[ModelStage, StageKinds]) -> None:
        """Allocate a plan and give every element its own value, equal over replicas; gaps stay zero."""
        for model_stage, stage_plan in plan.stages:
            if plan.holder(model_stage) != model_stage:
                continue
            state = states[model_stage]
            for device in stage_plan.devices:
                position = stage_plan.position(device)
                assert position is not None
                unit = self.workers[device].residents.allocate(
                    epoch, model_stage, state.spec, stage_plan.layout, position[1], dict(state.kinds)
                )
                unit.counters = Counters(updates=3, version=5)
                write(unit, whole_tensors(state, model_stage))
        self.seat(epoch, plan)

    def states(self, epoch: int, model_stage: ModelStage, plan: Plan) -> dict[int, RankState]:
        return {
            device: self.workers[device].residents.state(epoch, model_stage) for device in plan[model_stage].devices
        }

    @property
    def keys(self) -> dict[int, tuple[BufferKey, ...]]:
        return {device: worker.residents.keys for device, worker in self.workers.items()}

    @property
    def num_bytes(self) -> int:
        return sum(worker.residents.memory.num_bytes for worker in self.workers.values())


Whole = dict[tuple[str, StateKind], torch.Tensor]


def whole_tensors(state: StageKinds, model_stage: ModelStage) -> Whole:
    """A distinct random tensor for each parameter and kind of a model-stage."""
    generator = torch.Generator().manual_seed(hash(model_stage.name) % 1000 + state.spec.hidden)
    return {
        (param.name, kind): torch.randn(param.shape, generator=generator).to(dtype)
        for param in state.spec.params
        for kind, dtype in state.kinds
    }


def write(unit: RankState, whole: Whole) -> None:
    """Cut a rank's boxes out of whole tensors."""
    for shard in unit.shards:
        slices = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
        for kind, flat in unit.flats.items():
            shard_view(flat, shard).copy_(whole[shard.param.name, kind][slices])


def assert_holds(unit: RankState, state: StageKinds, model_stage: ModelStage) -> None:
    """A rank's buffers are bitwise what cutting the whole tensors gives, gaps zero, counters kept."""
    expected = RankState.allocate(
        state.spec, unit.layout, unit.rank, dtypes=dict(state.kinds), allocator=lambda n, t: torch.zeros(n, dtype=t)
    )
    write(expected, whole_tensors(state, model_stage))
    for kind, flat in expected.flats.items():
        assert torch.equal(flat, unit.flats[kind]), f"{model_stage} {kind} of rank {unit.rank} differs"
    assert unit.counters == Counters(updates=3, version=5)
    assert len(shards(state.spec, unit.layout, unit.rank)) == len(unit.shards)


def tiny_spec(**changes: Any) -> ModelSpec:
    """A model with odd sizes, grouped KV heads and q/k norms."""
    base = ModelSpec("qwen3", 3, 10, 6, 2, 3, 13, 11, qk_norm=True)
    return dataclasses.replace(base, **changes)

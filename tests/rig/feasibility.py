"""Plays a transition DAG buffer by buffer and refuses what it must not do. Pure, and slow on purpose.

It shares nothing with what builds DAGs: sizes come from `boxes.flat_numel`, devices run their operations one by one in
the global order, and every claim is checked at every operation:

- memory: what a device holds (co-resident units of all model-stages, scratch, new buffers) stays under its limit;
- sources: every rank of every unit that an operation reads is held, on the device or in host memory;
- life: no operation leaves a model-stage without a whole copy;
- end: every device holds exactly the buffers of the target plan.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping

from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage, Plan
from nereus.shards.boxes import flat_numel
from nereus.transition.operations import Infeasible, Operation, Primitive, TransitionDag
from nereus.transition.price import DeviceTable, StageState, readable_bytes

Buffer = tuple[ModelStage, Layout, int]
"""(model-stage, layout, rank): what one device holds of one model-stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class Feasible:
    """A transition that fits. `peak_bytes`: highest simulated use per device, co-resident state included."""

    peak_bytes: dict[int, int]


@functools.lru_cache(maxsize=4096)
def _flat_numel(spec: ModelSpec, layout: Layout, rank: int) -> int:
    return flat_numel(spec, layout, rank)


class Play:
    """The buffers on every device and in host memory while a DAG is played."""

    def __init__(
        self, plan: Plan, *, states: Mapping[ModelStage, StageState], table: DeviceTable, lost: frozenset[int]
    ) -> None:
        self.states = states
        self.table = table
        self.buffers: dict[int, list[Buffer]] = collections.defaultdict(list)
        self.in_host: dict[int, list[Buffer]] = collections.defaultdict(list)
        self.host_used: dict[int, int] = collections.defaultdict(int)
        for model_stage, stage_plan in plan.stages:
            if plan.holder(model_stage) == model_stage:
                for unit in stage_plan.units:
                    for rank, device in enumerate(unit):
                        if device not in lost:
                            self.buffers[device].append((model_stage, stage_plan.layout, rank))
        self.peak = {device: self.used(device) for device in self.buffers}

    def size(self, buffer: Buffer) -> int:
        model_stage, layout, rank = buffer
        state = self.states[model_stage]
        return _flat_numel(state.spec, layout, rank) * state.element_bytes

    def used(self, device: int) -> int:
        return sum(self.size(buffer) for buffer in self.buffers[device])

    def lives(self, model_stage: ModelStage) -> bool:
        """Whether some layout has every rank on a device or in host memory."""
        ranks: dict[Layout, set[int]] = collections.defaultdict(set)
        for place in (self.buffers, self.in_host):
            for buffers in place.values():
                for stage, layout, rank in buffers:
                    if stage == model_stage:
                        ranks[layout].add(rank)
        return any(len(found) == layout.num_ranks for layout, found in ranks.items())

    def run(self, operation: Operation) -> str | None:
        """Apply one operation; returns what forbids it, or None."""
        return self._read(operation) or self._acquire(operation) or self._free(operation)

    def _read(self, operation: Operation) -> str | None:
        if operation.primitive is Primitive.DESTROY:
            return None
        place = self.in_host if operation.primitive is Primitive.RELOAD else self.buffers
        for unit in operation.sources:
            for rank, device in enumerate(unit):
                if (operation.source_stage, operation.source_layout, rank) not in place[device]:
                    return f"device {device} does not hold rank {rank} of {operation.source_layout} to read"
        return None

    def _acquire(self, operation: Operation) -> str | None:
        if operation.primitive is Primitive.OFFLOAD:
            return self._offload(operation)
        for device, rank in operation.target_ranks().items():
            buffer = (operation.model_stage, operation.target_layout, rank)
            if buffer in self.buffers[device]:
                return f"device {device} holds rank {rank} of {operation.target_layout} already"
            self.buffers[device].append(buffer)
            used = self.used(device)
            self.peak[device] = max(self.peak.get(device, 0), used)
            limit = int(self.table.limit_bytes[device])
            if used > limit:
                return f"device {device} needs {readable_bytes(used)} of {readable_bytes(limit)}"
        return None

    def _offload(self, operation: Operation) -> str | None:
        for device, rank in operation.source_ranks().items():
            buffer, node = (operation.model_stage, operation.source_layout, rank), int(self.table.node[device])
            self.in_host[device].append(buffer)
            self.host_used[node] += self.size(buffer)
            if self.host_used[node] > self.table.host_bytes[node]:
                return f"the host memory of device {device} does not hold {operation.model_stage}"
        return None

    def _free(self, operation: Operation) -> str | None:
        ranks = operation.source_ranks()
        for device in operation.releases:
            buffer = (operation.source_stage, operation.source_layout, ranks[device])
            if buffer not in self.buffers[device]:
                return f"device {device} does not hold rank {ranks[device]} of {operation.source_layout} to free"
            self.buffers[device].remove(buffer)
        if operation.primitive is Primitive.RELOAD:
            for device, rank in ranks.items():
                buffer = (operation.source_stage, operation.source_layout, rank)
                self.in_host[device].remove(buffer)
                self.host_used[int(self.table.node[device])] -= self.size(buffer)
        return None


def check_feasible(
    dag: TransitionDag,
    *,
    states: Mapping[ModelStage, StageState],
    table: DeviceTable,
    lost: Iterable[int] = (),
) -> Feasible | Infeasible:
    """Play the DAG; the peak of every device, or the first operation that must not run and why."""
    dead = frozenset(lost)
    play = Play(dag.current, states=states, table=table, lost=dead)
    for operation in dag.operations:
        problem = play.run(operation)
        if problem is None and not lives_somewhere(play, dag, operation.model_stage):
            problem = f"no whole copy of {operation.model_stage} is left"
        if problem is not None:
            return Infeasible(f"{operation.name}: {problem}")
    expected = Play(dag.target, states=states, table=table, lost=frozenset())
    for device in expected.buffers.keys() | play.buffers.keys():
        if device not in dead and sorted(play.buffers[device]) != sorted(expected.buffers[device]):
            return Infeasible(f"device {device} ends with {play.buffers[device]}, not {expected.buffers[device]}")
    return Feasible(play.peak)


def lives_somewhere(play: Play, dag: TransitionDag, model_stage: ModelStage) -> bool:
    """Whether a whole copy lives, in training's units where the target plan uses those in place."""
    holder = dag.target.holder(model_stage)
    return play.lives(model_stage) or (holder != model_stage and play.lives(holder))

"""Per-component migration: every model-stage moves itself and nobody orders them. The global DAG is compared with it.

    chain of model-stage A:  Destroy surplus -> build unit by unit -> Destroy the rest     one thread each,
    chain of model-stage B:  Destroy surplus -> build unit by unit -> Destroy the rest     started when launched
                                                   |
                             waits for room on its devices, keeping what it has meanwhile

Each chain is the best it can be alone: it frees replicas it does not read before it asks for anything, moves straight
from layout to layout, is woken the instant memory is freed, and frees each buffer as soon as its own state allows.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from nereus.moving.commands import BufferKey, MoveOrder, StageKinds
from nereus.moving.executor import Movers, run_move
from nereus.plan import ModelStage, Plan, StagePlan
from nereus.shards.boxes import flat_numel
from nereus.shards.moves import Holding
from nereus.transition.operations import Operation, Primitive, Unit

__all__ = ["IndependentMigration", "Outcome", "Room", "buffer_bytes", "local_chain"]


def local_chain(model_stage: ModelStage, current: StagePlan, target: StagePlan) -> tuple[Operation, ...]:
    """The operations of one model-stage, which follow each other.

    A buffer is kept where a device holds the same rank of the same layout before and after. The unit that has most
    devices in common with the target is read; the others go first.
    """
    kept = _buffers(current) & _buffers(target)
    source = max(current.units, key=lambda unit: (_num_kept(unit, kept), len({*unit} & {*target.devices})))
    surplus = tuple(unit for unit in current.units if unit != source)
    layout = current.layout
    operations: list[Operation] = []

    def destroy(units: tuple[Unit, ...]) -> None:
        freed = tuple(d for unit in units for rank, d in enumerate(unit) if (layout, rank, d) not in kept)
        losing = tuple(unit for unit in units if not set(freed).isdisjoint(unit))
        if freed:
            operations.append(
                Operation(
                    len(operations), Primitive.DESTROY, model_stage, model_stage, layout, losing, layout, (),
                    releases=freed,
                )
            )  # fmt: skip

    destroy(surplus)
    primitive = Primitive.EXTEND if layout == target.layout else Primitive.RESHARD
    for unit in target.units:
        new = tuple(d for rank, d in enumerate(unit) if (target.layout, rank, d) not in kept)
        if new:
            operations.append(
                Operation(
                    len(operations), primitive, model_stage, model_stage, layout, (source,), target.layout, (unit,),
                    acquires=new,
                )
            )  # fmt: skip
    destroy((source,))
    return tuple(operations)


def _buffers(plan: StagePlan) -> set[tuple[object, int, int]]:
    return {(plan.layout, rank, device) for unit in plan.units for rank, device in enumerate(unit)}


def _num_kept(unit: Unit, kept: set[tuple[object, int, int]]) -> int:
    return sum(device in unit for _, _, device in kept)


def buffer_bytes(state: StageKinds, key: BufferKey) -> int:
    """What one device holds for one rank of a layout."""
    return flat_numel(state.spec, key.layout, key.rank) * state.element_bytes


class Room:
    """Free bytes of every device, and who waits for some.

    Nobody but the chains frees memory. So when every chain that has not ended waits, none ever goes on: `stuck`.
    waiting: how many chains do.
    """

    def __init__(self, free_bytes: Mapping[int, int], *, num_chains: int) -> None:
        self._free = dict(free_bytes)
        self._changed = threading.Condition()
        self._running, self._num_releases = num_chains, 0
        self.waiting, self.stuck = 0, False

    def acquire(self, needs: Mapping[int, int], *, deadline_s: float) -> bool:
        """Take what each device must give, as soon as it has it; False where that never comes or is late.

        deadline_s: on the monotonic clock.
        """
        left = dict(needs)
        with self._changed:
            while True:
                for device in [device for device, nbytes in left.items() if nbytes <= self._free[device]]:
                    self._free[device] -= left.pop(device)
                if not left:
                    return True
                if not self._wait(deadline_s):
                    return False

    def _wait(self, deadline_s: float) -> bool:
        """Until some memory is freed; False where nobody is left who could free some, or the deadline has passed."""
        self.waiting += 1
        self._note_stuck()
        num_releases = self._num_releases
        woken = not self.stuck and self._changed.wait(max(deadline_s - time.monotonic(), 0))
        if num_releases == self._num_releases:
            self.waiting -= 1
        return woken and not self.stuck

    def release(self, freed: Mapping[int, int]) -> None:
        """Give memory back."""
        with self._changed:
            for device, nbytes in freed.items():
                self._free[device] += nbytes
            self.waiting = 0  # each looks again, and waits again if that is not enough
            self._num_releases += 1
            self._changed.notify_all()

    def leave(self) -> None:
        """A chain has ended."""
        with self._changed:
            self._running -= 1
            self._note_stuck()

    def _note_stuck(self) -> None:
        if self._running and self.waiting == self._running:
            self.stuck = True
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a migration ended. stuck: every chain that had not ended waited for memory that another held."""

    succeeded: bool
    stuck: bool
    seconds: float


class IndependentMigration:
    """Moves a job from one plan to another, each model-stage on its own.

    limit_bytes: what every device may hold. epoch: of the target plan. launch_s: when each chain starts.
    """

    def __init__(
        self,
        movers: Movers,
        current: Plan,
        target: Plan,
        *,
        states: Mapping[ModelStage, StageKinds],
        limit_bytes: int,
        epoch: int,
        launch_s: Mapping[ModelStage, float],
        timeout_s: float,
    ) -> None:
        self._movers, self._current, self._target, self._states = movers, current, target, states
        self._limit_bytes, self._epoch = limit_bytes, epoch
        self._launch_s, self._timeout_s = launch_s, timeout_s

    def run(self) -> Outcome:
        """Start every chain at its time and wait for all; then, if all came through, the target plan is in force."""
        begun = time.monotonic()
        stages = self._target.model_stages
        room = Room(self._free_bytes(), num_chains=len(stages))
        with ThreadPoolExecutor(max_workers=len(stages)) as threads:
            ended = [threads.submit(self._chain, model_stage, room, begun) for model_stage in stages]
            succeeded = all([future.result() for future in ended])
        if succeeded:
            self._movers.seat(self._epoch, self._target)
            self._movers.retire(self._epoch - 1)
        return Outcome(succeeded, room.stuck, time.monotonic() - begun)

    def _free_bytes(self) -> dict[int, int]:
        free = dict.fromkeys({*self._current.devices, *self._target.devices}, self._limit_bytes)
        for model_stage, stage_plan in self._current.stages:
            for device, rank in Holding.of(stage_plan).ranks:
                key = BufferKey(model_stage, stage_plan.layout, rank)
                free[device] -= buffer_bytes(self._states[model_stage], key)
        return free

    def _chain(self, model_stage: ModelStage, room: Room, begun: float) -> bool:
        try:
            time.sleep(max(begun + self._launch_s[model_stage] - time.monotonic(), 0))
            for operation in local_chain(model_stage, self._current[model_stage], self._target[model_stage]):
                if not self._run(operation, room, deadline_s=begun + self._timeout_s):
                    return False
            return True
        finally:
            room.leave()

    def _run(self, operation: Operation, room: Room, *, deadline_s: float) -> bool:
        """One operation; False where it never got its memory."""
        stage, state = operation.model_stage, self._states[operation.model_stage]
        if operation.acquires:
            keys = {d: BufferKey(stage, operation.target_layout, rank) for d, rank in operation.target_ranks().items()}
            if not room.acquire({d: buffer_bytes(state, key) for d, key in keys.items()}, deadline_s=deadline_s):
                return False
            run_move(self._movers, self._order(operation))
        if operation.releases:
            ranks = operation.source_ranks()
            freed = {d: BufferKey(stage, operation.source_layout, ranks[d]) for d in operation.releases}
            self._movers.release({device: (key,) for device, key in freed.items()})
            room.release({device: buffer_bytes(state, key) for device, key in freed.items()})
        return True

    def _order(self, operation: Operation) -> MoveOrder:
        stage = operation.model_stage
        source = Holding.by_device(operation.source_layout, operation.source_ranks())
        target = Holding.by_device(operation.target_layout, operation.target_ranks())
        key = f"e{self._epoch}/{operation.name}"
        return MoveOrder.plan(key, self._states[stage], stage, source, stage, target)

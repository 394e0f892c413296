"""Carries out a transition: stage every operation, verify, vote, commit or abort.

    operations of the DAG --prepare, move, digests--> staged buffers
                                                         | every digest equal, every rank seated
                                                         v
                                                      COMMIT POINT  (one call in the driver)
                                                         |
    Destroys <-------------------------------------------+

Before the commit point any error aborts: the old plan is whole (shadow) or refilled (in place, from any copy that
lives, on devices or in host memory), and nothing of the new epoch is left. After it an error is the loss of a
worker under the new plan, never a return to the old one. Where the plan in force is not whole in the end, because a
worker went with its state or a refill failed, PlanBroken says which units are; whatever else lives is kept until then.

Operations that share a device run one after the other in the order of the DAG, others at once. Where the workers live
is not known here: `Movers` is all there is of them.
"""

import abc
import concurrent.futures
import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from nereus.engine_facts import BUCKET_BYTES
from nereus.errors import NereusError, TransitionAborted
from nereus.moving.commands import (
    BufferKey,
    DeviceDigests,
    DeviceOrder,
    Export,
    MoveOrder,
    Receipt,
    StageKinds,
)
from nereus.moving.ledger import Keys, Ledger, built_by, freed_by
from nereus.moving.verify import Digests, first_difference
from nereus.moving.way_back import Recovery, Refill
from nereus.plan import ModelStage, Plan
from nereus.shards.moves import Holding, lower_bound_numel
from nereus.shards.state import Counters
from nereus.transition.operations import Mode, Operation, Primitive, TransitionDag, TransitionReport
from nereus.transition.price import DeviceTable, readable_bytes
from nereus.transition.remains import PlanBroken, Remains

__all__ = ["Execution", "MoveReport", "Movers", "OperationEnd", "Phase", "run_move", "survey"]


class Movers(abc.ABC):
    """What a transition asks of the workers.

    Every method calls all named devices at once and returns when all have answered; it raises the first error of a
    worker (a NereusError) after the others have ended or their time is up. `Residents` has the method behind each.
    """

    @abc.abstractmethod
    def prepare(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, Export | None]:
        """Allocate targets and export sources, by device."""

    @abc.abstractmethod
    def move(
        self, orders: Mapping[int, DeviceOrder], exports: Mapping[int, Export], counters: Counters
    ) -> Mapping[int, Receipt]:
        """Fill targets. Each device needs the exports of the sources of its incoming moves."""

    @abc.abstractmethod
    def digests(self, orders: Mapping[int, DeviceOrder]) -> Mapping[int, DeviceDigests]:
        """Digests of what each device sent and received."""

    @abc.abstractmethod
    def settle(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        """Say which filled buffers have been verified, by device; until then they are torn and nothing uses them."""

    @abc.abstractmethod
    def census(self) -> Mapping[int, tuple[BufferKey, ...]]:
        """The buffers that are not torn, of every worker that answers. One that does not is left out: it is lost."""

    @abc.abstractmethod
    def release(self, keys: Mapping[int, tuple[BufferKey, ...]]) -> None:
        """Free buffers by device."""

    @abc.abstractmethod
    def seat(self, epoch: int, plan: Plan) -> None:
        """On every device of the plan: adopt the buffers, join the groups of the epoch. The ranks' vote."""

    @abc.abstractmethod
    def retire(self, epoch: int) -> None:
        """On every device that lives: leave an epoch's groups, free what no other epoch names."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoveReport:
    """What one move did. seconds: from the first call to the last buffer filled; verify_s: digests, apart."""

    bytes_moved: int
    bytes_shared: int
    bytes_group: int
    seconds: float
    verify_s: float
    peak_extra_bytes: int


def run_move(movers: Movers, order: MoveOrder, *, verify: bool = True) -> MoveReport:
    """Carry out one move and check it; raises TransitionAborted where a digest differs or the sources disagree."""
    parts, begun = order.per_device(), time.monotonic()
    exports = {device: export for device, export in movers.prepare(parts).items() if export is not None}
    counters = _agreed_counters(order.key, exports)
    receipts = movers.move(parts, exports, counters)
    moved_s = time.monotonic() - begun
    if missing := sorted(set(parts) - set(receipts)):
        raise TransitionAborted(order.key, f"devices {missing} did not report what they moved")
    if verify:
        _verify(order, movers.digests(parts))
    movers.settle({device: (part.target,) for device, part in parts.items() if part.target is not None})
    return MoveReport(
        bytes_moved=order.bytes_moved,
        bytes_shared=sum(receipt.bytes_shared for receipt in receipts.values()),
        bytes_group=sum(receipt.bytes_group for receipt in receipts.values()),
        seconds=moved_s,
        verify_s=time.monotonic() - begun - moved_s,
        peak_extra_bytes=max((receipt.peak_extra_bytes for receipt in receipts.values()), default=0),
    )


def _agreed_counters(key: str, exports: Mapping[int, Export]) -> Counters:
    """The counters all sources have; replicas that differ must not be mixed."""
    found = {export.counters for export in exports.values()}
    if len(found) != 1:
        raise TransitionAborted(key, f"the sources disagree on their counters: {sorted(map(str, found))}")
    return found.pop()


def _verify(order: MoveOrder, digests: Mapping[int, DeviceDigests]) -> None:
    """Every planned piece was hashed on both ends, with equal results."""
    sent: Digests = {}
    received: Digests = {}
    for of_device in digests.values():
        sent |= of_device.sent
        received |= of_device.received
    kept = order.moves.kept if order.reuses_buffers or not order.allocates else frozenset()
    planned = [*order.moves.remote, *(move for move in order.moves.local if move.target not in kept)]
    for move in planned:
        for kind, _ in order.state.kinds:
            if (move.source, move.target, kind) not in received:
                raise TransitionAborted(order.key, f"{kind} from {move.source} to {move.target} did not arrive")
    if problem := first_difference(sent, received):
        raise TransitionAborted(order.key, problem)


def survey(
    movers: Movers, ledger: Ledger, *, devices: Collection[int], problems: Iterable[NereusError] = ()
) -> Remains:
    """What is left of a ledger's plan, by what those workers of `devices` that answer say they hold."""
    census = movers.census()
    ledger.trust(census)
    return ledger.remains(lost=set(devices).difference(census), problems=map(str, problems))


@contextlib.contextmanager
def _named(operation: str) -> Iterator[None]:
    """Any failure of a worker inside is the failure of the operation."""
    try:
        yield
    except TransitionAborted as error:
        raise TransitionAborted(operation, error.problem) from error
    except NereusError as error:
        raise TransitionAborted(operation, str(error)) from error


@dataclasses.dataclass(frozen=True, slots=True)
class OperationEnd:
    """An operation of a transition has ended, as number `done` of `total`. bytes_moved: between devices."""

    name: str
    seconds: float
    bytes_moved: int
    done: int
    total: int

    def __str__(self) -> str:
        return f"moving: {self.name} took {self.seconds:.2f} s, {readable_bytes(self.bytes_moved)}"


HOST = (Primitive.OFFLOAD, Primitive.RELOAD)

REFILL_TRIES = 2
"""How often the way back goes through what is not whole: one error in it may be as passing as the one before it."""


class Phase(enum.Enum):
    """STAGING -> COMMITTED -> DONE, or STAGING -> ABORTED."""

    STAGING = "staging"
    COMMITTED = "committed"
    DONE = "done"
    ABORTED = "aborted"


class Execution:
    """One transition. `run` is called once; afterwards `phase` and `ledger` say what stands.

    problems: what failed on the way back or after the commit. unretired: epochs of which workers may hold something.
    """

    def __init__(
        self,
        dag: TransitionDag,
        movers: Movers,
        *,
        states: Mapping[ModelStage, StageKinds],
        epoch: int,
        current_epoch: int | None = None,
        node_of: Callable[[int], str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        verify: bool = True,
        table: DeviceTable | None = None,
        on_operation: Callable[[OperationEnd], None] | None = None,
    ) -> None:
        """epoch: of the target plan; current_epoch: of the plan in force, the one before if not given.

        table: what devices and host memory can hold, for the way back after an abort; without it all is taken to fit.
        on_operation: told of every operation as it ends, from the thread that called `run`.
        """
        self.dag, self.phase = dag, Phase.STAGING
        self.ledger = Ledger(dag.current)
        self._movers, self._states, self._epoch = movers, states, epoch
        self._current_epoch = epoch - 1 if current_epoch is None else current_epoch
        self._node_of, self._bucket_bytes, self._verify = node_of, bucket_bytes, verify
        self._table, self._on_operation = table, on_operation
        self._num_ended = 0
        self.problems: list[NereusError] = []
        self.unretired: set[int] = set()
        self._lost: frozenset[int] = frozenset()
        self._reports: dict[int, MoveReport] = {}

    def run(self, commit: Callable[[], None]) -> TransitionReport:
        """Move the job to the target plan. `commit` is the commit point: it makes the target the plan in force.

        Raises TransitionAborted before it where the old plan is whole, and PlanBroken where the plan in force, the old
        one before it and the target after it, is not.
        """
        begun = time.monotonic()
        staged = self.dag.operations[: self.dag.num_staged]
        try:
            self._run_all(staged)
            with _named(f"seat epoch {self._epoch}"):
                self._movers.seat(self._epoch, self.dag.target)
        except TransitionAborted as error:
            remains = self._abort()
            if not remains.is_whole:
                raise PlanBroken(error.operation, error.problem, remains) from error
            raise
        commit()
        self.phase = Phase.COMMITTED
        self._let_old_go()
        if self.problems:
            self._check_target()
        self.phase = Phase.DONE
        return self._report(time.monotonic() - begun)

    def _let_old_go(self) -> None:
        """Free what only the old plan names. An error leaves something over, and nothing of the new plan undone."""
        for operation in self.dag.operations[self.dag.num_staged :]:
            released = time.monotonic()
            with self._noted():
                self._release(operation)
            self._ended(operation, time.monotonic() - released)
        self._retire(self._current_epoch)

    def _check_target(self) -> None:
        """Raise PlanBroken where a worker has gone with a part of the new plan."""
        ledger = Ledger(self.dag.target)
        remains = self._remains(ledger)
        if not remains.is_whole:
            raise PlanBroken(f"release epoch {self._current_epoch}", str(self.problems[0]), remains)

    def _run_all(self, operations: tuple[Operation, ...]) -> None:
        """Start each operation when what it waits for has ended; after an error start no more and wait for the rest."""
        waits = {operation.id: self._predecessors(operation, operations) for operation in operations}
        by_id = {operation.id: operation for operation in operations}
        ended: set[int] = set()
        running: dict[concurrent.futures.Future[float], int] = {}
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(len(operations), 1)) as threads:
            while len(ended) < len(operations):
                for operation in operations:
                    if operation.id not in ended and operation.id not in running.values():
                        if waits[operation.id] <= ended:
                            running[threads.submit(self._run_one, operation)] = operation.id
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    ended.add(running[future])
                    self._ended(by_id[running.pop(future)], future.result())

    def _ended(self, operation: Operation, seconds: float) -> None:
        self._num_ended += 1
        if self._on_operation is not None:
            report = self._reports.get(operation.id)
            moved, total = report.bytes_moved if report else 0, len(self.dag.operations)
            self._on_operation(OperationEnd(operation.name, seconds, moved, self._num_ended, total))

    def _predecessors(self, operation: Operation, operations: tuple[Operation, ...]) -> set[int]:
        """Operations it waits for by an edge, or because they come first and share a device or both use host memory."""
        staged = {other.id for other in operations}
        earlier = operations[: operations.index(operation)]
        shared = {other.id for other in earlier if not other.devices.isdisjoint(operation.devices)}
        if operation.primitive in HOST:
            shared |= {other.id for other in earlier if other.primitive in HOST}
        return shared | (set(self.dag.after(operation.id)) & staged)

    def _run_one(self, operation: Operation) -> float:
        """Carry out one operation; returns its seconds."""
        begun = time.monotonic()
        with _named(operation.name):
            if built_by(operation):
                order = self.order_of(operation)
                self._reports[operation.id] = run_move(self._movers, order, verify=self._verify)
                self.ledger.acquired(operation)
            self._release(operation)
        return time.monotonic() - begun

    def order_of(self, operation: Operation) -> MoveOrder:
        """The move that an operation stands for."""
        source = Holding.by_device(operation.source_layout, operation.source_ranks())
        target = Holding.by_device(operation.target_layout, {d: key.rank for d, key in built_by(operation).items()})
        return MoveOrder.plan(
            f"e{self._epoch}/{operation.name}", self._states[operation.model_stage], operation.source_stage,
            source, operation.model_stage, target, node_of=self._node_of, bucket_bytes=self._bucket_bytes,
            source_in_host=operation.primitive is Primitive.RELOAD,
            target_in_host=operation.primitive is Primitive.OFFLOAD,
        )  # fmt: skip

    def _release(self, operation: Operation) -> None:
        keys = self.ledger.released(operation) if freed_by(operation) else {}
        if keys:
            self._movers.release(keys)

    def _abort(self) -> Remains:
        """Back to the old plan: refill what in-place Destroys took, then drop everything else if it is whole again."""
        self.phase = Phase.ABORTED
        remains = self._remains(self.ledger)
        if self.dag.mode is Mode.IN_PLACE:
            self._drop(self._strays())
            for attempt in range(REFILL_TRIES):
                recovery = Recovery(self.ledger, states=self._states, table=self._table, lost=self._lost)
                for number, refill in enumerate(recovery.refills()):
                    self._refill(f"e{self._epoch}/refill{attempt}.{number}", refill)
                remains = self._remains(self.ledger)
                if remains.is_whole:
                    break
        if remains.is_whole:
            self._retire(self._epoch)
        else:
            self.unretired.add(self._epoch)
        return remains

    def _remains(self, ledger: Ledger) -> Remains:
        devices = {*self.dag.current.devices, *self.dag.target.devices}
        found = survey(self._movers, ledger, devices=devices, problems=self.problems)
        self._lost = found.lost
        return found

    def _retire(self, epoch: int) -> None:
        before = len(self.problems)
        with self._noted():
            self._movers.retire(epoch)
        if len(self.problems) > before:
            self.unretired.add(epoch)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """An error of a worker inside is kept, and the next thing is done."""
        try:
            yield
        except NereusError as error:
            self.problems.append(error)

    def _strays(self) -> Keys:
        """What operations that did not end may have left: buffers half built, or struck out and not yet freed."""
        found: dict[int, dict[BufferKey, None]] = {}
        for operation in self.dag.operations:
            for device, key in (*built_by(operation).items(), *freed_by(operation).items()):
                if not self.ledger.lives(device, key):
                    found.setdefault(device, {})[key] = None
        return {device: tuple(keys) for device, keys in found.items()}

    def _drop(self, keys: Keys) -> None:
        """Free buffers for good; a worker that is lost has none."""
        with self._noted():
            self._movers.release({device: of for device, of in keys.items() if device not in self._lost})

    def _refill(self, key: str, refill: Refill) -> None:
        """One move of the way back. Where a worker is lost the ledger keeps saying which units are not whole."""
        order = MoveOrder.plan(
            key, self._states[refill.model_stage], refill.model_stage, refill.source, refill.model_stage,
            refill.target, node_of=self._node_of, bucket_bytes=self._bucket_bytes,
            source_in_host=refill.source_in_host, target_in_host=refill.target_in_host,
        )  # fmt: skip
        self._drop(refill.drops)
        try:
            run_move(self._movers, order)
        except NereusError as error:
            self.problems.append(error)
            return
        self.ledger.enter(refill.built)

    def _report(self, seconds: float) -> TransitionReport:
        reports = self._reports.values()
        return TransitionReport(
            operations=tuple(str(operation) for operation in self.dag.operations),
            mode=self.dag.mode.value,
            bytes_moved=sum(report.bytes_moved for report in reports),
            bytes_lower_bound=self.bytes_lower_bound,
            seconds=seconds,
            verified=self._verify,
        )

    @property
    def bytes_lower_bound(self) -> int:
        """What any way of moving must send: for each target buffer what its device lacks of the source plan."""
        builders: dict[ModelStage, Operation] = {}
        for operation in self.dag.operations:
            if operation.acquires:
                builders.setdefault(operation.model_stage, operation)
        return sum(
            lower_bound_numel(
                self._states[stage].spec,
                Holding.of(self.dag.current[first.source_stage]),
                Holding.of(self.dag.target[stage]),
            )
            * self._states[stage].element_bytes
            for stage, first in builders.items()
        )

"""The two seams of execution: what the controller drives (`Runtime`) and where workers live (`Pool`).

    controller --> Runtime: one RL step, one transition --> Pool: calls to workers, one a device
                   (live job, simulator)                    (Ray actors, threads of one process)

Neither names the other's implementation. Values that cross them are frozen.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from nereus.cluster import Cluster
from nereus.errors import GroupError, UpdateAborted, WorkerError
from nereus.plan import ModelStage, Plan
from nereus.planner.workload import LengthSummary
from nereus.transition.judged import Transition
from nereus.transition.operations import TransitionReport

if TYPE_CHECKING:
    from nereus.runtime.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What one RL step did.

    metrics: verl's names; task_s: seconds of each model-stage; lengths: of the step's batch; sync_s and sync_bytes:
    weight synchronization.
    reward_problem: what came of the first reward call that failed or was late, where one was.
    operations: {class: (work, seconds)} as observed; peak_bytes: by device; engine_bytes: by device, what engines hold
    beside the state when the step has ended.
    """

    step: int
    plan_epoch: int
    metrics: Mapping[str, float]
    step_s: float
    task_s: Mapping[ModelStage, float]
    lengths: LengthSummary
    sync_s: float = 0.0
    sync_bytes: int = 0
    reward_problem: str | None = None
    operations: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    peak_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    engine_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Runtime(abc.ABC):
    """A job that can run a step and change its plan between two steps.

    `run_step` returns with every update of the step committed; `transition` carries out the very value that was judged
    and returns with the whole job on its target plan, or raises TransitionAborted with the job whole on the old one.
    Where a worker has gone with a part of the plan in force or the way back failed it raises PlanBroken; then nothing
    but `fall_back` or `resume` may follow. None is called while another runs.
    """

    @property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The plan in force; changes only inside `transition`."""

    @property
    @abc.abstractmethod
    def cluster(self) -> Cluster:
        """The devices that can be used at the next boundary."""

    @abc.abstractmethod
    def run_step(self, step: int) -> StepReport:
        """Run RL step `step` (from 1). Called again for the same step after an error, goes on where that stopped."""

    @abc.abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Held-out metrics of the policy as it is; empty where there is nothing to evaluate."""

    @abc.abstractmethod
    def transition(self, transition: Transition) -> TransitionReport:
        """Move the live state from the plan in force to the target of a transition that starts from it."""

    @abc.abstractmethod
    def fall_back(self, plan: Plan, *, lost: Collection[int]) -> None:
        """Go on with what is left: every buffer of `plan` lives, so no state moves. lost: devices to be given up.

        Raises PlanBroken where yet more is lost meanwhile.
        """

    @property
    @abc.abstractmethod
    def saved_step(self) -> int | None:
        """The step after which this run last saved its state; None where it never has."""

    @abc.abstractmethod
    def suspend(self, step: int) -> None:
        """Save the trained state as it is after `step` and give every device back."""

    @abc.abstractmethod
    def resume(self, plan: Plan) -> None:
        """Go on from the last `suspend`, on `plan`; whatever workers hold now is given up."""

    @abc.abstractmethod
    def close(self) -> None:
        """End everything this runtime started; may be called twice."""


class Pool(abc.ABC):
    """Workers, one a device, and calls to them.

    Calls to one worker run in the order they were made, one at a time; calls to different workers at once. A future
    raises WorkerError naming device and task where the worker raised, was late or died; an InputError or
    TransitionAborted raised by the worker comes through as it is.
    """

    @abc.abstractmethod
    def start(self, devices: Iterable[int]) -> None:
        """Start a worker for each device that has none; returns when all of them answer."""

    @abc.abstractmethod
    def call(
        self, device: int, method: "Callable[Concatenate[Worker, P], T]", *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call a method of one worker."""

    @abc.abstractmethod
    def share(self, value: T) -> T:
        """A stand-in for `value` that may be passed to several calls and is sent once a node."""

    @abc.abstractmethod
    def stop(self, devices: Iterable[int]) -> None:
        """End these workers; their memory is gone when this returns."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple[int, ...]:
        """Devices that have a worker, ascending."""

    @property
    @abc.abstractmethod
    def cluster(self) -> Cluster:
        """Devices that have or could have a worker."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers and whatever was started for them; may be called twice."""


def gather(
    calls: Mapping[int, Future[T]], task: str, *, timeout: timedelta, grace: timedelta | None = None
) -> dict[int, T]:
    """Results by device of calls that ran at once; the first error is raised once the others have ended.

    A call that has not ended within `timeout`, or where `grace` is given within `grace` of the first error, is a
    WorkerError that names the device and `task`: its peers' errors are only that they waited in vain.
    """
    pending = set(calls.values())
    deadline = time.monotonic() + timeout.total_seconds()
    failed = False
    while pending and (left_s := deadline - time.monotonic()) > 0:
        done, pending = wait(pending, timeout=left_s, return_when=FIRST_EXCEPTION if not failed else ALL_COMPLETED)
        if not failed and any(future.exception() is not None for future in done):
            failed = True
            if grace is not None:
                deadline = min(deadline, time.monotonic() + grace.total_seconds())
    errors = [error for future in calls.values() if future.done() and (error := future.exception()) is not None]
    late = [device for device, future in calls.items() if not future.done()]
    if late:
        limit = f"within {timeout.total_seconds():g} s" if not errors else f"while its peers gave up: {errors[0]}"
        errors.append(WorkerError(late[0], task, f"no answer {limit}"))
    if errors:
        raise _root_cause(errors)
    return {device: future.result() for device, future in calls.items()}


def answers(calls: Mapping[int, Future[T]], *, timeout: timedelta) -> dict[int, T]:
    """Results by device of those calls that succeed within `timeout`; the others are left out."""
    done, _ = wait(calls.values(), timeout=timeout.total_seconds(), return_when=ALL_COMPLETED)
    return {device: call.result() for device, call in calls.items() if call in done and call.exception() is None}


def _root_cause(errors: Sequence[BaseException]) -> BaseException:
    """The error that is not merely another rank's failure seen from here, where there is one."""
    return next((error for error in errors if not isinstance(error, GroupError | UpdateAborted)), errors[0])

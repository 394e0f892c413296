"""A job whose way back failed goes on with what is whole, or from saved state, or ends; no step runs on the rest."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from faulty_pool import FaultyPool, fail
from jobs import SPEC, Rollouts, changed, judged, make_runtime, make_setup, numbers, plan_of
from table_outlook import JudgedOutlook

from nereus.controller import Clock, Controller, Course
from nereus.errors import StateLost, TornStateError
from nereus.moving.commands import BufferKey
from nereus.plan import ACTOR_TRAINING, Layout, Plan
from nereus.reports.control import Requests
from nereus.reports.events import Event, StepEnd, TransitionEnd, TransitionFailed
from nereus.runtime.live import JobSetup, LiveRuntime
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import Worker
from nereus.transition.price import StageState

HERE = plan_of(
    actor_generation="d1t1p1@3",
    actor_training="d1t1p1@0",
    critic_training="d1t1p1@1",
    critic_inference="d1t1p1@1",
    reference_inference="d1t1p1@3",
)
THERE = changed(HERE, actor_training="d1t1p1@2", critic_training="d1t1p1@0", critic_inference="d1t1p1@0")
ROOM = int(1.5 / 0.9 * StageState(SPEC, 3 * 8).buffer_bytes(Layout()).max())
"""Bytes of a device with room for one and a half trained models."""
ACTOR = BufferKey(ACTOR_TRAINING, Layout(), 0)


@pytest.fixture
def pool() -> Iterator[FaultyPool]:
    pool = FaultyPool(4, timeout=timedelta(seconds=30))
    pool.faults = {}
    yield pool
    pool.close()


def drive(
    runtime: LiveRuntime,
    setup: JobSetup,
    folder: Path,
    steps: int,
    wanted: dict[int, Plan],
    *,
    room: int | None = ROOM,
) -> list[Event]:
    """The events of a run that wants these plans before these steps; StateLost ends it with what it had."""
    events: list[Event] = []
    outlook = JudgedOutlook(judge=lambda target: judged(runtime, setup, target, device_bytes=room))
    course = Course(steps, 0, {step: lambda current, plan=plan: plan for step, plan in wanted.items()})
    try:
        Controller(
            runtime, outlook, course, events.append, progress=lambda what, step, steps: None,
            requests=Requests(folder), clock=Clock(lambda: 0.0),
        ).run()  # fmt: skip
    except StateLost as error:
        events.append(TransitionFailed(0, runtime.plan, None, f"ended: {error}"))
    return events


def untouched(folder: Path, steps: int) -> tuple[Rollouts, list[dict[str, float]]]:
    pool, rollouts = ThreadPool(4, timeout=timedelta(seconds=30)), Rollouts()
    runtime = make_runtime(make_setup(folder, rollouts, reward_model=False), HERE, pool)
    try:
        return rollouts, [numbers(runtime.run_step(step).metrics) for step in range(1, steps + 1)]
    finally:
        pool.close()


def of_steps(events: Sequence[Event]) -> list[dict[str, float]]:
    return [numbers(event.report.metrics) for event in events if isinstance(event, StepEnd)]


@dataclasses.dataclass
class Again:
    """A fault of a worker that comes at every call of a kind while the buffer of the actor there is torn."""

    pool: FaultyPool
    point: tuple[int, str]
    fault: Callable[[Worker], None]
    fired: int = 0

    def __call__(self, worker: Worker) -> None:
        self.pool.faults[self.point] = self
        if ACTOR in worker.residents.keys and ACTOR not in worker.residents.whole_keys:
            self.fired += 1
            self.fault(worker)


def test_the_only_copy_that_dies_with_its_worker_ends_a_run_that_saved_nothing(
    pool: FaultyPool, tmp_path: Path
) -> None:
    """The actor has left device 0 for device 2, whose worker is killed when it adopts it."""
    setup = make_setup(tmp_path, Rollouts(), reward_model=False)
    runtime = make_runtime(setup, HERE, pool)
    pool.faults[2, "adopt"] = pool.kill(2)
    events = drive(runtime, setup, tmp_path, 4, {2: THERE})
    assert len(of_steps(events)) == 1, "no step runs on zeros"
    ended = events[-1]
    assert isinstance(ended, TransitionFailed)
    assert "ended: before step 2 no whole copy of actor-training is left, and nothing was saved" in ended.reason
    with pytest.raises(TornStateError, match="actor-training t1p1 rank 0: it is gone"):
        runtime.run_step(2)
    with pytest.raises(TornStateError, match="it is gone"):
        runtime.suspend(1)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_the_same_loss_goes_back_to_the_last_saved_state_where_there_is_one(pool: FaultyPool, tmp_path: Path) -> None:
    rollouts = Rollouts()
    setup = make_setup(tmp_path, rollouts, reward_model=False)
    runtime = make_runtime(setup, HERE, pool)
    runtime.suspend(0)
    runtime.resume(HERE)
    pool.faults[2, "adopt"] = pool.kill(2)
    events = drive(runtime, setup, tmp_path, 4, {3: THERE})
    assert [event.step for event in events if isinstance(event, StepEnd)] == [1, 2, 1, 2, 3, 4]
    modes = [(event.step, event.report.mode) for event in events if isinstance(event, TransitionEnd)]
    assert modes == [(3, "restart"), (3, "in_place")]
    still, rows = untouched(tmp_path / "still", 4)
    trained = [responses for responses in rollouts.responses if len(responses) == setup.batch]
    assert trained == [*still.responses[:2], *still.responses]
    for found, expected in zip(of_steps(events)[2:], rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def flip(worker: Worker) -> None:
    for flat in worker.residents.buffer(ACTOR).flats.values():
        flat.view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize(("method", "fault"), [("move", fail), ("after move", flip)], ids=["raises", "digest differs"])
def test_a_job_whose_refill_fails_goes_on_with_the_units_that_are_whole(
    pool: FaultyPool, tmp_path: Path, method: str, fault: Callable[[Worker], None]
) -> None:
    """The seat fails, then every refill of the actor: it stays where it was moved to, the critic is back."""
    rollouts = Rollouts()
    setup = make_setup(tmp_path, rollouts, reward_model=False)
    runtime = make_runtime(setup, HERE, pool)
    pool.faults[2, "seat"] = fail
    again = Again(pool, (0, method), fault)
    pool.faults[0, method] = again
    events = drive(runtime, setup, tmp_path, 3, {2: THERE})
    assert again.fired == 2
    failed = [event.reason for event in events if isinstance(event, TransitionFailed)]
    assert len(failed) == 1 and "actor-training lacks 0" in failed[0]
    moves = [(event.report.mode, event.after) for event in events if isinstance(event, TransitionEnd)]
    left = changed(HERE, actor_training="d1t1p1@2")
    assert moves == [("fall_back", left)] and [e.plan for e in events if isinstance(e, StepEnd)] == [HERE, left, left]
    assert pool.devices == left.devices
    still, rows = untouched(tmp_path / "still", 3)
    assert [responses for responses in rollouts.responses if len(responses) == setup.batch] == still.responses
    for found, expected in zip(of_steps(events), rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_replica_that_dies_in_a_move_is_left_out_of_the_plan_and_the_job_goes_on(
    pool: FaultyPool, tmp_path: Path
) -> None:
    start = changed(HERE, actor_training="d2t1p1@0,2")
    wanted = changed(start, actor_training="d1t2p1@0,2")
    rollouts = Rollouts()
    setup = make_setup(tmp_path, rollouts, reward_model=False)
    runtime = make_runtime(setup, start, pool)
    pool.faults[2, "adopt"] = pool.kill(2)
    events = drive(runtime, setup, tmp_path, 3, {2: wanted}, room=None)
    assert [event.plan for event in events if isinstance(event, StepEnd)] == [start, HERE, HERE]
    still, rows = untouched(tmp_path / "still", 3)
    assert [responses for responses in rollouts.responses if len(responses) == setup.batch] == still.responses
    for found, expected in zip(of_steps(events), rows, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_an_error_while_the_old_buffers_go_is_not_the_end_and_is_cleaned_up_before_the_next_move(
    pool: FaultyPool, tmp_path: Path
) -> None:
    setup = make_setup(tmp_path, Rollouts(), reward_model=False)
    runtime = make_runtime(setup, HERE, pool)
    pool.faults[0, "release"] = pool.faults[0, "unseat"] = fail
    wide = changed(HERE, actor_training="d2t1p1@0,2")
    narrow = changed(HERE, actor_training="d1t2p1@0,2")
    events = drive(runtime, setup, tmp_path, 4, {2: wide, 3: narrow, 4: HERE}, room=None)
    assert [event.plan for event in events if isinstance(event, StepEnd)] == [HERE, wide, narrow, HERE]
    assert not pool.faults and not [event for event in events if isinstance(event, TransitionFailed)]
    keys = pool.call(0, lambda worker: worker.residents.keys).result(30)
    assert keys == (ACTOR,)

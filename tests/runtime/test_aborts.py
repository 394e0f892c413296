"""A job on threads that adapts while its transitions abort: when they are tried again, and that nothing is lost."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from faulty_pool import FaultyPool, fail, flip_a_moment
from jobs import Rollouts, changed, judged, make_runtime, make_setup, plan_of
from table_outlook import TableOutlook, lengths, transition_of

from nereus.controller import Adapting, Clock, Controller, Course
from nereus.decide.decider import Decider
from nereus.decide.policies.nereus import NereusPolicy
from nereus.decide.replay import recorded_decisions, replay, ruled_decisions
from nereus.plan import Plan
from nereus.reports.control import Requests
from nereus.reports.events import Event, Start, StepEnd, TransitionEnd, TransitionFailed
from nereus.runtime.worker import Worker
from nereus.supply.supply import StaticSupply, SupplyView
from nereus.transition.judged import Transition
from nereus.transition.operations import Infeasible

ON_FOUR = plan_of(
    actor_generation="d2t1p1@0-1",
    actor_training="d2t1p1@0-1",
    critic_training="d2t1p1@2-3",
    critic_inference="d2t1p1@2-3",
    reference_inference="d2t1p1@0-1",
)
ON_SIX = changed(ON_FOUR, actor_training="d3t2p1@0-5")
ON_THREE = changed(
    ON_FOUR,
    actor_generation="d1t2p1@0-1",
    actor_training="d1t2p1@0-1",
    critic_training="d1t1p2@1-2",
    critic_inference="d1t1p2@1-2",
)
"""Nothing is synchronized between steps, so that what moves is a transition."""
BY_DEVICES = {6: ON_SIX, 4: ON_FOUR, 3: ON_THREE}


@dataclasses.dataclass
class OnePlanForEach(TableOutlook):
    """Offers the plan above that uses all devices; moving is predicted to take no time, so that every saving pays.

    judge: the transition that the job would carry out; without it, as in a replay, one that does nothing.
    """

    transition_s: float = 0.0
    judge: Callable[[Plan], Transition] | None = None

    def assess(self, current: Plan, target: Plan) -> Transition | Infeasible:
        if self.judge is None or target == current:
            return transition_of(current, target, 0.0)
        return dataclasses.replace(self.judge(target), move_s=0.0)

    def plans(self, current: Plan | None, lengths: Any, devices: Sequence[int]) -> list[Plan]:
        return [BY_DEVICES[len(devices)]]


def decider(start: object = None, outlook: OnePlanForEach | None = None) -> Decider:
    return Decider(NereusPolicy(), outlook or OnePlanForEach(), ON_FOUR, lengths=lengths())


@dataclasses.dataclass
class Faults:
    """A fault that comes again until it has fired `times` times."""

    pool: FaultyPool
    point: tuple[int, str]
    fault: Callable[[Worker], None]
    times: int

    def arm(self) -> None:
        self.pool.faults[self.point] = self

    def __call__(self, worker: Worker) -> None:
        self.times -= 1
        if self.times:
            self.arm()
        self.fault(worker)


def run(
    folder: Path, num_steps: int, devices: int, point: tuple[int, str], fault: Callable[[Worker], None], *, times: int
) -> tuple[Rollouts, list[Event], int]:
    """A run that starts on four devices and has another number before its third step: the rollouts of its steps,
    its events, and how often it still would fail."""
    pool, rollouts, events = FaultyPool(6, timeout=timedelta(seconds=30)), Rollouts(), list[Event]()
    pool.faults = {}
    faults = Faults(pool, point, fault, times)
    faults.arm()
    setup = make_setup(folder, rollouts, batch=6, reward_model=False)
    runtime = make_runtime(setup, ON_FOUR, pool)
    outlook = OnePlanForEach(judge=lambda target: judged(runtime, setup, target))
    events.append(Start(0, config={}, cluster={}, models={}, plan=ON_FOUR))
    supply = StaticSupply(range(4), later=[(2.0, SupplyView(tuple(range(devices))))])
    try:
        Controller(
            runtime, outlook, Course(num_steps, 0, {}), events.append, progress=lambda what, step, steps: None,
            requests=Requests(folder), clock=Clock(lambda: float(len(steps_of(events)))),
            adapting=Adapting(supply, decider(outlook=outlook)),
        ).run()  # fmt: skip
    finally:
        runtime.close()
    return Rollouts(rollouts.responses[1:-1]), events, faults.times


def steps_of(events: Sequence[Event]) -> list[StepEnd]:
    return [event for event in events if isinstance(event, StepEnd)]


def untouched(folder: Path, num_steps: int) -> Rollouts:
    """The rollouts of a job that stays on four devices."""
    pool, rollouts = FaultyPool(6, timeout=timedelta(seconds=30)), Rollouts()
    pool.faults = {}
    runtime = make_runtime(make_setup(folder, rollouts, batch=6, reward_model=False), ON_FOUR, pool)
    try:
        for step in range(1, num_steps + 1):
            runtime.run_step(step)
    finally:
        runtime.close()
    return rollouts


def check_replay(events: Sequence[Event]) -> None:
    lines = [json.loads(json.dumps({"type": e.type, "step": e.step, **e.fields()})) for e in events]
    assert json.loads(json.dumps(ruled_decisions(replay(lines, decider)))) == recorded_decisions(lines)


def test_a_move_that_fails_its_verification_again_and_again_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    rollouts, events, left = run(tmp_path, 18, 6, (5, "after move"), flip_a_moment, times=3)
    failed = [event for event in events if isinstance(event, TransitionFailed)]
    assert left == 0 and all("exp_avg_sq" in event.reason and event.target == ON_SIX for event in failed)
    assert [event.step for event in failed] == [3, 5, 9], "the waits double: 2, 4, 8 steps"
    moved = [(event.step, event.after) for event in events if isinstance(event, TransitionEnd)]
    assert moved == [(17, ON_SIX)], "eight steps after the third abort"
    assert rollouts.responses == untouched(tmp_path / "still", 18).responses
    check_replay(events)


def test_an_urgent_move_that_aborts_is_tried_again_at_once_and_then_made_through_saved_state(tmp_path: Path) -> None:
    rollouts, events, left = run(tmp_path, 6, 3, (1, "move"), fail, times=100)
    failed = [event for event in events if isinstance(event, TransitionFailed)]
    assert left < 100 and [(event.step, event.target) for event in failed] == [(3, ON_THREE), (4, ON_THREE)]
    moved = [(event.step, event.report.mode) for event in events if isinstance(event, TransitionEnd)]
    assert moved == [(5, "restart")]
    assert [len(event.plan.devices) for event in steps_of(events)] == [4, 4, 4, 4, 3, 3]
    assert rollouts.responses == untouched(tmp_path / "still", 6).responses
    check_replay(events)

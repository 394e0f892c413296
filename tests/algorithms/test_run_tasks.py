"""Tasks of a step: each after its predecessors, never two on one device, all that can at once."""

import threading
import time
from collections.abc import Callable

import pytest
from jobs import plan_of

from nereus.algorithms.run_tasks import run_tasks
from nereus.plan import CRITIC_INFERENCE, CRITIC_TRAINING, REFERENCE_INFERENCE, ModelStage, Plan, Role
from nereus.workflow import Task, step_workflow

TASKS = step_workflow("ppo", Role).tasks
DISJOINT = plan_of(
    actor_generation="d4t1p1@0-3",
    actor_training="d1t2p1@0-1",
    critic_training="d1t1p2@2-3",
    critic_inference="d1t1p1@2",
    reference_inference="d1t1p1@4",
    reward_inference="d1t1p1@3",
)


def devices_of(plan: Plan) -> Callable[[ModelStage], tuple[int, ...]]:
    return lambda model_stage: plan[model_stage].devices


class Recorder:
    """Executes tasks by sleeping; remembers when each ran."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.spans: dict[str, tuple[float, float]] = {}
        self._seconds, self._lock = seconds, threading.Lock()

    def __call__(self, task: Task) -> None:
        begun = time.monotonic()
        time.sleep(self._seconds)
        with self._lock:
            self.spans[task.name] = begun, time.monotonic()

    def overlap(self, a: str, b: str) -> bool:
        return self.spans[a][0] < self.spans[b][1] and self.spans[b][0] < self.spans[a][1]


@pytest.mark.parametrize("devices", ["@0", "spread"])
def test_every_task_runs_once_after_what_it_waits_for_and_alone_on_its_devices(devices: str) -> None:
    one = {name.replace("-", "_"): "d1t1p1@0" for name in (m.name for m in DISJOINT.model_stages)}
    plan = DISJOINT if devices == "spread" else plan_of(**one)
    recorder = Recorder(0.02)
    run_tasks(TASKS, devices_of(plan), recorder)
    assert recorder.spans.keys() == {task.name for task in TASKS}
    for task in TASKS:
        for name in task.after:
            assert recorder.spans[name][1] <= recorder.spans[task.name][0]
        for other in TASKS:
            shared = set(plan[task.model_stage].devices) & set(plan[other.model_stage].devices)
            assert task == other or not shared or not recorder.overlap(task.name, other.name)


def test_tasks_on_disjoint_devices_run_at_the_same_time() -> None:
    recorder = Recorder(0.3)
    run_tasks(TASKS, devices_of(DISJOINT), recorder)
    assert recorder.overlap("reference", "reward") and recorder.overlap("reference", "values")
    assert recorder.overlap("critic_update", "actor_update")


def test_ready_tasks_that_share_a_device_go_in_the_workflow_order() -> None:
    plan = plan_of(**{m.name.replace("-", "_"): "d1t1p1@0" for m in DISJOINT.model_stages})
    recorder = Recorder(0.01)
    run_tasks(TASKS, devices_of(plan), recorder)
    assert sorted(recorder.spans, key=lambda name: recorder.spans[name]) == [task.name for task in TASKS]


def test_a_large_task_is_not_overtaken_for_ever_by_small_ones() -> None:
    """`wide` needs both devices and waits for one; `late`, which comes after it, must not take the other first."""
    wide, first, late = CRITIC_TRAINING, REFERENCE_INFERENCE, CRITIC_INFERENCE
    plan = plan_of(critic_training="d1t2p1@0-1", reference_inference="d1t1p1@0", critic_inference="d1t1p1@1")
    kind = TASKS[0].kind
    tasks = (Task("first", first, kind), Task("wide", wide, kind), Task("late", late, kind))
    recorder = Recorder(0.05)
    run_tasks(tasks, devices_of(plan), recorder)
    assert recorder.spans["wide"][1] <= recorder.spans["late"][0]


def test_tasks_that_have_ended_are_not_run_again_and_hold_nothing_up() -> None:
    recorder = Recorder(0.01)
    run_tasks(TASKS, devices_of(DISJOINT), recorder, ended={"generate", "old_logprobs", "values"})
    assert recorder.spans.keys() == {"reference", "reward", "critic_update", "actor_update"}


def test_an_error_is_raised_after_running_tasks_have_ended_and_nothing_new_has_started() -> None:
    ended: list[str] = []

    def execute(task: Task) -> None:
        if task.name == "reward":
            raise ValueError("no score")
        time.sleep(0.2)
        ended.append(task.name)

    with pytest.raises(ValueError, match="no score"):
        run_tasks(TASKS, devices_of(DISJOINT), execute)
    assert set(ended) == {"generate", "old_logprobs", "reference", "values"}


def test_an_interrupt_does_not_wait_for_running_tasks() -> None:
    release = threading.Event()

    def execute(task: Task) -> None:
        if task.name == "reward":
            raise KeyboardInterrupt
        if task.name != "generate":
            assert release.wait(60)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(TASKS, devices_of(DISJOINT), execute)
    assert time.monotonic() - begun < 30
    release.set()


def test_without_tasks_nothing_is_executed() -> None:
    recorder = Recorder()
    run_tasks((), devices_of(Plan(())), recorder)
    assert recorder.spans == {}

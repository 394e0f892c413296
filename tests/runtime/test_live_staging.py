"""A running job exchanges two models between full devices, through host memory, and goes on as if nothing had been."""

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from jobs import SPEC, Rollouts, gathered, judged, make_setup, numbers, plan_of

from nereus.cluster import Cluster
from nereus.errors import TransitionAborted
from nereus.moving.executor import OperationEnd
from nereus.plan import Layout
from nereus.runtime.live import LiveRuntime
from nereus.runtime.thread_pool import ThreadPool
from nereus.transition.price import StageState

HERE = plan_of(
    actor_generation="d1t1p1@0",
    actor_training="d1t1p1@0",
    critic_training="d1t1p1@1",
    critic_inference="d1t1p1@1",
    reference_inference="d1t1p1@2",
)
THERE = plan_of(
    actor_generation="d1t1p1@1",
    actor_training="d1t1p1@1",
    critic_training="d1t1p1@0",
    critic_inference="d1t1p1@0",
    reference_inference="d1t1p1@2",
)
TRAINED_BYTES = int(StageState(SPEC, 3 * 8).buffer_bytes(Layout()).max())
"""Parameters and two moments of the actor in fp64."""


class TightPool(ThreadPool):
    """Threads whose devices have room for one trained model and a little more."""

    @property
    def cluster(self) -> Cluster:
        devices = (
            dataclasses.replace(device, memory_bytes=int(1.3 * TRAINED_BYTES)) for device in super().cluster.devices
        )
        return dataclasses.replace(super().cluster, devices=tuple(devices))


@pytest.fixture
def pool() -> Iterator[TightPool]:
    pool = TightPool(3, timeout=timedelta(seconds=60))
    yield pool
    pool.close()


def test_a_job_exchanges_two_models_between_full_devices(pool: TightPool, tmp_path: Path) -> None:
    ended: list[OperationEnd] = []
    setup = make_setup(tmp_path, Rollouts(), reward_model=False)
    runtime = LiveRuntime(pool, setup, HERE, on_operation=ended.append)
    runtime.start()
    before, counters = gathered(pool, HERE, 0)
    report = runtime.transition(judged(runtime, setup, THERE))
    after, counters_after = gathered(pool, THERE, 1)
    assert report.mode == "in_place" and report.verified
    assert any(" offload " in operation for operation in report.operations)
    assert all(torch.equal(before[key], after[key]) for key in before.keys() | after.keys())
    assert counters == counters_after
    assert sorted(end.name for end in ended) == sorted(name.partition(":")[0] for name in report.operations)
    assert all(str(end).startswith(f"moving: {end.name} took ") for end in ended)
    moved = runtime.run_step(1)
    assert set(moved.engine_bytes) == {0, 1, 2}

    still = ThreadPool(3, timeout=timedelta(seconds=60))
    unmoved = LiveRuntime(still, setup, HERE)
    unmoved.start()
    assert numbers(unmoved.run_step(1).metrics) == pytest.approx(numbers(moved.metrics), rel=1e-9)
    still.close()


def test_a_transition_that_was_judged_from_another_plan_is_refused_and_the_job_stays(
    pool: TightPool, tmp_path: Path
) -> None:
    setup = make_setup(tmp_path, Rollouts(), reward_model=False)
    runtime = LiveRuntime(pool, setup, HERE)
    runtime.start()
    there = judged(runtime, setup, THERE)
    runtime.transition(there)
    before, _ = gathered(pool, THERE, 1)
    with pytest.raises(TransitionAborted, match="judged from another plan"):
        runtime.transition(there)
    assert runtime.plan == THERE
    after, _ = gathered(pool, THERE, 1)
    assert all(torch.equal(before[key], after[key]) for key in before)

"""On Ray workers: one is killed when it is to adopt the only new copy, and nobody takes what is left for a model."""

import dataclasses
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pytest
from jobs import SPEC, Rollouts, changed, judged, make_setup, plan_of

from nereus.algorithms.learning_rate import LearningRate
from nereus.engines.train import AdamW
from nereus.errors import NereusError
from nereus.plan import ACTOR_TRAINING, Layout
from nereus.runtime.live import LiveRuntime
from nereus.runtime.ray_pool import RayPool, RaySettings
from nereus.runtime.worker import Worker
from nereus.transition.price import StageState
from nereus.transition.remains import PlanBroken

P = ParamSpec("P")
T = TypeVar("T")


class KillingPool(RayPool):
    """Kills the process of a worker where it is asked to adopt buffers."""

    victim: int | None = None

    def call(
        self, device: int, method: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        if device == self.victim and method is Worker.adopt:
            os.kill(self._processes[device], signal.SIGKILL)
        return super().call(device, method, *args, **kwargs)


HERE = plan_of(
    actor_generation="d1t1p1@1",
    actor_training="d1t1p1@0",
    critic_training="d1t1p1@1",
    critic_inference="d1t1p1@1",
    reference_inference="d1t1p1@1",
)
THERE = changed(HERE, actor_training="d1t1p1@2", critic_training="d1t1p1@0", critic_inference="d1t1p1@0")
ROOM = int(1.5 / 0.9 * StageState(SPEC, 3 * 8).buffer_bytes(Layout()).max())


def test_a_killed_worker_that_held_the_only_copy_is_told_and_no_step_runs_on_zeros(tmp_path: Path) -> None:
    rollouts = Rollouts()
    setup = make_setup(tmp_path, rollouts, reward_model=False)
    constant = AdamW(LearningRate(1e-3))  # workers do not know the module of the usual one
    roles = {role: dataclasses.replace(r, optimizer=r.optimizer and constant) for role, r in setup.roles.items()}
    setup = dataclasses.replace(setup, roles=roles)
    pool = KillingPool(RaySettings(3, timedelta(seconds=30)))
    runtime = LiveRuntime(pool, setup, HERE)
    try:
        runtime.start()
        runtime.run_step(1)
        transition = judged(runtime, setup, THERE, device_bytes=ROOM)
        assert transition.dag.mode.value == "in_place"
        pool.victim = 2
        with pytest.raises(PlanBroken, match="actor-training lacks 0") as broken:
            runtime.transition(transition)
        remains = broken.value.remains
        assert remains.lost == {2} and remains.missing == (ACTOR_TRAINING,) and remains.plan is None
        scored = len(rollouts.responses)
        for use in (lambda: runtime.run_step(2), lambda: runtime.suspend(1)):
            with pytest.raises(NereusError, match="actor-training t1p1 rank 0: it is gone"):
                use()
        assert len(rollouts.responses) <= scored + 1, "sampling alone has its own parameters"
    finally:
        pool.close()

"""A job that is saved, leaves every device and goes on elsewhere learns what it would have learned."""

from datetime import timedelta
from pathlib import Path

import pytest
from jobs import Rollouts, changed, make_runtime, make_setup, plan_of

from nereus.plan import Plan
from nereus.runtime.thread_pool import ThreadPool

PLAN = plan_of(
    actor_generation="d2t1p1@0-1",
    actor_training="d1t2p1@0-1",
    critic_training="d1t1p2@2-3",
    critic_inference="d1t1p2@2-3",
    reference_inference="d1t1p1@0",
)
ELSEWHERE = changed(PLAN, actor_training="d3t1p1@1-3", critic_training="d1t2p1@4-5", critic_inference="d1t1p1@0")


def run(root: Path, *, pauses: dict[int, Plan]) -> tuple[Rollouts, list[dict[str, float]]]:
    """Metrics of four steps; before some of them the job is suspended and goes on under another plan."""
    rollouts = Rollouts()
    pool = ThreadPool(6, timeout=timedelta(seconds=60))
    runtime = make_runtime(make_setup(root, rollouts, reward_model=False), PLAN, pool)
    try:
        steps = []
        for step in range(1, 5):
            if step in pauses:
                runtime.suspend(step - 1)
                assert pool.devices == ()
                runtime.resume(pauses[step])
            steps.append(dict(runtime.run_step(step).metrics))
        return rollouts, steps
    finally:
        runtime.close()


def test_a_suspended_job_goes_on_under_another_plan_as_if_nothing_had_happened(tmp_path: Path) -> None:
    still, undisturbed = run(tmp_path / "still", pauses={})
    moved, disturbed = run(tmp_path / "moved", pauses={2: PLAN, 3: ELSEWHERE})
    assert moved.responses == still.responses
    for before, after in zip(undisturbed, disturbed, strict=True):
        for name, value in before.items():
            if not name.startswith(("timing", "perf")):
                assert after[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name

"""The key/value cache of a job on threads: it follows the lengths that come, and obeys the bytes of the plan."""

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from jobs import SPEC, STOPS, Rollouts, changed, make_runtime, make_setup, numbers, plan_of

from nereus.engines.generate import CacheUse, Generator
from nereus.engines.sampling import SamplingParams
from nereus.plan import ACTOR_GENERATION, Layout, Plan
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import Worker
from nereus.shards.kv_blocks import block_bytes, blocks_of

ONE_DEVICE = plan_of(
    actor_generation="d1t1p1@0",
    actor_training="d1t1p1@0",
    critic_training="d1t1p1@1",
    critic_inference="d1t1p1@1",
    reference_inference="d1t1p1@0",
    reward_inference="d1t1p1@1",
)


def run_step(
    folder: Path, plan: Plan, *, most_new: int, stops: tuple[int, ...] = STOPS
) -> tuple[Rollouts, dict[str, float], list[CacheUse]]:
    """One step in float64: responses, numbers, and what each device of actor-generation made of its cache."""
    rollouts, pool = Rollouts(), ThreadPool(4, timeout=timedelta(seconds=60))
    try:
        setup = make_setup(folder, rollouts)
        roles = {role: dataclasses.replace(of, max_tokens=most_new + 8) for role, of in setup.roles.items()}
        setup = dataclasses.replace(setup, roles=roles, sampling=SamplingParams(most_new, stop_ids=stops))
        runtime = make_runtime(setup, plan, pool)
        metrics = numbers(runtime.run_step(1).metrics)
        return rollouts, metrics, [pool.call(d, _use).result(30) for d in plan[ACTOR_GENERATION].devices]
    finally:
        pool.close()


def _use(worker: Worker) -> CacheUse:
    [engine] = [seat.generator for seat in worker._seats.values() if seat.generator is not None]
    assert isinstance(engine, Generator) and engine.footprint.held_bytes == 0
    return engine.use


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def bytes_of(layout: Layout, num_blocks: int) -> int:
    return num_blocks * block_bytes(SPEC, layout, torch.float64.itemsize)


def test_a_cap_far_above_the_lengths_that_come_takes_no_memory(folder: Path) -> None:
    rollouts, _, [use] = run_step(folder, ONE_DEVICE, most_new=4000)
    [responses] = rollouts.responses
    longest = max(len(response) for response in responses) + 8
    assert longest < 4000 / 10
    assert 0 < use.peak_bytes <= bytes_of(Layout(), 4 * (blocks_of(longest) + blocks_of(longest) // 8))
    assert use.peak_bytes < bytes_of(Layout(), 4 * blocks_of(4000)) / 8


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_a_plan_whose_cache_bytes_bind_learns_what_an_unbounded_one_learns(folder: Path, layout: Layout) -> None:
    free, expected, [unbounded] = run_step(folder, ONE_DEVICE, most_new=70, stops=())
    assert unbounded.num_preempted == unbounded.num_held_back == 0
    bound = bytes_of(layout, 5)
    devices = "0" if layout.num_ranks == 1 else "0-1"
    bounded = changed(ONE_DEVICE, actor_generation=f"d1{layout}@{devices}")
    stage_plan = bounded[ACTOR_GENERATION].with_settings(cache_bytes=bound)
    bounded = changed(bounded, actor_generation=str(stage_plan))
    assert bounded[ACTOR_GENERATION].cache_bytes == bound
    rollouts, metrics, uses = run_step(folder, bounded, most_new=70, stops=())
    assert all(0 < use.peak_bytes <= bound for use in uses)
    assert all(use.num_preempted and use.num_held_back for use in uses)
    assert rollouts.responses == free.responses
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)

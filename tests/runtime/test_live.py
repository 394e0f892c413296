"""A job on threads: PPO steps through every engine, transitions between them, and what these preserve."""

import functools
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool, fail, flip_a_moment
from jobs import SPEC, Rollouts, changed, gathered, judged, make_runtime, make_setup, numbers, plan_of

from nereus.errors import TransitionAborted, WorkerError
from nereus.model import Head
from nereus.moving.commands import BufferKey
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, ModelStage, Plan, Recompute, Role, Stage
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import Worker
from nereus.shards.boxes import flat_numel
from nereus.shards.state import state_dtypes

START = plan_of(
    actor_generation="d2t1p1@0-1",
    actor_training="d2t1p1@0-1",
    critic_training="d2t1p1@2-3",
    critic_inference="d2t1p1@2-3",
    reference_inference="d2t1p1@0-1",
    reward_inference="d2t1p1@2-3",
)
TO_TP = changed(
    START,
    actor_generation="d2t2p1@0-3",
    actor_training="d2t2p1@0-3",
    critic_training="d2t2p1@0-3",
    critic_inference="d1t2p1@0-1",
    reference_inference="d1t4p1@0-3",
    reward_inference="d1t2p1@2-3",
)
TO_DP_3 = changed(
    TO_TP,
    actor_generation="d3t1p1@0-2",
    actor_training="d3t1p1@1-3",
    critic_training="d3t1p1@0-2",
    critic_inference="d3t1p1@0-2",
    reference_inference="d3t1p1@1-3",
    reward_inference="d3t1p1@0-2",
)
TO_PP = changed(
    TO_DP_3,
    actor_generation="d1t2p2@0-3",
    actor_training="d1t1p2@1,0",
    critic_training="d1t1p2@2-3",
    critic_inference="d1t2p2@0-3",
    reference_inference="d1t1p2@0-1",
    reward_inference="d1t1p2@2-3",
)
TO_OTHERS = changed(
    TO_PP,
    actor_generation="d2t1p1@4-5",
    actor_training="d1t1p2@4-5",
    critic_training="d1t1p2@5,3",
    critic_inference="d1t1p2@5,3",
    reference_inference="d1t1p1@4",
    reward_inference="d1t1p1@5",
)
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(6, timeout=timedelta(seconds=60))
    yield pool
    pool.close()


def run(
    folder: Path, plan: Plan, *, transitions: Mapping[int, Plan], steps: int, dtype: torch.dtype, num_nodes: int = 1
) -> tuple[Rollouts, list[dict[str, float]]]:
    """Responses and numbers of each step of a job that moves before some of them."""
    rollouts, pool = Rollouts(), ThreadPool(6, timeout=timedelta(seconds=60), num_nodes=num_nodes)
    try:
        setup = make_setup(folder, rollouts, dtype=dtype)
        runtime = make_runtime(setup, plan, pool)
        rows = []
        for step in range(1, steps + 1):
            if step in transitions:
                report = runtime.transition(judged(runtime, setup, transitions[step]))
                assert report.verified and report.bytes_moved == report.bytes_lower_bound
            rows.append(numbers(runtime.run_step(step).metrics))
        return rollouts, rows
    finally:
        pool.close()


def worst(rows: list[dict[str, float]], others: list[dict[str, float]]) -> tuple[float, str]:
    """The largest difference relative to the largest value of its name in the run, and where it is.

    Not relative to the value itself: a mean of signed numbers passes through zero. 1e-12 absolute is nothing.
    """
    sizes = {name: max(abs(other[name]) for other in others) for name in others[0]}
    differences = [
        (max(0.0, abs(row[name] - other[name]) - 1e-12) / max(sizes[name], 1e-300), f"step {step} {name}")
        for step, (row, other) in enumerate(zip(rows, others, strict=True), start=1)
        for name in row.keys() | other.keys()
    ]
    return max(differences)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_twelve_steps_with_four_transitions_learn_what_an_untouched_run_learns(
    folder: Path, dtype: torch.dtype
) -> None:
    """A tp change, dp 2 -> 3 -> 1, a pp change and a move to other devices, each of all four models at once."""
    moves = {3: TO_TP, 5: TO_DP_3, 8: TO_PP, 11: TO_OTHERS}
    rollouts, rows = run(folder, START, transitions=moves, steps=STEPS, dtype=dtype)
    still_rollouts, still_rows = run(folder, START, transitions={}, steps=STEPS, dtype=dtype)
    difference, where = worst(rows, still_rows)
    same = sum(a == b for a, b in zip(rollouts.responses, still_rollouts.responses, strict=True))
    print(f"{dtype}: {same} of {STEPS} rollouts equal; largest difference of the losses, KL and reward:")
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/reward_kl_penalty", "train/reward/mean"):
        print(f"  {name}: {max(abs(a[name] - b[name]) for a, b in zip(rows, still_rows, strict=True)):.1e}")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[-1]["actor/reward_kl_penalty"] > 1e-4, "the policy moved away from the reference"
    if dtype == torch.float64:
        assert rollouts.responses == still_rollouts.responses
        assert difference <= 1e-9, where


def test_other_settings_take_effect_without_moving_state_and_change_no_result(folder: Path) -> None:
    """Micro-batch, recomputation and sequences at once change between two steps, where everything is."""
    other = Plan.of(
        {
            m: stage_plan.with_settings(max_num_seqs=7, cache_bytes=1 << 20)
            if m.stage is Stage.GENERATION
            else stage_plan.with_settings(
                micro_batch=1, recompute=Recompute.FULL if m.stage is Stage.TRAINING else stage_plan.recompute
            )
            for m, stage_plan in START.stages
        }
    )
    rollouts, rows = run(folder, START, transitions={2: other}, steps=3, dtype=torch.float64)
    still_rollouts, still_rows = run(folder, START, transitions={}, steps=3, dtype=torch.float64)
    difference, where = worst(rows, still_rows)
    assert rollouts.responses == still_rollouts.responses
    assert difference <= 1e-9, where


def test_a_seat_computes_with_the_settings_of_its_plan(folder: Path, pool: ThreadPool) -> None:
    setup = make_setup(folder, Rollouts())
    runtime = make_runtime(setup, START, pool)
    for target in (START, changed(START, actor_training="d2t1p1@0-1/mb=1/recompute=full")):
        if target != runtime.plan:
            report = runtime.transition(judged(runtime, setup, target))
            assert not report.operations and report.bytes_moved == 0
        runtime.run_step(1)
        found = pool.call(0, _recomputes, runtime.run_step(2).plan_epoch).result(30)
        assert found is (target[ACTOR_TRAINING].recompute or Recompute.NONE)
    runtime.close()


def _recomputes(worker: Worker, epoch: int) -> Recompute:
    trainer = worker._seats[epoch, ACTOR_TRAINING].trainer
    assert trainer is not None
    return trainer.model.recompute


def test_copies_across_nodes_and_shares_that_do_not_divide_change_nothing(folder: Path) -> None:
    """Copies for generation and critic inference on another node, dp 5 over 7 samples and mini-batches of 2 over dp 3,
    against a plan in which one unit on one device shares everything."""
    alone = plan_of(
        actor_generation="d1t1p1@0",
        actor_training="d1t1p1@0",
        critic_training="d1t1p1@0",
        critic_inference="d1t1p1@0",
        reference_inference="d1t1p1@0",
        reward_inference="d1t1p1@0",
    )
    spread = plan_of(
        actor_generation="d5t1p1@0-4",
        actor_training="d3t1p1@3-5",
        critic_training="d3t1p1@0-2",
        critic_inference="d1t2p2@2-5",
        reference_inference="d1t4p1@1-4",
        reward_inference="d1t1p2@5,0",
    )
    rollouts, rows = run(folder, spread, transitions={3: alone}, steps=3, dtype=torch.float64, num_nodes=2)
    alone_rollouts, alone_rows = run(folder, alone, transitions={2: spread}, steps=3, dtype=torch.float64, num_nodes=2)
    assert rollouts.responses == alone_rollouts.responses
    difference, where = worst(rows, alone_rows)
    assert difference <= 1e-9, where


def test_each_transition_leaves_every_tensor_and_counter_bitwise_as_it_was(folder: Path, pool: ThreadPool) -> None:
    setup = make_setup(folder, Rollouts())
    runtime = make_runtime(setup, START, pool)
    for epoch, target in enumerate((TO_TP, TO_DP_3, TO_PP, TO_OTHERS, START)):
        runtime.run_step(epoch + 1)
        tensors, counters = gathered(pool, runtime.plan, epoch)
        assert counters[ACTOR_TRAINING].updates == 6 * (epoch + 1) == counters[ACTOR_GENERATION].version
        runtime.transition(judged(runtime, setup, target))
        moved, moved_counters = gathered(pool, target, epoch + 1)
        assert moved.keys() == tensors.keys() and moved_counters == counters
        assert all(torch.equal(moved[key], tensors[key]) for key in moved)
        assert_holds_exactly(pool, target)


def assert_holds_exactly(pool: ThreadPool, plan: Plan) -> None:
    """Each device that is left holds the buffers of the plan and nothing else."""
    assert pool.devices == plan.devices
    for device in plan.devices:
        expected = {
            BufferKey(model_stage, stage_plan.layout, position[1])
            for model_stage, stage_plan in plan.stages
            if plan.holder(model_stage) == model_stage and (position := stage_plan.position(device)) is not None
        }
        keys, seats, num_bytes = pool.call(device, inventory).result(30)
        assert keys == expected
        assert {stage for _, stage in seats} == {stage for stage, of in plan.stages if device in of.devices}
        assert len({epoch for epoch, _ in seats}) == 1
        sizes = [state_bytes(key) for key in expected]
        assert sum(sizes) == num_bytes


def inventory(worker: Worker) -> tuple[set[BufferKey], tuple[tuple[int, ModelStage], ...], int]:
    return set(worker.residents.keys), worker.seats, worker.residents.memory.num_bytes


def state_bytes(key: BufferKey) -> int:
    kinds = state_dtypes(torch.float64, trains=key.model_stage.stage is Stage.TRAINING)
    scalar = key.model_stage.role in (Role.CRITIC, Role.REWARD)
    spec = SPEC.with_head(Head.SCORE) if scalar else SPEC
    return flat_numel(spec, key.layout, key.rank) * sum(dtype.itemsize for dtype in kinds.values())


def come_late(worker: Worker) -> None:
    time.sleep(10)


def resources(pool: ThreadPool) -> dict[str, Any]:
    """What a transition must not leave: buffers, seats, threads, file descriptors."""
    gc.collect()
    on_workers = {device: pool.call(device, inventory).result(30) for device in pool.devices}
    return {
        "workers": on_workers,
        "threads": threading.active_count() - sum(t.name.startswith("task") for t in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def settled(pool: ThreadPool, before: dict[str, int], *, patience_s: float = 10.0) -> dict[str, Any]:
    """The resources once no more than before are in use: connections of closed groups end a moment later."""
    deadline = time.monotonic() + patience_s
    while (now := resources(pool))["descriptors"] > before["descriptors"] and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return now


@pytest.mark.parametrize(
    ("point", "fault", "problem"),
    [
        ((4, "prepare"), fail, "no memory"),
        ((1, "move"), fail, "no memory"),
        ((5, "after move"), flip_a_moment, "exp_avg_sq"),
        ((2, "seat"), come_late, "group e1/"),
        ((3, "seat"), fail, "no memory"),
    ],
    ids=["no memory", "raises in move", "digest differs", "late at a group", "raises at its seat"],
)
def test_an_aborted_transition_leaves_the_old_plan_running_and_nothing_of_the_new(
    folder: Path, point: tuple[int, str], fault: Callable[[Worker], None], problem: str
) -> None:
    target = changed(START, actor_training="d1t2p2@2-5", critic_training="d3t1p1@1-3", actor_generation="d1t4p1@2-5")
    pool = FaultyPool(6, timeout=timedelta(seconds=4 if fault is come_late else 30))
    pool.faults = {}
    try:
        setup = make_setup(folder, Rollouts())
        runtime = make_runtime(setup, START, pool)
        runtime.run_step(1)
        before, tensors = resources(pool), gathered(pool, START, 0)
        pool.faults[point] = fault
        with pytest.raises(TransitionAborted, match=problem):
            runtime.transition(judged(runtime, setup, target))
        assert not pool.faults, "the fault has fired"
        after, same = settled(pool, before), gathered(pool, START, 0)
        assert runtime.plan == START and after["workers"] == before["workers"]
        assert after["threads"] == before["threads"]
        assert after["native threads"] <= before["native threads"]
        assert after["descriptors"] <= before["descriptors"]
        assert same[1] == tensors[1] and all(torch.equal(same[0][key], tensors[0][key]) for key in tensors[0])
        row = numbers(runtime.run_step(2).metrics)
        assert runtime.transition(judged(runtime, setup, target)).verified, "a second attempt succeeds"
        rows = [row, numbers(runtime.run_step(3).metrics)]
    finally:
        pool.close()
    assert worst(rows, untouched(folder)[1:3])[0] <= 1e-9


@functools.cache
def untouched(folder: Path) -> list[dict[str, float]]:
    """The first three steps of a job that stays as it is."""
    return run(folder, START, transitions={}, steps=3, dtype=torch.float64)[1]


@pytest.mark.parametrize("point", [(0, "generate"), (2, "output"), (0, "update"), (2, "update")], ids=str)
def test_a_step_that_failed_goes_on_when_it_is_run_again_and_learns_the_same(
    folder: Path, point: tuple[int, str]
) -> None:
    """The second update of a role fails: the first is committed and must not be done again."""
    plan = changed(
        START,
        **{
            name.replace("-", "_"): "d1t1p1@0" for name in ("actor-generation", "actor-training", "reference-inference")
        },
        **{name.replace("-", "_"): "d1t1p1@2" for name in ("critic-training", "critic-inference", "reward-inference")},
    )
    wanted_rollouts, wanted = run(folder, plan, transitions={}, steps=2, dtype=torch.float64)
    rollouts, pool = Rollouts(), FaultyPool(6, timeout=timedelta(seconds=60))

    def the_next_fails(worker: Worker) -> None:
        pool.faults[point] = fail

    try:
        pool.faults = {}
        runtime = make_runtime(make_setup(folder, rollouts), plan, pool)
        rows = [numbers(runtime.run_step(1).metrics)]
        pool.faults[point] = the_next_fails if point[1] == "update" else fail
        with pytest.raises(WorkerError, match="no memory"):
            runtime.run_step(2)
        rows.append(numbers(runtime.run_step(2).metrics))
    finally:
        pool.close()
    assert rows == wanted and rollouts.responses == wanted_rollouts.responses


def test_a_job_goes_on_after_a_transition_in_place_was_aborted_and_after_it_succeeded(folder: Path) -> None:
    """Memory for one replica of actor-training and a half: the old ones go before the new one is whole, and an abort
    fills them again."""
    base = changed(START, actor_generation="d2t1p1@4-5", reference_inference="d1t1p1@4", reward_inference="d1t1p1@5")
    target = changed(base, actor_training="d1t2p1@0-1")
    pool = FaultyPool(6, timeout=timedelta(seconds=30))
    pool.faults, pool.device_bytes = {}, 730_000
    try:
        setup = make_setup(folder, Rollouts())
        runtime = make_runtime(setup, base, pool)
        rows = [numbers(runtime.run_step(1).metrics)]
        tensors = gathered(pool, base, 0)
        pool.faults[0, "seat"] = fail
        with pytest.raises(TransitionAborted, match="no memory"):
            runtime.transition(judged(runtime, setup, target))
        same = gathered(pool, base, 0)
        assert same[1] == tensors[1] and all(torch.equal(same[0][key], tensors[0][key]) for key in tensors[0])
        rows.append(numbers(runtime.run_step(2).metrics))
        assert runtime.transition(judged(runtime, setup, target)).mode == "in_place"
        assert_holds_exactly(pool, target)
        rows.append(numbers(runtime.run_step(3).metrics))
    finally:
        pool.close()
    assert worst(rows, untouched(folder))[0] <= 1e-9

"""What every implementation of `Pool` promises: threads of this process, and actors of Ray."""

from collections.abc import Iterator
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from jobs import SPEC

from nereus.errors import ClusterError, TransitionAborted, WorkerError
from nereus.moving.commands import BufferKey
from nereus.plan import ACTOR_TRAINING, Layout, Plan, Role
from nereus.runtime.movers import nodes_of
from nereus.runtime.ray_pool import RayPool, RaySettings
from nereus.runtime.seam import Pool, answers, gather
from nereus.runtime.thread_pool import ThreadPool
from nereus.runtime.worker import RoleSetup, Worker

TIMEOUT = timedelta(seconds=60)
ROLES = {Role.ACTOR: RoleSetup(SPEC, torch.float32, Path(), max_tokens=8)}
ALONE, PAIR = Plan.parse({"actor-training": "d1t1p1@0"}), Plan.parse({"actor-training": "d1t2p1@0-1"})
WHOLE = BufferKey(ACTOR_TRAINING, Layout(), 0)


@pytest.fixture(scope="module", params=["threads", "ray"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """One pool for all tests of an implementation, for Ray takes long to start."""
    pool = ThreadPool(3, timeout=TIMEOUT) if request.param == "threads" else RayPool(RaySettings(3, TIMEOUT))
    yield pool
    pool.close()
    pool.close()
    assert pool.devices == ()


@pytest.fixture
def pool(pools: Pool) -> Iterator[Pool]:
    """With workers 0 and 1, which hold nothing."""
    pools.start([0, 1])
    yield pools
    pools.stop([device for device in pools.devices if device > 1])
    wait([pools.call(device, Worker.unseat, 0) for device in pools.devices], timeout=30)


def test_there_is_one_worker_for_every_device_that_was_started(pool: Pool) -> None:
    assert pool.devices == (0, 1)
    pool.start([1, 0])
    assert pool.devices == (0, 1)
    pool.start([2])
    assert pool.devices == (0, 1, 2) and pool.cluster.device_ids == (0, 1, 2)
    with pytest.raises(ClusterError, match="3"):
        pool.start([3])
    assert pool.devices == (0, 1, 2)


def test_calls_to_one_worker_run_in_the_order_they_were_made(pool: Pool) -> None:
    calls = [
        pool.call(0, Worker.whole_keys),
        pool.call(0, Worker.allocate, 0, ALONE, ROLES),
        pool.call(0, Worker.whole_keys),
        pool.call(0, Worker.unseat, 0),
        pool.call(0, Worker.whole_keys),
    ]
    assert [call.result(30) for call in calls] == [(), None, (WHOLE,), None, ()]


def test_calls_to_different_workers_run_at_once(pool: Pool) -> None:
    """A seat waits for its peers: neither ends before the other has begun."""
    roles, nodes = pool.share(ROLES), nodes_of(pool)
    gather({d: pool.call(d, Worker.allocate, 0, PAIR, roles) for d in (0, 1)}, "allocate", timeout=TIMEOUT)
    gather({d: pool.call(d, Worker.seat, 0, PAIR, roles, nodes) for d in (0, 1)}, "seat", timeout=TIMEOUT)
    gather({d: pool.call(d, Worker.unseat, 0) for d in (0, 1)}, "unseat", timeout=TIMEOUT)


def test_an_error_of_ours_comes_through_as_it_is_and_any_other_names_device_and_task(pool: Pool) -> None:
    with pytest.raises(TransitionAborted, match="device 1 lacks actor-training t2p1 rank 1"):
        pool.call(1, Worker.adopt, 3, PAIR).result(30)
    with pytest.raises(WorkerError, match="worker 1, settle: TypeError") as error:
        pool.call(1, Worker.settle, 3).result(30)  # type: ignore[arg-type]
    assert (error.value.device, error.value.task) == (1, "settle")
    assert pool.call(1, Worker.whole_keys).result(30) == (), "the worker lives on"


def test_a_shared_value_arrives_in_every_call_as_it_was(pool: Pool) -> None:
    plan = pool.share(PAIR)
    wait([pool.call(device, Worker.allocate, 0, plan, ROLES) for device in (0, 1)], timeout=30)
    found = answers({device: pool.call(device, Worker.whole_keys) for device in (0, 1)}, timeout=TIMEOUT)
    assert found == {rank: (BufferKey(ACTOR_TRAINING, Layout(tp=2), rank),) for rank in (0, 1)}


def test_a_worker_that_was_ended_is_gone_with_its_state_and_its_device_can_be_started_anew(pool: Pool) -> None:
    pool.call(0, Worker.allocate, 0, ALONE, ROLES).result(30)
    pool.stop([0])
    assert pool.devices == (1,)
    pool.start([0])
    assert pool.devices == (0, 1) and pool.call(0, Worker.whole_keys).result(30) == ()


def test_only_those_that_succeed_are_among_the_answers(pool: Pool) -> None:
    calls = {0: pool.call(0, Worker.adopt, 0, Plan(())), 1: pool.call(1, Worker.adopt, 0, PAIR)}
    assert answers(calls, timeout=TIMEOUT) == {0: None}

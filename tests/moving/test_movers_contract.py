"""What every implementation of `Movers` promises: workers as threads, as processes, and as those of a pool."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_pool import FaultyPool
from movers import ThreadMovers, Whole, tiny_spec, write
from process_movers import ProcessMovers, ProcessWorker

from nereus.errors import NereusError, TransitionAborted
from nereus.moving.commands import BufferKey, MoveOrder, StageKinds
from nereus.moving.executor import Movers, run_move
from nereus.plan import ACTOR_TRAINING, Layout, Plan, Role
from nereus.runtime.movers import PoolMovers
from nereus.runtime.worker import RoleSetup
from nereus.shards.moves import Holding
from nereus.shards.state import Counters, StateKind

STAGE, SPEC = ACTOR_TRAINING, tiny_spec()
KINDS = StageKinds(SPEC, tuple((k, torch.float32) for k in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)))
OLD, NEW = Plan.parse({STAGE.name: "d1t1p1@0"}), Plan.parse({STAGE.name: "d1t2p1@1-2"})
WHOLE, HALVES = BufferKey(STAGE, Layout(), 0), [BufferKey(STAGE, Layout(tp=2), rank) for rank in (0, 1)]


@dataclasses.dataclass
class Case:
    """Workers 0 to 3 of an implementation; 0 holds the actor under epoch 0.

    on: what a function returns for a worker, which has `residents`. kill: let a worker answer nothing any more.
    """

    movers: Movers
    on: Callable[..., Any]
    kill: Callable[[int], None]


def whole() -> Whole:
    """The actor's tensors, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return {(p.name, kind): torch.randn(p.shape, generator=generator) for p in SPEC.params for kind, _ in KINDS.kinds}


def fill(worker: Any) -> None:
    state = worker.residents.allocate(0, STAGE, SPEC, Layout(), 0, dict(KINDS.kinds))
    state.counters = Counters(updates=3, version=5)
    write(state, whole())


def keys(worker: Any) -> tuple[BufferKey, ...]:
    return tuple(worker.residents.keys)


def differs(worker: Any, epoch: int) -> list[str]:
    """What of a worker's part in an epoch is not what it must be."""
    state, expected = worker.residents.state(epoch, STAGE), whole()
    wrong = [] if state.counters == Counters(updates=3, version=5) else [str(state.counters)]
    for shard in state.shards:
        slices = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
        for kind in state.flats:
            if not torch.equal(state.view(shard.param.name, kind), expected[shard.param.name, kind][slices]):
                wrong.append(f"{shard.param.name} {kind}")
    return wrong


def threads() -> Iterator[Case]:
    movers = ThreadMovers(4)
    yield Case(movers, lambda device, function, *args: function(movers.workers[device], *args), movers.dead.add)
    movers.close()


@pytest.fixture(scope="module")
def process_movers() -> Iterator[ProcessMovers]:
    """The same processes for all tests; the last one kills one of them."""
    movers = ProcessMovers(4)
    yield movers
    movers.close()


def start_over(worker: ProcessWorker) -> None:
    """Hold nothing."""
    for epoch in range(3):
        worker.retire(epoch)
    worker.residents.release(worker.residents.keys)


def processes(movers: ProcessMovers) -> Iterator[Case]:
    movers.apply(start_over)
    yield Case(movers, movers.apply_on, movers.kill)


def pool() -> Iterator[Case]:
    workers = FaultyPool(4, timeout=timedelta(seconds=30))
    workers.faults = {}
    workers.start(range(4))
    roles = {Role.ACTOR: RoleSetup(SPEC, torch.float32, Path(), max_tokens=8)}

    def kill(device: int) -> None:
        workers.dead |= {device}

    yield Case(
        PoolMovers(workers, roles, timeout=timedelta(seconds=30)),
        lambda device, function, *args: workers.call(device, function, *args).result(30),
        kill,
    )
    workers.close()


@pytest.fixture(params=["threads", "processes", "pool"])
def case(request: pytest.FixtureRequest, process_movers: ProcessMovers) -> Iterator[Case]:
    made = {"threads": threads, "processes": lambda: processes(process_movers), "pool": pool}
    for found in made[request.param]():
        found.on(0, fill)
        yield found


def order_between(source: Plan, target: Plan, **options: Any) -> MoveOrder:
    return MoveOrder.plan(
        f"e1/{target}", KINDS, STAGE, Holding.of(source[STAGE]), STAGE, Holding.of(target[STAGE]), **options
    )


@pytest.mark.parametrize("node_of", [None, str], ids=["one node", "across nodes"])
def test_a_move_fills_every_target_bitwise_and_says_what_crossed(case: Case, node_of: Any) -> None:
    order = order_between(OLD, NEW, node_of=node_of)
    report = run_move(case.movers, order)
    assert report.bytes_moved == order.bytes_moved == (report.bytes_group if node_of else report.bytes_shared)
    case.movers.seat(1, NEW)
    assert case.on(1, differs, 1) == case.on(2, differs, 1) == case.on(0, differs, 0) == []


def test_what_was_moved_counts_as_whole_only_once_it_is_settled(case: Case) -> None:
    parts = order_between(OLD, NEW).per_device()
    exports = {device: export for device, export in case.movers.prepare(parts).items() if export is not None}
    case.movers.move(parts, exports, exports[0].counters)
    assert case.movers.digests(parts).keys() == parts.keys()
    assert case.movers.census() == {0: (WHOLE,), 1: (), 2: (), 3: ()}
    with pytest.raises(TransitionAborted, match="lacks actor-training t2p1 rank 0"):
        case.movers.seat(1, NEW)
    case.movers.settle({1: (HALVES[0],), 2: (HALVES[1],)})
    assert case.movers.census() == {0: (WHOLE,), 1: (HALVES[0],), 2: (HALVES[1],), 3: ()}
    case.movers.seat(2, NEW)
    assert case.on(1, differs, 2) == case.on(2, differs, 2) == []


def test_what_is_released_is_gone_and_releasing_what_is_not_there_is_nothing(case: Case) -> None:
    case.movers.release({0: (WHOLE,), 3: (WHOLE,)})
    assert case.movers.census() == {0: (), 1: (), 2: (), 3: ()}
    with pytest.raises(NereusError, match="it is gone"):
        case.on(0, differs, 0)


def test_an_epoch_that_is_retired_takes_what_no_other_names_and_leaves_the_rest(case: Case) -> None:
    run_move(case.movers, order_between(OLD, NEW))
    case.movers.retire(1)
    assert case.movers.census() == {0: (WHOLE,), 1: (), 2: (), 3: ()}
    run_move(case.movers, order_between(OLD, NEW))
    case.movers.seat(2, NEW)
    case.movers.retire(0)
    assert [case.on(device, keys) for device in range(4)] == [(), (HALVES[0],), (HALVES[1],), ()]


def test_the_error_of_one_worker_is_raised_when_the_others_have_ended(case: Case) -> None:
    """Device 3 holds nothing to send; what the others were asked is done."""
    wrong = order_between(Plan.parse({STAGE.name: "d1t1p1@3"}), NEW).per_device()
    with pytest.raises(NereusError, match="actor-training t1p1 rank 0"):
        case.movers.prepare(wrong)
    assert case.on(1, keys) == (HALVES[0],) and case.on(2, keys) == (HALVES[1],)


def test_moves_of_different_devices_can_run_at_once(case: Case) -> None:
    run_move(case.movers, order_between(OLD, Plan.parse({STAGE.name: "d1t1p1@1"})))
    orders = [order_between(Plan.parse({STAGE.name: f"d1t1p1@{a}"}), Plan.parse({STAGE.name: f"d1t1p1@{b}"}))
              for a, b in ((0, 2), (1, 3))]  # fmt: skip
    with ThreadPoolExecutor(2) as running:
        reports = list(running.map(lambda order: run_move(case.movers, order), orders))
    assert [report.bytes_moved for report in reports] == [order.bytes_moved for order in orders]
    assert case.movers.census() == dict.fromkeys(range(4), (WHOLE,))


def test_a_worker_that_does_not_answer_is_left_out_of_the_census_and_is_an_error_elsewhere(case: Case) -> None:
    case.kill(1)
    assert case.movers.census() == {0: (WHOLE,), 2: (), 3: ()}
    with pytest.raises(NereusError, match="worker 1"):
        run_move(case.movers, order_between(OLD, NEW))

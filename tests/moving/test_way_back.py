"""A way back that fails is told unit by unit, and what is not whole is never used."""

from collections.abc import Callable, Iterator

import pytest
import torch
from movers import ThreadMovers, ThreadWorker, assert_holds, tiny_spec, whole_tensors
from process_movers import ProcessMovers, ProcessWorker

from nereus.errors import TornStateError, TransitionAborted
from nereus.moving.commands import MoveOrder, StageKinds
from nereus.moving.executor import Execution, run_move
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Layout, ModelStage, Plan
from nereus.shards.moves import Holding
from nereus.shards.state import StateKind
from nereus.transition.operations import Mode, Operation, Primitive, TransitionDag
from nereus.transition.remains import PlanBroken, Remains

FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
STATES = {
    ACTOR_TRAINING: StageKinds(tiny_spec(), FP32),
    ACTOR_GENERATION: StageKinds(tiny_spec(), FP32[:1]),
    CRITIC_TRAINING: StageKinds(tiny_spec(hidden=8, ffn=19), FP32),
}
OLD = Plan.parse({"actor-training": "d1t1p1@0", "critic-training": "d1t1p1@1"})
NEW = Plan.parse({"actor-training": "d1t1p1@2", "critic-training": "d1t1p1@0"})


def step(number: int, primitive: Primitive, stage: ModelStage, source: int, target: int | None) -> Operation:
    one, frees = Layout(), primitive is Primitive.DESTROY
    targets, devices = (((target,),), (target,)) if target is not None else ((), ())
    return Operation(
        number, primitive, stage, stage, one, ((source,),), one, targets, devices, (source,) if frees else ()
    )


IN_TURN = TransitionDag(
    OLD,
    NEW,
    Mode.IN_PLACE,
    (
        step(0, Primitive.EXTEND, ACTOR_TRAINING, 0, 2),
        step(1, Primitive.DESTROY, ACTOR_TRAINING, 0, None),
        step(2, Primitive.EXTEND, CRITIC_TRAINING, 1, 0),
        step(3, Primitive.DESTROY, CRITIC_TRAINING, 1, None),
    ),
)
"""The actor moves from 0 to 2 and makes room for the critic, which moves from 1 to 0."""


@pytest.fixture
def movers() -> Iterator[ThreadMovers]:
    workers = ThreadMovers(4, timeout_s=3)
    workers.fill(0, OLD, STATES)
    yield workers
    workers.close()


def raising(worker: ThreadWorker) -> None:
    raise RuntimeError("injected")


def flipping(worker: ThreadWorker) -> None:
    """Flip one bit of what was received last."""
    worker.residents.buffer(worker.residents.keys[-1]).flats[StateKind.EXP_AVG].view(torch.uint8)[0] ^= 1


EARLIER = 3
"""Calls of device 0 before the refill of its actor: it sends the actor, takes the critic, sends it back."""


class Repeated:
    """A fault at a point of a device that comes `times` times, after `skip` times without."""

    def __init__(
        self, movers: ThreadMovers, point: tuple[int, str], fault: Callable[[ThreadWorker], None], *, times: int,
        skip: int = 0,
    ) -> None:  # fmt: skip
        self._movers, self._point, self._fault = movers, point, fault
        self.left, self._skip = times, skip
        movers.faults[point] = self

    def __call__(self, worker: ThreadWorker) -> None:
        self._skip -= 1
        if self._skip < 0:
            self.left -= 1
        if self.left > 0:
            self._movers.faults[self._point] = self
        if self._skip < 0:
            self._fault(worker)


def aborted(movers: ThreadMovers | ProcessMovers) -> Remains | None:
    """Carry out the transition, which aborts; what is left, where the old plan is not whole."""
    execution = Execution(IN_TURN, movers, states=STATES, epoch=1)
    with pytest.raises(TransitionAborted) as error:
        execution.run(lambda: pytest.fail("committed"))
    return error.value.remains if isinstance(error.value, PlanBroken) else None


def check_whole(movers: ThreadMovers) -> None:
    for stage in OLD.model_stages:
        for state in movers.states(0, stage, OLD).values():
            assert_holds(state, STATES[stage], stage)


@pytest.mark.parametrize(
    ("point", "fault"),
    [((0, "move"), raising), ((0, "after move"), flipping), ((0, "prepare"), raising), ((0, "digests"), raising)],
)
def test_two_errors_in_a_row_leave_the_old_plan_whole(
    movers: ThreadMovers, point: tuple[int, str], fault: Callable[[ThreadWorker], None]
) -> None:
    """The seat fails, then the refill of the actor on device 0."""
    movers.faults[2, "seat"] = raising
    repeated = Repeated(movers, point, fault, times=1, skip=EARLIER)
    assert aborted(movers) is None and repeated.left == 0
    check_whole(movers)


@pytest.mark.parametrize(
    ("point", "fault"), [((0, "move"), raising), ((0, "after move"), flipping), ((0, "digests"), raising)]
)
def test_a_refill_that_fails_again_and_again_is_told_and_its_buffer_is_never_used(
    movers: ThreadMovers, point: tuple[int, str], fault: Callable[[ThreadWorker], None]
) -> None:
    """The actor can still be had where it was moved to; on device 0 there are zeros, or a part, or a flipped bit."""
    movers.faults[2, "seat"] = raising
    Repeated(movers, point, fault, times=100, skip=EARLIER)
    remains = aborted(movers)
    assert remains is not None and remains.lost == frozenset() and remains.missing == ()
    assert remains.broken == {ACTOR_TRAINING: ((0,),)} and "actor-training lacks 0" in str(remains)
    residents = movers.workers[0].residents
    with pytest.raises(TornStateError, match="actor-training t1p1 rank 0"):
        residents.state(0, ACTOR_TRAINING)
    assert not [key for key in residents.whole_keys if key.model_stage == ACTOR_TRAINING]
    movers.faults.clear()
    left = remains.plan
    assert left == Plan.parse({"actor-training": "d1t1p1@2", "critic-training": "d1t1p1@1"})
    movers.seat(2, left)
    for epoch in (0, 1):
        movers.retire(epoch)
    for stage in left.model_stages:
        for state in movers.states(2, stage, left).values():
            assert_holds(state, STATES[stage], stage)
    assert {device: len(keys) for device, keys in movers.keys.items()} == {0: 0, 1: 1, 2: 1, 3: 0}


def test_the_last_copy_that_dies_with_its_worker_is_named_and_not_taken_for_zeros(movers: ThreadMovers) -> None:
    movers.faults[2, "seat"] = lambda worker: movers.dead.add(2) or raising(worker)
    remains = aborted(movers)
    assert remains is not None
    assert remains.lost == {2} and remains.missing == (ACTOR_TRAINING,) and remains.plan is None
    with pytest.raises(TornStateError, match="it is gone"):
        movers.workers[0].residents.state(0, ACTOR_TRAINING)


def test_a_replica_that_dies_in_a_shadow_transition_leaves_the_others(movers: ThreadMovers) -> None:
    current = Plan.parse({"actor-training": "d2t2p1@0-3"})
    target = Plan.parse({"actor-training": "d4t1p1@0-3"})
    movers.retire(0)
    movers.fill(1, current, STATES)
    old, new, stage = current[ACTOR_TRAINING], target[ACTOR_TRAINING], ACTOR_TRAINING
    build = Operation(0, Primitive.RESHARD, stage, stage, old.layout, old.units, new.layout, new.units, new.devices)
    movers.faults[1, "move"] = lambda worker: movers.dead.add(1) or raising(worker)
    execution = Execution(TransitionDag(current, target, Mode.SHADOW, (build,)), movers, states=STATES, epoch=2)
    with pytest.raises(PlanBroken) as error:
        execution.run(lambda: None)
    remains = error.value.remains
    assert remains.broken == {stage: ((0, 1),)} and remains.plan == Plan.parse({"actor-training": "d1t2p1@2-3"})


def test_a_synchronization_that_fails_half_way_leaves_a_buffer_that_nothing_uses_until_it_is_filled(
    movers: ThreadMovers,
) -> None:
    plan = Plan.parse({"actor-training": "d1t2p1@0-1", "actor-generation": "d2t1p1@2-3"})
    movers.retire(0)
    movers.fill(1, plan, STATES)
    order = MoveOrder.plan(
        "sync", STATES[ACTOR_GENERATION], ACTOR_TRAINING, Holding.of(plan[ACTOR_TRAINING]), ACTOR_GENERATION,
        Holding.of(plan[ACTOR_GENERATION]), allocates=False,
    )  # fmt: skip
    movers.faults[3, "move"] = raising
    with pytest.raises(Exception, match="injected"):
        run_move(movers, order)
    for device in (2, 3):
        with pytest.raises(TornStateError, match="unfinished or unverified"):
            movers.workers[device].residents.state(1, ACTOR_GENERATION)
    run_move(movers, order)
    expected = whole_tensors(STATES[ACTOR_TRAINING], ACTOR_TRAINING)
    for state in movers.states(1, ACTOR_GENERATION, plan).values():
        for name, kind in expected:
            if kind is StateKind.PARAM:
                assert torch.equal(state.view(name), expected[name, kind])


def allocate(worker: ProcessWorker, stages: tuple[ModelStage, ...]) -> None:
    for stage in stages:
        for device, rank in Holding.of(OLD[stage]).ranks:
            if device == worker.device:
                kinds = STATES[stage]
                state = worker.residents.allocate(0, stage, kinds.spec, Layout(), rank, dict(kinds.kinds))
                for flat in state.flats.values():
                    flat.fill_(1)


def die_when_seated(worker: ProcessWorker) -> None:
    """End the process where it would adopt the buffers of the next plan."""
    worker.dies_when_seated = True


def usable(worker: ProcessWorker) -> tuple[str, ...]:
    return tuple(str(key) for key in worker.residents.whole_keys)


def test_a_process_that_is_killed_when_it_is_seated_takes_the_last_copy_with_it_and_nobody_goes_on() -> None:
    movers = ProcessMovers(3)
    try:
        movers.apply(allocate, OLD.model_stages)
        movers.seat(0, OLD)
        movers.apply_on(2, die_when_seated)
        remains = aborted(movers)
        assert remains is not None
        assert remains.lost == {2} and remains.missing == (ACTOR_TRAINING,) and remains.plan is None
        assert movers.apply_on(0, usable) == movers.apply_on(1, usable) == ("critic-training t1p1 rank 0",)
    finally:
        movers.close()

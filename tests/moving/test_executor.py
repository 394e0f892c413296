"""A transition ends committed and whole, or aborted with the old plan bitwise as it was and nothing of the new left."""

import ctypes
import dataclasses
import gc
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from movers import ThreadMovers, ThreadWorker, assert_holds, tiny_spec, whole_tensors

from nereus.errors import TransitionAborted
from nereus.moving.commands import MoveOrder, StageKinds
from nereus.moving.executor import Execution, Movers, Phase, run_move
from nereus.moving.ledger import Ledger
from nereus.moving.way_back import Recovery
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    Layout,
    Plan,
    StagePlan,
)
from nereus.shards.moves import Holding
from nereus.shards.state import StateKind
from nereus.transition.operations import Mode, Operation, Primitive, TransitionDag, TransitionReport
from nereus.transition.remains import PlanBroken

FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
BF16 = ((StateKind.PARAM, torch.bfloat16), *((kind, torch.float32) for kind in list(StateKind)[1:]))
STATES = {
    ACTOR_TRAINING: StageKinds(tiny_spec(), BF16),
    ACTOR_GENERATION: StageKinds(tiny_spec(), BF16[:1]),
    CRITIC_TRAINING: StageKinds(tiny_spec(hidden=7, ffn=513), FP32),
}


@pytest.fixture
def movers() -> Iterator[ThreadMovers]:
    workers = ThreadMovers(8, timeout_s=3)
    yield workers
    workers.close()


def reshard_dag(current: Plan, target: Plan, mode: Mode = Mode.SHADOW) -> TransitionDag:
    """One Reshard per changed model-stage, then the Destroys."""
    operations: list[Operation] = []
    changed = [m for m in target.model_stages if current[m] != target[m]]
    for stage in changed:
        held, wanted = dict(Holding.of(current[stage]).ranks), dict(Holding.of(target[stage]).ranks)
        same = current[stage].layout == target[stage].layout
        acquires = tuple(d for d in wanted if not same or held.get(d) != wanted[d])
        operations.append(
            Operation(len(operations), Primitive.RESHARD, stage, stage, current[stage].layout, current[stage].units,
                      target[stage].layout, target[stage].units, acquires)
        )  # fmt: skip
    for stage in changed:
        held, wanted = dict(Holding.of(current[stage]).ranks), dict(Holding.of(target[stage]).ranks)
        same = current[stage].layout == target[stage].layout
        releases = tuple(d for d in held if not same or held[d] != wanted.get(d))
        operations.append(
            Operation(len(operations), Primitive.DESTROY, stage, stage, current[stage].layout, current[stage].units,
                      current[stage].layout, (), (), releases)
        )  # fmt: skip
    return TransitionDag(current, target, mode, tuple(operations))


def plan_of(**stages: str) -> Plan:
    return Plan.parse({name.replace("_", "-"): text for name, text in stages.items()})


def check_whole(movers: ThreadMovers, epoch: int, plan: Plan) -> None:
    for model_stage, _ in plan.stages:
        if plan.holder(model_stage) == model_stage:
            for unit in movers.states(epoch, model_stage, plan).values():
                assert_holds(unit, STATES[model_stage], model_stage)


def own_keys(plan: Plan) -> dict[int, set[str]]:
    keys: dict[int, set[str]] = {}
    for model_stage, stage_plan in plan.stages:
        if plan.holder(model_stage) == model_stage:
            for device, rank in Holding.of(stage_plan).ranks:
                keys.setdefault(device, set()).add(f"{model_stage} {stage_plan.layout} rank {rank}")
    return keys


def check_nothing_else(movers: ThreadMovers, plan: Plan) -> None:
    """Exactly the buffers of the plan live, and no memory besides."""
    found = {device: {str(key) for key in keys} for device, keys in movers.keys.items() if keys}
    assert found == own_keys(plan)


OLD = plan_of(actor_training="d1t2p1@0-1", critic_training="d2t1p1@2-3")
NEW = plan_of(actor_training="d1t2p2@0-3", critic_training="d1t3p1@4-6")


def run(movers: Movers, dag: TransitionDag, epoch: int = 1, **options: Any) -> TransitionReport:
    """Carry out a transition; its commit point must be reached exactly once, before any buffer of the old plan goes."""
    execution = Execution(dag, movers, states=STATES, epoch=epoch, **options)
    commits: list[Phase] = []
    report = execution.run(lambda: commits.append(execution.phase))
    assert commits == [Phase.STAGING] and execution.phase is Phase.DONE and report.verified
    return report


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("d1t1p1@0", "d2t1p1@0-1"),
        ("d2t2p1@0-3", "d3t2p1@0-5"),
        ("d1t2p1@0-1", "d1t6p1@0-5"),
        ("d1t6p1@0-5", "d1t2p3@0-5"),
        ("d1t1p3@0-2", "d1t1p1@7"),
        ("d3t2p1@0-5", "d1t2p1@0-1"),
        ("d1t2p1@0-1", "d1t2p1@6-7"),
        ("d2t3p1@0-5", "d2t3p1@3-5,0-2"),
    ],
)
@pytest.mark.parametrize("across_nodes", [False, True], ids=["one node", "across nodes"])
def test_after_a_commit_every_rank_holds_its_boxes_bitwise(
    movers: ThreadMovers, old: str, new: str, across_nodes: bool
) -> None:
    current, target = plan_of(actor_training=old), plan_of(actor_training=new)
    movers.fill(0, current, STATES)
    node_of = (lambda device: f"node{device % 2}") if across_nodes else None
    report = run(movers, reshard_dag(current, target), node_of=node_of, bucket_bytes=256)
    check_whole(movers, 1, target)
    check_nothing_else(movers, target)
    assert report.bytes_moved == report.bytes_lower_bound


def test_two_model_stages_move_at_once(movers: ThreadMovers) -> None:
    movers.fill(0, OLD, STATES)
    run(movers, reshard_dag(OLD, NEW))
    check_whole(movers, 1, NEW)
    check_nothing_else(movers, NEW)


def raising(worker: ThreadWorker) -> None:
    raise RuntimeError("injected")


def flipping(worker: ThreadWorker) -> None:
    """Flip one bit of what was just received."""
    key = next(key for key in worker.residents.keys if key.layout == NEW[key.model_stage].layout)
    flat = worker.residents._buffers[key].flats[StateKind.EXP_AVG]
    flat.view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize("point", ["prepare", "move", "digests", "seat", "after prepare", "after move"])
def test_an_abort_leaves_the_old_plan_bitwise_and_nothing_of_the_new(movers: ThreadMovers, point: str) -> None:
    """protocol.md: an abort leaves the old plan bitwise as it was, and no buffer of the new epoch."""
    movers.fill(0, OLD, STATES)
    before = movers.num_bytes
    movers.faults[2, point] = raising
    with pytest.raises(TransitionAborted, match="injected"):
        run(movers, reshard_dag(OLD, NEW), node_of=lambda device: f"node{device % 2}")
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)
    assert movers.num_bytes == before
    run(movers, reshard_dag(OLD, NEW), node_of=lambda device: f"node{device % 2}")
    check_whole(movers, 1, NEW)


def test_a_flipped_bit_is_found_before_the_commit(movers: ThreadMovers) -> None:
    movers.fill(0, OLD, STATES)
    movers.faults[4, "after move"] = flipping
    with pytest.raises(TransitionAborted, match="checksums differ"):
        run(movers, reshard_dag(OLD, NEW))
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)


def stopped(worker: ThreadWorker) -> None:
    """A rank that is there and does nothing until long after the time-out."""
    time.sleep(4)


@pytest.mark.parametrize("point", ["move", "seat"])
def test_a_rank_that_never_comes_aborts_at_the_timeout(movers: ThreadMovers, point: str) -> None:
    """protocol.md: a rank that is late is a rank that fails."""
    movers.fill(0, OLD, STATES)
    movers.faults[1, point] = stopped
    begun = time.monotonic()
    with pytest.raises(TransitionAborted, match="g1|not there|Timed out|timed out"):
        run(movers, reshard_dag(OLD, NEW), node_of=str)
    assert time.monotonic() - begun < 25
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)


def test_after_the_commit_point_no_error_brings_the_old_plan_back(movers: ThreadMovers) -> None:
    """protocol.md: after the commit point the new plan is in force whatever happens."""
    movers.fill(0, OLD, STATES)
    movers.faults[0, "release"] = raising
    execution = Execution(reshard_dag(OLD, NEW), movers, states=STATES, epoch=1)
    commits: list[int] = []
    assert execution.run(lambda: commits.append(1)).verified
    assert commits == [1] and execution.phase is Phase.DONE
    assert ["injected" in str(error) for error in execution.problems] == [True]
    check_whole(movers, 1, NEW)
    check_nothing_else(movers, NEW)


def test_a_worker_that_dies_after_the_commit_point_is_a_loss_under_the_new_plan(movers: ThreadMovers) -> None:
    """protocol.md: an error while the old buffers go is the loss of a worker under the new plan."""
    current, target = plan_of(actor_training="d1t2p1@0-1"), plan_of(actor_training="d2t2p1@2-5")
    movers.fill(0, current, STATES)
    movers.faults[0, "release"] = lambda worker: movers.dead.add(3) or raising(worker)
    execution = Execution(reshard_dag(current, target), movers, states=STATES, epoch=1)
    commits: list[int] = []
    with pytest.raises(PlanBroken) as broken:
        execution.run(lambda: commits.append(1))
    remains = broken.value.remains
    assert commits == [1] and remains.before == target and remains.lost == {3}
    assert remains.broken == {ACTOR_TRAINING: ((2, 3),)} and remains.plan == plan_of(actor_training="d1t2p1@4-5")


def test_a_clean_up_that_fails_once_does_not_close_the_target(movers: ThreadMovers) -> None:
    movers.fill(0, OLD, STATES)
    movers.faults[4, "digests"] = movers.faults[4, "retire"] = raising
    execution = Execution(reshard_dag(OLD, NEW), movers, states=STATES, epoch=1)
    with pytest.raises(TransitionAborted, match="injected"):
        execution.run(lambda: None)
    assert execution.unretired == {1}
    check_whole(movers, 0, OLD)
    execution = Execution(reshard_dag(OLD, NEW), movers, states=STATES, epoch=2, current_epoch=0)
    execution.run(lambda: None)
    check_whole(movers, 2, NEW)
    check_nothing_else(movers, NEW)


def extend_then_destroy() -> tuple[Plan, Plan, tuple[Operation, ...]]:
    """In place: unit 1 goes, the target is built from unit 0 on devices 1 and 2, then unit 0 goes."""
    current, target = plan_of(actor_training="d2t1p1@0-1"), plan_of(actor_training="d1t2p1@1-2")
    stage, one, two = ACTOR_TRAINING, Layout(), Layout(tp=2)
    destroy = Operation(0, Primitive.DESTROY, stage, stage, one, ((1,),), one, (), (), (1,))
    build = Operation(1, Primitive.RESHARD, stage, stage, one, ((0,),), two, ((1, 2),), (1, 2))
    rest = Operation(2, Primitive.DESTROY, stage, stage, one, ((0,),), one, (), (), (0,))
    return current, target, (destroy, build, rest)


def test_in_place_frees_before_it_builds_and_holds_less(movers: ThreadMovers) -> None:
    current, target, operations = extend_then_destroy()
    movers.fill(0, current, STATES)
    whole = movers.workers[1].residents.memory.num_bytes
    run(movers, TransitionDag(current, target, Mode.IN_PLACE, operations))
    check_whole(movers, 1, target)
    check_nothing_else(movers, target)
    assert movers.workers[1].residents.memory.num_bytes < whole


@pytest.mark.parametrize(("device", "point"), [(1, "move"), (2, "digests"), (2, "seat"), (0, "after release")])
def test_an_abort_in_place_refills_the_old_plan_from_the_living_copy(
    movers: ThreadMovers, device: int, point: str
) -> None:
    """protocol.md: an abort in place leaves the old plan, its destroyed units refilled from a copy that lives."""
    current, target, operations = extend_then_destroy()
    movers.fill(0, current, STATES)
    movers.faults[device, point] = raising
    with pytest.raises(TransitionAborted, match="injected"):
        run(movers, TransitionDag(current, target, Mode.IN_PLACE, operations))
    check_whole(movers, 0, current)
    check_nothing_else(movers, current)


def test_destroy_never_takes_the_last_copy(movers: ThreadMovers) -> None:
    """protocol.md: a copy of every model-stage lives at every instant."""
    current, target, (destroy, _, rest) = extend_then_destroy()
    movers.fill(0, current, STATES)
    with pytest.raises(TransitionAborted, match="last copy of actor-training"):
        run(movers, TransitionDag(current, target, Mode.IN_PLACE, (destroy, rest)))
    check_whole(movers, 0, current)


def test_a_worker_that_lacks_a_buffer_of_the_plan_refuses_its_seat(movers: ThreadMovers) -> None:
    """protocol.md: a receiver that got no data fails the transition."""
    movers.fill(0, OLD, STATES)
    dag = reshard_dag(OLD, NEW)
    without_actor = tuple(o for o in dag.operations if o.model_stage != ACTOR_TRAINING)
    with pytest.raises(TransitionAborted, match="lacks actor-training"):
        run(movers, TransitionDag(OLD, NEW, Mode.SHADOW, without_actor))
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)


def test_sources_whose_counters_differ_are_refused(movers: ThreadMovers) -> None:
    movers.fill(0, OLD, STATES)
    state = movers.workers[3].residents.state(0, CRITIC_TRAINING)
    state.counters = type(state.counters)(updates=4, version=5)
    with pytest.raises(TransitionAborted, match="disagree on their counters"):
        run(movers, reshard_dag(OLD, NEW))


@pytest.mark.parametrize("across_nodes", [False, True], ids=["one node", "across nodes"])
@pytest.mark.parametrize("generation_plan", ["d1t3p1@0-2", "d2t1p1@6-7", "d1t2p1@0-1", "d2t2p2@0-7"])
def test_weight_synchronization_fills_the_buffers_of_generation(
    movers: ThreadMovers, generation_plan: str, across_nodes: bool
) -> None:
    plan = plan_of(actor_training="d2t2p1@0-3", actor_generation=generation_plan)
    movers.fill(0, plan, STATES)
    for state in movers.states(0, ACTOR_GENERATION, plan).values():
        state.flats[StateKind.PARAM].fill_(7)
    order = MoveOrder.plan(
        "sync", STATES[ACTOR_GENERATION], ACTOR_TRAINING, Holding.of(plan[ACTOR_TRAINING]), ACTOR_GENERATION,
        Holding.of(plan[ACTOR_GENERATION]), node_of=str if across_nodes else None, allocates=False,
        keeps_group=across_nodes,
    )  # fmt: skip
    for _ in range(2):
        report = run_move(movers, order)
    assert (report.bytes_shared, report.bytes_group)[across_nodes] == report.bytes_moved == order.bytes_moved
    for state in movers.states(0, ACTOR_GENERATION, plan).values():
        expected = whole_tensors(STATES[ACTOR_TRAINING], ACTOR_TRAINING)
        for shard in state.shards:
            slices = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
            assert torch.equal(state.view(shard.param.name), expected[shard.param.name, StateKind.PARAM][slices])
        assert state.counters.version == 5


WARM = 20
"""Cycles after which nothing may grow."""


def random_plan(generator: random.Random) -> Plan:
    stages = {}
    for stage in (ACTOR_TRAINING, CRITIC_TRAINING):
        layout = Layout(generator.choice([1, 2, 3]), generator.choice([1, 2]))
        dp = generator.randint(1, 8 // layout.num_ranks)
        stages[stage] = StagePlan.of(layout, generator.sample(range(8), dp * layout.num_ranks))
    return Plan.of(stages)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a process with workers in threads holds; `threads` are those of the system, of gloo too."""

    file_descriptors: int
    threads: int
    shared_mappings: int
    store_keys: int

    @classmethod
    def now(cls, movers: ThreadMovers) -> "Usage":
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return cls(
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
            maps.count("memfd:"),
            movers.workers[0].store.num_keys(),
        )

    @classmethod
    def once_still(cls, movers: ThreadMovers) -> "Usage":
        """Sockets and threads of a closed group go a little later; raises AssertionError where they keep changing."""
        seen = [cls.now(movers)]
        for _ in range(50):
            time.sleep(0.1)
            seen.append(cls.now(movers))
            if len(seen) > 4 and len(set(seen[-4:])) == 1:
                return seen[-1]
        raise AssertionError(f"not still after 5 s: {seen[-4:]}")


def resident_kib() -> int:
    """Resident memory once the allocator has given back what it holds free."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def test_many_cycles_with_random_delays_and_aborts_neither_hang_nor_leak() -> None:
    """A short form of the 200 cycles below."""
    cycles(WARM + 12)


@pytest.mark.slow
def test_200_cycles_of_random_transitions_neither_hang_nor_leak() -> None:
    cycles(200)


def cycles(count: int) -> None:
    """Random transitions, a fifth of which abort. Under one plan, the process holds at the end exactly what it held at
    `WARM`."""
    movers, generator = ThreadMovers(8, timeout_s=20, delay_s=0.005), random.Random(1)
    movers.fill(0, OLD, STATES)
    plan, epoch, settled = OLD, 0, (Usage.once_still(movers), resident_kib())
    for cycle in range(1, count + 1):
        measures = cycle in (WARM, count)
        target = OLD if measures else random_plan(generator)
        fails = generator.random() < 0.2 and not measures
        if fails:
            movers.faults[generator.choice(target[ACTOR_TRAINING].devices), "digests"] = raising
        node_of = generator.choice([None, str, lambda device: f"node{device % 2}"])
        try:
            run(
                movers, reshard_dag(plan, target), epoch=cycle, current_epoch=epoch,
                node_of=node_of, bucket_bytes=512,
            )  # fmt: skip
            assert not fails
            epoch, plan = cycle, target
        except TransitionAborted:
            assert fails
        if cycle % 10 == 0:
            check_whole(movers, epoch, plan)
        check_nothing_else(movers, plan)
        if cycle == WARM:
            settled = Usage.once_still(movers), resident_kib()
    check_whole(movers, epoch, plan)
    ended = Usage.once_still(movers), resident_kib()
    movers.close()
    assert ended[0] == settled[0]
    assert ended[1] <= settled[1] + 12 * 1024


def test_the_ledger_knows_which_old_units_are_whole() -> None:
    current, _, (destroy, _, _) = extend_then_destroy()
    ledger = Ledger(current)
    assert ledger.intact(ACTOR_TRAINING) == ((0,), (1,))
    ledger.released(destroy)
    assert ledger.intact(ACTOR_TRAINING) == ((0,),)
    (refill,) = Recovery(ledger, states=STATES).refills()
    assert refill.target.devices == (1,) and refill.source.devices == (0,)
    ledger.enter(refill.built)
    assert ledger.intact(ACTOR_TRAINING) == ((0,), (1,))

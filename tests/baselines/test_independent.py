"""Independent migration comes through where its chains meet in a lucky order, and is known to be stuck where not."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from feasibility import Feasible, check_feasible
from movers import ThreadMovers, assert_holds

from nereus.baselines.independent import IndependentMigration, Outcome, Room, local_chain
from nereus.cluster import ACCELERATORS, uniform_cluster
from nereus.model import Head, ModelSpec
from nereus.moving.commands import StageKinds
from nereus.moving.executor import Execution
from nereus.plan import ACTOR_TRAINING, CRITIC_TRAINING, Layout, ModelStage, Plan, StagePlan
from nereus.shards.state import StateKind
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, Mode, Primitive, TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState

SPEC = ModelSpec("llama", 4, 64, 8, 4, 8, 176, 500)
FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
KINDS = {ACTOR_TRAINING: StageKinds(SPEC, FP32), CRITIC_TRAINING: StageKinds(SPEC.with_head(Head.SCORE), FP32)}
STATES = {model_stage: StageState(kinds.spec, kinds.element_bytes) for model_stage, kinds in KINDS.items()}
CLUSTER = uniform_cluster(num_nodes=1, devices_per_node=4, accelerator=ACCELERATORS["cpu"])

# The critic frees device 2, which the actor wants; the actor takes room on device 0 that the critic needs before.
CURRENT = Plan.parse({"actor-training": "d1t1p1@1", "critic-training": "d2t1p1@3,2"})
TARGET = Plan.parse({"actor-training": "d2t1p2@2,1,3,0", "critic-training": "d1t2p1@0,3"})
ROOM = 1.6759717579497728


def table(limit_bytes: int) -> DeviceTable:
    found = DeviceTable.of(CLUSTER)
    found.limit_bytes[:] = limit_bytes
    return found


def peak_bytes(plan: Plan) -> int:
    """What the fullest device holds under a plan."""
    found = check_feasible(TransitionDag(plan, plan, Mode.SHADOW), states=STATES, table=table(1 << 60))
    assert isinstance(found, Feasible)
    return max(found.peak_bytes.values())


LIMIT_BYTES = int(ROOM * max(peak_bytes(CURRENT), peak_bytes(TARGET)))


@pytest.fixture
def movers() -> Iterator[ThreadMovers]:
    workers = ThreadMovers(4)
    yield workers
    workers.close()


def migrate(movers: ThreadMovers, launch_s: dict[ModelStage, float], *, timeout_s: float = 60.0) -> Outcome:
    movers.fill(0, CURRENT, KINDS)
    return IndependentMigration(
        movers, CURRENT, TARGET, states=KINDS, limit_bytes=LIMIT_BYTES, epoch=1, launch_s=launch_s,
        timeout_s=timeout_s,
    ).run()  # fmt: skip


def check_moved(movers: ThreadMovers) -> None:
    for model_stage, _ in TARGET.stages:
        for unit in movers.states(1, model_stage, TARGET).values():
            assert_holds(unit, KINDS[model_stage], model_stage)
    assert sum(map(len, movers.keys.values())) == sum(len(held.devices) for _, held in TARGET.stages)


def test_a_lucky_order_brings_every_chain_through(movers: ThreadMovers) -> None:
    outcome = migrate(movers, {CRITIC_TRAINING: 0.0, ACTOR_TRAINING: 2.0})
    assert outcome.succeeded and not outcome.stuck
    check_moved(movers)


def test_the_other_order_is_stuck_and_not_waited_out(movers: ThreadMovers) -> None:
    outcome = migrate(movers, {ACTOR_TRAINING: 0.0, CRITIC_TRAINING: 2.0})
    assert outcome.stuck and not outcome.succeeded and outcome.seconds < 30


def test_one_global_order_comes_through_in_the_same_memory(movers: ThreadMovers) -> None:
    dag = build_dag(CURRENT, TARGET, states=STATES, table=table(LIMIT_BYTES), rates=Rates.of(CLUSTER))
    assert not isinstance(dag, Infeasible) and dag.resource_edges
    movers.fill(0, CURRENT, KINDS)
    Execution(dag, movers, states=KINDS, epoch=1).run(lambda: None)
    check_moved(movers)


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_alone_ends_with_the_target_and_never_without_a_copy(seed: int) -> None:
    draws = random.Random(seed)

    def drawn() -> StagePlan:
        layout = draws.choice([Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2)])
        dp = draws.randint(1, 4 // layout.num_ranks)
        return StagePlan.of(layout, draws.sample(range(4), dp * layout.num_ranks))

    before, after = drawn(), drawn()
    current, target = Plan.of({ACTOR_TRAINING: before}), Plan.of({ACTOR_TRAINING: after})
    chain = local_chain(ACTOR_TRAINING, before, after)
    dag = TransitionDag(current, target, Mode.IN_PLACE, operations=chain)
    assert isinstance(check_feasible(dag, states=STATES, table=table(1 << 60)), Feasible)
    assert bool(chain) == (
        build_dag(current, target, states=STATES, table=table(1 << 60), rates=Rates.of(CLUSTER))
        != TransitionDag(current, target, Mode.SHADOW)
    )


def test_replicas_that_are_not_read_go_first() -> None:
    current, target = Plan.parse({"actor-training": "d2t1p1@0-1"}), Plan.parse({"actor-training": "d2t1p1@2-3"})
    chain = local_chain(ACTOR_TRAINING, current[ACTOR_TRAINING], target[ACTOR_TRAINING])
    extends, destroys = Primitive.EXTEND, Primitive.DESTROY
    assert [operation.primitive for operation in chain] == [destroys, extends, extends, destroys]
    assert [operation.releases for operation in chain] == [(1,), (), (), (0,)]


def test_who_waits_keeps_what_it_has_and_is_woken_when_memory_is_freed() -> None:
    room = Room({0: 10, 1: 0}, num_chains=2)
    taken: list[bool] = []
    waiting = threading.Thread(
        target=lambda: taken.append(room.acquire({0: 10, 1: 5}, deadline_s=time.monotonic() + 60))
    )
    waiting.start()
    while not room.waiting:
        time.sleep(0.001)
    room.release({1: 5})
    waiting.join(60)
    assert taken == [True] and not room.stuck
    room.leave()
    assert not room.acquire({0: 1}, deadline_s=time.monotonic() + 60), "the last one running can wait for nobody"
    assert room.stuck


def test_who_was_given_memory_does_not_count_as_waiting_before_it_wakes() -> None:
    room = Room({0: 0, 1: 0}, num_chains=2)

    def passes_on() -> None:
        assert room.acquire({0: 5}, deadline_s=time.monotonic() + 60)
        time.sleep(0.05)
        room.release({1: 5})

    first = threading.Thread(target=passes_on)
    first.start()
    while not room.waiting:
        time.sleep(0.001)
    room.release({0: 5})
    assert room.acquire({1: 5}, deadline_s=time.monotonic() + 60)
    first.join(60)


def test_a_wait_ends_at_its_deadline_while_others_run() -> None:
    room = Room({0: 0}, num_chains=2)
    assert not room.acquire({0: 1}, deadline_s=time.monotonic() + 0.05)
    assert not room.stuck

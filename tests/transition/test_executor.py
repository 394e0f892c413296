"""A transition ends committed and whole, or aborted with the old plan bitwise as it was and nothing of the new left."""

from collections.abc import Iterator

import pytest
import torch
from movers import ThreadMovers, ThreadWorker, assert_holds, tiny_spec

from nereus.engines.state import StateKind
from nereus.errors import TransitionAborted
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    Plan,
)
from nereus.transition.executor import Execution, Movers, Phase
from nereus.transition.orders import StageKinds
from nereus.transition.primitives import Mode, Operation, Primitive, TransitionDag
from nereus.transition.reshard import Holding

FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
BF16 = ((StateKind.PARAM, torch.bfloat16), *((kind, torch.float32) for kind in list(StateKind)[1:]))
STATES = {
    ACTOR_TRAINING: StageKinds(tiny_spec(), BF16),
    ACTOR_GENERATION: StageKinds(tiny_spec(), BF16[:1]),
    CRITIC_TRAINING: StageKinds(tiny_spec(hidden=7, ffn=513), FP32),
}


@pytest.fixture
def movers() -> Iterator[ThreadMovers]:
    workers = ThreadMovers(8, timeout_s=5)
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


def check_whole(movers: ThreadMovers, generation: int, plan: Plan) -> None:
    for model_stage, _ in plan.stages:
        if plan.holder(model_stage) == model_stage:
            for unit in movers.states(generation, model_stage, plan).values():
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


def run(movers: Movers, dag: TransitionDag, generation: int = 1, **options: object) -> Execution:
    execution = Execution(dag, movers, states=STATES, generation=generation, **options)  # type: ignore[arg-type]
    execution.commits = []  # type: ignore[attr-defined]
    execution.report = execution.run(lambda: execution.commits.append(execution.phase))  # type: ignore[attr-defined]
    return execution


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
    execution = run(movers, reshard_dag(current, target), node_of=node_of, bucket_bytes=256)
    check_whole(movers, 1, target)
    check_nothing_else(movers, target)
    report = execution.report  # type: ignore[attr-defined]
    assert report.bytes_moved == report.bytes_lower_bound
    assert execution.phase is Phase.DONE and report.verified


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
    movers.fill(0, OLD, STATES)
    before = movers.num_bytes
    movers.faults[2, point] = raising
    with pytest.raises(TransitionAborted, match="injected"):
        run(movers, reshard_dag(OLD, NEW), node_of=lambda device: f"node{device % 2}")
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)
    assert movers.num_bytes == before
    run(movers, reshard_dag(OLD, NEW), generation=2)
    check_whole(movers, 2, NEW)


def test_a_flipped_bit_is_found_before_the_commit(movers: ThreadMovers) -> None:
    movers.fill(0, OLD, STATES)
    movers.faults[3, "after move"] = flipping
    with pytest.raises(TransitionAborted, match="checksums differ"):
        run(movers, reshard_dag(OLD, NEW))
    check_whole(movers, 0, OLD)
    check_nothing_else(movers, OLD)

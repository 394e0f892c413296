"""Transitions between real processes: bits kept, and a killed process aborts what it takes part in."""

import os
import signal

import pytest
import torch
from movers import tiny_spec
from reshard_workers import ProcessMovers

from nereus.errors import TransitionAborted
from nereus.moving.commands import BufferKey, StageKinds
from nereus.moving.executor import Execution, Phase
from nereus.plan import ACTOR_TRAINING, Plan
from nereus.shards.moves import Holding
from nereus.shards.state import StateKind
from nereus.transition.operations import Mode, Operation, Primitive, TransitionDag

BF16 = ((StateKind.PARAM, torch.bfloat16), *((kind, torch.float32) for kind in list(StateKind)[1:]))
STATE = StageKinds(tiny_spec(), BF16)


def dag(current: Plan, target: Plan) -> TransitionDag:
    stage, old, new = ACTOR_TRAINING, current[ACTOR_TRAINING], target[ACTOR_TRAINING]
    build = Operation(0, Primitive.RESHARD, stage, stage, old.layout, old.units, new.layout, new.units, new.devices)
    free = Operation(
        1, Primitive.DESTROY, stage, stage, old.layout, old.units, old.layout, (), (), old.devices
    )  # fmt: skip
    return TransitionDag(current, target, Mode.SHADOW, (build, free))


def check(movers: ProcessMovers, plan: Plan, but: int | None = None) -> None:
    for device, rank in Holding.of(plan[ACTOR_TRAINING]).ranks:
        if device != but:
            key = BufferKey(ACTOR_TRAINING, plan[ACTOR_TRAINING].layout, rank)
            assert movers.each("holds_values", {device: (key,)})[device]


@pytest.mark.slow
def test_processes_reshard_bitwise_and_survive_the_death_of_one() -> None:
    plans = [Plan.parse({"actor-training": text}) for text in ("d1t2p1@0-1", "d1t3p1@0-2", "d1t1p2@1-2", "d1t2p1@0-1")]
    movers = ProcessMovers(4)
    try:
        for device, rank in Holding.of(plans[0][ACTOR_TRAINING]).ranks:
            layout = plans[0][ACTOR_TRAINING].layout
            movers.each("allocate", {device: (0, ACTOR_TRAINING, STATE, layout, rank)})
        for epoch, (current, target) in enumerate(zip(plans, plans[1:], strict=False), start=1):
            node_of = (lambda device: f"node{device % 2}") if epoch % 2 else None
            execution = Execution(
                dag(current, target), movers, states={ACTOR_TRAINING: STATE}, epoch=epoch, node_of=node_of
            )
            report = execution.run(lambda: None)
            assert report.bytes_moved == report.bytes_lower_bound
            check(movers, target)
        before = movers.each("num_shared_bytes", {0: (), 1: ()})
        os.kill(movers.processes[3].pid, signal.SIGKILL)
        target = Plan.parse({"actor-training": "d1t3p1@1-3"})
        execution = Execution(dag(plans[-1], target), movers, states={ACTOR_TRAINING: STATE}, epoch=9)
        with pytest.raises(TransitionAborted, match="worker 3, prepare: died"):
            execution.run(lambda: None)
        assert execution.phase is Phase.ABORTED
        check(movers, plans[-1])
        assert movers.each("num_shared_bytes", {0: (), 1: ()}) == before
    finally:
        movers.close()

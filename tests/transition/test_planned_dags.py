"""The DAGs of planned transitions run on real buffers: fused or by primitives, with ample and scarce memory."""

import random

import pytest
import torch
from movers import ThreadMovers, assert_holds, tiny_spec

from nereus.cluster import ACCELERATORS, Cluster, Device
from nereus.moving.commands import StageKinds
from nereus.moving.executor import Execution
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Layout, Plan, StagePlan
from nereus.shards.state import StateKind
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, Mode, Primitive
from nereus.transition.price import DeviceTable, Rates, StageState

FP32 = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
STATES = {
    ACTOR_TRAINING: StageKinds(tiny_spec(), FP32),
    ACTOR_GENERATION: StageKinds(tiny_spec(), FP32[:1]),
    CRITIC_TRAINING: StageKinds(tiny_spec(hidden=7, ffn=19), FP32),
}
HOST = {Primitive.OFFLOAD, Primitive.RELOAD}


def random_plan(generator: random.Random) -> Plan:
    stages = {}
    for stage in (ACTOR_TRAINING, CRITIC_TRAINING):
        layout = Layout(generator.choice([1, 2, 3]), generator.choice([1, 2]))
        dp = generator.randint(1, 8 // layout.num_ranks)
        stages[stage] = StagePlan.of(layout, generator.sample(range(8), dp * layout.num_ranks))
    return Plan.of(stages)


def table(memory_bytes: int) -> DeviceTable:
    devices = tuple(Device(i, f"node{i // 4}", "cpu", memory_bytes) for i in range(8))
    return DeviceTable.of(Cluster(devices, (ACCELERATORS["cpu"],)))


@pytest.mark.parametrize("fuse", [True, False], ids=["reshard", "primitives"])
@pytest.mark.parametrize("memory_bytes", [10**9, 60_000], ids=["ample memory", "scarce memory"])
def test_planned_transitions_end_with_every_box_in_place(fuse: bool, memory_bytes: int) -> None:
    generator, movers = random.Random(7), ThreadMovers(8, timeout_s=20)
    plan, epoch = random_plan(generator), 0
    movers.fill(0, plan, STATES)
    states = {stage: StageState(kinds.spec, kinds.element_bytes) for stage, kinds in STATES.items()}
    rates = Rates.of(Cluster((), (ACCELERATORS["cpu"],)))
    modes, seen = set(), set()
    for _ in range(10):
        target = random_plan(generator)
        dag = build_dag(plan, target, states=states, table=table(memory_bytes), rates=rates, fuse=fuse)
        if isinstance(dag, Infeasible) or HOST & {operation.primitive for operation in dag.operations}:
            continue
        report = Execution(
            dag, movers, states=STATES, epoch=epoch + 1, node_of=lambda device: f"node{device // 4}"
        ).run(lambda: None)
        plan, epoch = target, epoch + 1
        modes.add(dag.mode)
        seen |= {operation.primitive for operation in dag.operations}
        assert report.bytes_moved >= report.bytes_lower_bound
        if fuse and dag.mode is Mode.SHADOW:
            assert report.bytes_moved == report.bytes_lower_bound
        for stage, _ in plan.stages:
            for unit in movers.states(epoch, stage, plan).values():
                if stage in plan and plan.holder(stage) == stage:
                    assert_holds(unit, STATES[stage], stage)
    movers.close()
    assert (Mode.IN_PLACE in modes) == (memory_bytes < 10**9)
    assert epoch >= 3 and Primitive.DESTROY in seen
    if not fuse:
        assert {Primitive.SPLIT, Primitive.EXTEND, Primitive.MERGE} & seen

"""The whole chain by property: random current plan, random target plan, diff, DAG, execution on real buffers, groups.

After every transition each device holds exactly the target's boxes, bit for bit, and nothing else; what was moved is
what the DAG said; and no device ever held more than the simulated peak.
"""

import random

import pytest
import torch
from feasibility import Feasible, check_feasible
from movers import ThreadMovers, tiny_spec, write
from plan_pairs import CPU, RATES

from nereus.cluster import uniform_cluster
from nereus.model import Head
from nereus.moving.commands import StageKinds
from nereus.moving.executor import Execution
from nereus.plan import MODEL_STAGES, Layout, ModelStage, Plan, Role, Stage, StagePlan
from nereus.shards.moves import Holding
from nereus.shards.state import RankState, StateKind, zeros_on
from nereus.transition.assignment import assign
from nereus.transition.dag import build_dag
from nereus.transition.diff import Held, holding_stages
from nereus.transition.operations import Infeasible, Mode, TransitionDag
from nereus.transition.price import DeviceTable, StageState
from nereus.transition.shadow import bytes_in_use

NUM_DEVICES = 8
CLUSTER = uniform_cluster(num_nodes=2, devices_per_node=4, accelerator=CPU)
PARAMS = ((StateKind.PARAM, torch.float32),)
TRAINED = (*PARAMS, (StateKind.EXP_AVG, torch.float32), (StateKind.EXP_AVG_SQ, torch.float32))
SPECS = {
    Role.ACTOR: tiny_spec(),
    Role.CRITIC: tiny_spec(hidden=7, ffn=29, num_layers=2, head=Head.SCORE),
    Role.REFERENCE: tiny_spec(tied=True),
    Role.REWARD: tiny_spec(hidden=5, head=Head.SCORE),
}
KINDS = {m: StageKinds(SPECS[m.role], TRAINED if m.stage is Stage.TRAINING else PARAMS) for m in MODEL_STAGES}
STATES = {m: StageState(kinds.spec, kinds.element_bytes) for m, kinds in KINDS.items()}
WHOLE = {
    role: {
        (param.name, kind): torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * kind_seed + seed))
        for seed, param in enumerate(spec.params)
        for kind_seed, (kind, _) in enumerate(TRAINED)
    }
    for role, spec in SPECS.items()
}
"""Whole tensors of each role: a model-stage may get its parameters from training of the same role."""
zeros = zeros_on(torch.device("cpu"))


def random_plan(rng: random.Random, num_devices: int = NUM_DEVICES) -> Plan:
    """All six model-stages, any layouts, any devices; one that generates or infers may share weights with training."""
    stages: dict[ModelStage, StagePlan] = {}
    for model_stage in reversed(MODEL_STAGES):
        training = ModelStage(model_stage.role, Stage.TRAINING)
        if training in stages and rng.random() < 0.2:
            stages[model_stage] = stages[training]
            continue
        spec = SPECS[model_stage.role]
        layout = Layout(rng.choice([1, 2, 3]), rng.randint(1, spec.num_layers))
        while layout.num_ranks > num_devices:
            layout = Layout(rng.choice([1, 2]), rng.randint(1, spec.num_layers))
        dp = rng.randint(1, min(3, num_devices // layout.num_ranks))
        stages[model_stage] = StagePlan.of(layout, rng.sample(range(num_devices), dp * layout.num_ranks))
    return Plan.of(stages)


def table_for(current: Plan, target: Plan, room: float) -> DeviceTable:
    """Devices that hold `room` times what the fullest holds under either plan."""
    table = DeviceTable.of(CLUSTER)
    used = [bytes_in_use(Held.of(plan), STATES, table) for plan in (current, target)]
    table.limit_bytes[:] = int(max(int(held.max()) for held in used) * room)
    return table


def check_holds_exactly(movers: ThreadMovers, epoch: int, plan: Plan) -> None:
    expected: dict[int, set[str]] = {}
    for model_stage, stage_plan in holding_stages(plan).items():
        for unit in movers.states(epoch, model_stage, plan).values():
            wanted = RankState.allocate(
                unit.spec, unit.layout, unit.rank, dtypes=dict(KINDS[model_stage].kinds), allocator=zeros
            )
            write(wanted, WHOLE[model_stage.role])
            for kind, flat in wanted.flats.items():
                assert torch.equal(flat, unit.flats[kind]), f"{model_stage} {kind} of rank {unit.rank} differs"
        for device, rank in Holding.of(stage_plan).ranks:
            expected.setdefault(device, set()).add(f"{model_stage} {stage_plan.layout} rank {rank}")
    assert {device: {str(key) for key in keys} for device, keys in movers.keys.items() if keys} == expected


def walk(transitions: int, *, fuse: bool, room: float, seed: int) -> dict[Mode, int]:
    """Random transitions one after the other on the same workers; returns how many ran in each mode."""
    rng, movers, ran = random.Random(seed), ThreadMovers(NUM_DEVICES), dict.fromkeys(Mode, 0)
    plan, epoch = random_plan(rng), 0
    movers.fill(0, plan, KINDS)
    for model_stage in holding_stages(plan):
        for unit in movers.states(0, model_stage, plan).values():
            write(unit, WHOLE[model_stage.role])
    try:
        while sum(ran.values()) < transitions:
            target = random_plan(rng)
            table = table_for(plan, target, room)
            if rng.random() < 0.5:
                target = assign(plan, target, states=STATES, table=table, cluster=CLUSTER)
            dag = build_dag(plan, target, states=STATES, table=table, rates=RATES, fuse=fuse)
            if isinstance(dag, Infeasible) or not dag:
                continue
            epoch += 1
            execute(movers, dag, table, epoch)
            plan = target
            ran[dag.mode] += 1
    finally:
        movers.close()
    return ran


def execute(movers: ThreadMovers, dag: TransitionDag, table: DeviceTable, epoch: int) -> None:
    played = check_feasible(dag, states=STATES, table=table)
    assert isinstance(played, Feasible), played
    report = Execution(dag, movers, states=KINDS, epoch=epoch).run(lambda: None)
    check_holds_exactly(movers, epoch, dag.target)
    assert report.verified and report.mode == dag.mode
    assert report.bytes_moved == dag.moved_bytes


@pytest.mark.parametrize(("fuse", "room"), [(True, 4.0), (False, 8.0), (True, 1.15)], ids=["fused", "chained", "tight"])
def test_random_transitions_leave_every_device_with_exactly_its_boxes(fuse: bool, room: float) -> None:
    ran = walk(6, fuse=fuse, room=room, seed=3)
    assert ran[Mode.IN_PLACE if room < 2 else Mode.SHADOW] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("fuse", "room"), [(True, 4.0), (False, 8.0), (True, 1.15)], ids=["fused", "chained", "tight"])
def test_many_random_transitions_leave_every_device_with_exactly_its_boxes(fuse: bool, room: float, seed: int) -> None:
    walk(40, fuse=fuse, room=room, seed=seed)

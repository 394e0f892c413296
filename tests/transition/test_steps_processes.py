"""The chain of `test_chain` with one process a device: gathered state bitwise equal, exactly the target's boxes."""

import random

import torch
from movers import write
from plan_pairs import RATES
from process_movers import ProcessMovers, ProcessWorker
from test_steps import CLUSTER, KINDS, STATES, WHOLE, random_plan, table_for, zeros

from nereus.moving.executor import Execution
from nereus.plan import Plan
from nereus.shards.state import Counters, RankState
from nereus.transition.assignment import assign
from nereus.transition.dag import build_dag
from nereus.transition.diff import holding_stages
from nereus.transition.operations import Mode, TransitionDag

NUM_PROCESSES = 4


def fill(worker: ProcessWorker, plan: Plan) -> None:
    """Allocate what the device holds under a plan and write the whole tensors' boxes."""
    for model_stage, stage_plan in holding_stages(plan).items():
        position = stage_plan.position(worker.device)
        if position is not None:
            state = KINDS[model_stage]
            unit = worker.residents.allocate(
                0, model_stage, state.spec, stage_plan.layout, position[1], dict(state.kinds)
            )
            unit.counters = Counters(updates=3, version=5)
            write(unit, WHOLE[model_stage.role])


def problems(worker: ProcessWorker, epoch: int, plan: Plan) -> list[str]:
    """What a device holds wrongly, lacks, or holds besides."""
    found: list[str] = []
    expected: set[str] = set()
    for model_stage, stage_plan in holding_stages(plan).items():
        position = stage_plan.position(worker.device)
        if position is None:
            continue
        expected.add(f"{model_stage} {stage_plan.layout} rank {position[1]}")
        unit = worker.residents.state(epoch, model_stage)
        wanted = RankState.allocate(
            unit.spec, unit.layout, unit.rank, dtypes=dict(KINDS[model_stage].kinds), allocator=zeros
        )
        write(wanted, WHOLE[model_stage.role])
        found += [
            f"{model_stage} {kind} differs"
            for kind, flat in wanted.flats.items()
            if not torch.equal(flat, unit.flats[kind])
        ]
    held = {str(key) for key in worker.residents.keys}
    return found + sorted(expected ^ held)


def test_random_transitions_between_processes_leave_exactly_the_boxes_of_the_target() -> None:
    rng, movers = random.Random(5), ProcessMovers(NUM_PROCESSES)
    plan, ran = random_plan(rng, NUM_PROCESSES), dict.fromkeys(Mode, 0)
    try:
        movers.apply(fill, plan)
        movers.seat(0, plan)
        while min(ran.values()) < 2:
            target = random_plan(rng, NUM_PROCESSES)
            table = table_for(plan, target, 4.0 if ran[Mode.SHADOW] < 2 else 1.15)
            target = assign(plan, target, states=STATES, table=table, cluster=CLUSTER)
            dag = build_dag(plan, target, states=STATES, table=table, rates=RATES)
            if not isinstance(dag, TransitionDag) or not dag:
                continue
            epoch = 1 + sum(ran.values())
            report = Execution(dag, movers, states=KINDS, epoch=epoch).run(lambda: None)
            assert report.verified and report.bytes_moved == dag.moved_bytes
            assert not any(movers.apply(problems, epoch, target).values())
            plan = target
            ran[dag.mode] += 1
    finally:
        movers.close()

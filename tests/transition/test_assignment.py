"""Devices take the places that keep the most state, by comparison with trying every permutation."""

import itertools
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_pairs import CPU, RATES, STATES, Pair, pairs

from nereus.cluster import uniform_cluster
from nereus.plan import Layout, ModelStage, Plan, Stage, StagePlan
from nereus.shards.moves import Holding, lower_bound_numel
from nereus.transition.assignment import assign, minimum_assignment, most_transported
from nereus.transition.dag import build_dag
from nereus.transition.operations import TransitionDag


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_the_assignment_costs_no_more_than_any_permutation(size: int, seed: int) -> None:
    cost = np.random.default_rng(seed).integers(-20, 20, (size, size))
    chosen = minimum_assignment(cost)
    assert sorted(chosen.tolist()) == list(range(size))
    best = min(sum(cost[i, p[i]] for i in range(size)) for p in itertools.permutations(range(size)))
    assert cost[np.arange(size), chosen].sum() == best


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 5), extra=st.integers(0, 8), seed=st.integers(0, 10_000))
def test_counted_kinds_are_assigned_as_well_as_one_by_one(rows: int, columns: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = max(rows, columns) + extra
    supply, demand = (np.bincount(rng.permutation(np.arange(total) % n), minlength=n) for n in (rows, columns))
    worth = rng.integers(0, 6, (rows, columns))
    flow = most_transported(worth, supply, demand)
    assert (flow >= 0).all() and (flow.sum(axis=1) == supply).all() and (flow.sum(axis=0) == demand).all()
    repeated = worth[np.repeat(np.arange(rows), supply)][:, np.repeat(np.arange(columns), demand)]
    best = repeated[np.arange(total), minimum_assignment(-repeated)].sum()
    assert (flow * worth).sum() == best


def bytes_lacking(current: Plan, target: Plan) -> int:
    """Bytes of the target plan that its devices do not hold yet, counted move by move."""
    total = 0
    for model_stage, stage_plan in target.stages:
        source = current.get(model_stage) or current.get(ModelStage(model_stage.role, Stage.TRAINING))
        if target.holder(model_stage) == model_stage and source is not None:
            state = STATES[model_stage]
            numel = lower_bound_numel(state.spec, Holding.of(source), Holding.of(stage_plan))
            total += numel * state.element_bytes
    return total


@settings(max_examples=100, deadline=None)
@given(pair=pairs)
def test_assigning_keeps_the_shape_and_never_keeps_less(pair: Pair) -> None:
    table = pair.table()
    assigned = assign(pair.current, pair.target, states=STATES, table=table, cluster=pair.cluster)
    assert assigned.devices == pair.target.devices
    for model_stage, stage_plan in pair.target.stages:
        assert assigned[model_stage].shape == stage_plan.shape
        if pair.target.holder(model_stage) != model_stage:
            assert assigned.holder(model_stage) == pair.target.holder(model_stage)
        for before, after in zip(stage_plan.units, assigned[model_stage].units, strict=True):
            same_node = [[table.node[a] == table.node[b] for a in unit for b in unit] for unit in (before, after)]
            assert same_node[0] == same_node[1]
    before_bytes, after_bytes = (bytes_lacking(pair.current, plan) for plan in (pair.target, assigned))
    assert after_bytes <= before_bytes


@settings(max_examples=40, deadline=None)
@given(pair=pairs, seed=st.integers(0, 1000))
def test_devices_renamed_within_a_node_move_nothing_once_assigned(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    names = {
        device.id: other.id
        for devices in pair.cluster.nodes.values()
        for device, other in zip(devices, rng.sample(devices, len(devices)), strict=True)
        if set(d.id for d in devices) <= set(pair.current.devices)
    }
    renamed = Plan.of(
        {
            m: StagePlan.of(plan.layout, [names.get(device, device) for device in plan.devices])
            for m, plan in pair.current.stages
        }
    )
    table = pair.table()
    assigned = assign(pair.current, renamed, states=STATES, table=table, cluster=pair.cluster)
    dag = build_dag(pair.current, assigned, states=STATES, table=table, rates=RATES)
    assert isinstance(dag, TransitionDag) and not dag


def test_units_that_trade_nodes_stay_where_they_are() -> None:
    cluster = uniform_cluster(num_nodes=3, devices_per_node=2, accelerator=CPU)
    current = Plan.parse({"actor-training": "d3t2@0-5"})
    target = Plan.parse({"actor-training": "d3t2@5,4,1,0,3,2"})
    pair = Pair(cluster, current, target)
    assigned = assign(current, target, states=STATES, table=pair.table(), cluster=cluster)
    dag = build_dag(current, assigned, states=STATES, table=pair.table(), rates=RATES)
    assert isinstance(dag, TransitionDag) and not dag


def test_a_pipeline_over_nodes_keeps_its_stages_on_the_nodes_that_hold_them() -> None:
    cluster = uniform_cluster(num_nodes=2, devices_per_node=2, accelerator=CPU)
    current = Plan.parse({"actor-training": "t2p2@0-3"})
    target = Plan.parse({"actor-training": "t2p2@2,3,0,1"})
    pair = Pair(cluster, current, target)
    assigned = assign(current, target, states=STATES, table=pair.table(), cluster=cluster)
    assert assigned == current
    assert assigned[current.model_stages[0]].layout == Layout(2, 2)

"""Every DAG that is built can be played: memory, sources, life and the end state, in any order its ranks may run it."""

import random

from feasibility import Feasible, check_feasible
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_pairs import CPU, RATES, STATES, Pair, pairs, random_execution

from nereus.cluster import uniform_cluster
from nereus.plan import Plan
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, Mode, TransitionDag


def plan(**stages: str) -> Plan:
    return Plan.parse({name.replace("_", "-"): text for name, text in stages.items()})


def pair(current: Plan, target: Plan, *, devices: int = 4) -> Pair:
    return Pair(uniform_cluster(num_nodes=1, devices_per_node=devices, accelerator=CPU), current, target)


def swap() -> Pair:
    """Actor and critic of one size change places."""
    return pair(
        plan(actor_training="d1t1p1@0", actor_generation="d1t1p1@0", critic_training="d1t1p1@1"),
        plan(actor_training="d1t1p1@1", actor_generation="d1t1p1@1", critic_training="d1t1p1@0"),
        devices=2,
    )


@settings(max_examples=120, deadline=None)
@given(pair=pairs, fuse=st.booleans(), seed=st.integers(0, 1000))
def test_a_shadow_transition_can_be_played_in_any_order_and_ends_at_the_target(
    pair: Pair, fuse: bool, seed: int
) -> None:
    table = pair.table()
    dag = build_dag(pair.current, pair.target, states=STATES, table=table, rates=RATES, fuse=fuse)
    assert isinstance(dag, TransitionDag) and dag.mode is Mode.SHADOW
    assert not dag.resource_edges
    played = random_execution(random.Random(seed), dag)
    assert check_feasible(played, states=STATES, table=table), check_feasible(played, states=STATES, table=table)


@settings(max_examples=200, deadline=None)
@given(pair=pairs, room=st.floats(1.0, 2.2), host=st.sampled_from([0, 0, 10**6, 10**9]), seed=st.integers(0, 1000))
def test_a_transition_declared_feasible_never_exceeds_memory_nor_loses_the_last_copy(
    pair: Pair, room: float, host: int, seed: int
) -> None:
    table = pair.table(room=room, host_bytes=host)
    dag = build_dag(pair.current, pair.target, states=STATES, table=table, rates=RATES)
    if isinstance(dag, Infeasible):
        assert "would hold" in dag.reason or "copy" in dag.reason
        return
    for played in (dag, random_execution(random.Random(seed), dag)):
        outcome = check_feasible(played, states=STATES, table=table)
        assert isinstance(outcome, Feasible), outcome
        assert all(peak <= table.limit_bytes[device] for device, peak in outcome.peak_bytes.items())


@settings(max_examples=80, deadline=None)
@given(pair=pairs, seed=st.integers(0, 1000), room=st.floats(1.0, 3.0))
def test_after_a_loss_the_target_is_reached_from_what_lives(pair: Pair, seed: int, room: float) -> None:
    rng = random.Random(seed)
    lost = frozenset(rng.sample(pair.cluster.device_ids, rng.randint(1, 3) if pair.cluster.num_devices > 3 else 1))
    table = pair.table(room=room)
    dag = build_dag(pair.current, pair.target, states=STATES, table=table, rates=RATES, lost=lost)
    if isinstance(dag, Infeasible):
        return
    assert not lost.intersection(*[pair.target.devices]) or not dag or not lost.intersection(pair.target.devices)
    outcome = check_feasible(random_execution(rng, dag), states=STATES, table=table, lost=lost)
    assert isinstance(outcome, Feasible), outcome

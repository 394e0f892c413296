"""One DAG for all model-stages: acyclic, ordered, as short as can be found, and refused with a reason."""

import itertools

import pytest
from feasibility import Feasible, check_feasible
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_pairs import CPU, RATES, STATES, Pair, pairs

from nereus.cluster import uniform_cluster
from nereus.plan import ACTOR_TRAINING, CRITIC_TRAINING, Plan
from nereus.transition.dag import build_dag
from nereus.transition.diff import diff
from nereus.transition.operations import EdgeKind, Infeasible, Mode, Primitive, TransitionDag
from nereus.transition.price import Rates, lacking_elements
from nereus.transition.schedule import TimedOperation, best_order, heaviest_clique, makespan, transition_seconds, waits


def plan(**stages: str) -> Plan:
    return Plan.parse({name.replace("_", "-"): text for name, text in stages.items()})


def pair_of(current: Plan, target: Plan, *, devices: int = 8, nodes: int = 1) -> Pair:
    return Pair(uniform_cluster(num_nodes=nodes, devices_per_node=devices, accelerator=CPU), current, target)


def build(pair: Pair, *, room: float = 100.0, host_bytes: int = 0) -> TransitionDag | Infeasible:
    table = pair.table(room=room, host_bytes=host_bytes)
    return build_dag(pair.current, pair.target, states=STATES, table=table, rates=RATES)


SWAP = pair_of(
    plan(actor_training="t1@0", critic_training="t1@1"), plan(actor_training="t1@1", critic_training="t1@0"), devices=2
)


@settings(max_examples=120, deadline=None)
@given(pair=pairs, room=st.floats(1.0, 3.0), host=st.sampled_from([0, 10**9]))
def test_edges_point_forward_in_the_order_and_resource_edges_come_from_a_destroy_on_a_common_device(
    pair: Pair, room: float, host: int
) -> None:
    dag = build(pair, room=room, host_bytes=host)
    if isinstance(dag, Infeasible):
        return
    assert [operation.id for operation in dag.operations] == list(range(len(dag.operations)))
    assert len(dag.loads) == len(dag.operations)
    for edge in dag.edges:
        assert 0 <= edge.before < edge.after < len(dag.operations)
        before, after = dag.operations[edge.before], dag.operations[edge.after]
        if edge.kind is EdgeKind.RESOURCE:
            assert before.primitive is Primitive.DESTROY
            assert set(before.releases) & set(after.acquires)


@settings(max_examples=80, deadline=None)
@given(pair=pairs)
def test_a_shadow_transition_moves_exactly_the_lower_bound(pair: Pair) -> None:
    dag, changes = build(pair), diff(pair.current, pair.target, states=STATES)
    assert isinstance(dag, TransitionDag) and not isinstance(changes, Infeasible)
    bound = sum(
        int(lacking_elements(c.state.spec, c.source, c.new_buffers, pair.cluster.num_devices).sum())
        * c.state.element_bytes
        for c in changes
    )
    assert dag.moved_bytes == bound


@settings(max_examples=60, deadline=None)
@given(pair=pairs)
def test_a_chain_never_moves_less_than_the_reshard_that_replaces_it(pair: Pair) -> None:
    fused, chained = (
        build_dag(pair.current, pair.target, states=STATES, table=pair.table(), rates=RATES, fuse=fuse)
        for fuse in (True, False)
    )
    assert isinstance(fused, TransitionDag) and isinstance(chained, TransitionDag)
    assert fused.moved_bytes <= chained.moved_bytes
    used = {operation.primitive for operation in chained.operations if operation.source_stage == operation.model_stage}
    assert Primitive.RESHARD not in used


def start_times(dag: TransitionDag) -> tuple[float, ...]:
    """Start of every operation in seconds when each runs as soon as it may and links between nodes are not shared."""
    starts: list[float] = []
    for before, _ in zip(waits(dag), dag.loads, strict=True):
        starts.append(max((starts[i] + dag.loads[i].seconds for i in before), default=0.0))
    return tuple(starts)


def test_the_mode_is_shadow_where_old_and_new_fit_and_in_place_where_they_do_not() -> None:
    pair = pair_of(plan(actor_training="d4t2@0-7"), plan(actor_training="d2t4@0-7"))
    shadow, in_place = build(pair, room=1.6), build(pair, room=1.4)
    assert isinstance(shadow, TransitionDag) and shadow.mode is Mode.SHADOW
    assert isinstance(in_place, TransitionDag) and in_place.mode is Mode.IN_PLACE


def test_a_swap_with_no_room_stages_one_unit_in_host_memory() -> None:
    dag = build(SWAP, room=1.1, host_bytes=10**9)
    assert isinstance(dag, TransitionDag) and dag.mode is Mode.IN_PLACE
    primitives = [operation.primitive for operation in dag.operations]
    assert primitives.count(Primitive.OFFLOAD) == primitives.count(Primitive.RELOAD) == 1
    assert dag.operations[0].model_stage == CRITIC_TRAINING  # the smaller of the two
    outcome = check_feasible(dag, states=STATES, table=SWAP.table(room=1.1, host_bytes=10**9))
    assert isinstance(outcome, Feasible)


def test_a_swap_with_no_room_anywhere_is_refused_with_the_reason() -> None:
    dag = build(SWAP, room=1.1)
    assert isinstance(dag, Infeasible)
    assert "device" in dag.reason and "host memory" in dag.reason and "training" in dag.reason


def test_an_acquisition_waits_for_the_destroy_that_makes_room_and_for_nothing_else() -> None:
    pair = pair_of(
        plan(actor_training="d2t1@0-1", critic_training="t1@2"), plan(actor_training="t1@0", critic_training="t1@1")
    )
    dag = build(pair, room=1.0)
    assert isinstance(dag, TransitionDag) and dag.mode is Mode.IN_PLACE
    (edge,) = dag.resource_edges
    assert dag.operations[edge.before].model_stage == ACTOR_TRAINING
    assert dag.operations[edge.after].model_stage == CRITIC_TRAINING
    assert not build(pair).resource_edges  # type: ignore[union-attr]


jobs_lists = st.lists(
    st.tuples(st.floats(0.1, 5), st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=6
)  # fmt: skip


def random_jobs(rows: list[tuple[float, int, int]]) -> list[TimedOperation]:
    """Jobs with predecessors among earlier ones and symmetric conflicts."""
    conflicts = [[False] * len(rows) for _ in rows]
    for i, (_, _, mask) in enumerate(rows):
        for j in range(i):
            conflicts[i][j] = conflicts[j][i] = bool(mask >> j & 1)
    return [
        TimedOperation(
            seconds, after & ((1 << i) - 1) & 0b10101, sum(1 << j for j, both in enumerate(conflicts[i]) if both)
        )
        for i, (seconds, after, _) in enumerate(rows)
    ]


@settings(max_examples=80, deadline=None)
@given(rows=jobs_lists)
def test_the_order_found_is_as_short_as_the_best_of_all_orders(rows: list[tuple[float, int, int]]) -> None:
    jobs = random_jobs(rows)
    order = best_order(jobs, node_limit=100_000)
    assert sorted(order) == list(range(len(jobs)))
    assert all(not jobs[i].after & ~sum(1 << j for j in order[:place]) for place, i in enumerate(order))
    valid = (
        p
        for p in itertools.permutations(range(len(jobs)))
        if all(not jobs[i].after & ~sum(1 << j for j in p[:place]) for place, i in enumerate(p))
    )
    best = min(makespan(jobs, p) for p in valid)
    assert makespan(jobs, order) == pytest.approx(best)
    assert heaviest_clique(jobs) <= best * (1 + 1e-9)


def test_operations_on_disjoint_devices_run_at_once_and_on_common_ones_in_turn() -> None:
    apart = build(
        pair_of(
            plan(actor_training="t1@0", critic_training="t1@2"), plan(actor_training="t1@1", critic_training="t1@3")
        )
    )
    common = build(
        pair_of(
            plan(actor_training="t1@0", critic_training="t1@2"), plan(actor_training="t1@1", critic_training="t1@1")
        )
    )
    assert isinstance(apart, TransitionDag) and isinstance(common, TransitionDag)
    assert start_times(apart)[:2] == (0.0, 0.0)
    assert start_times(common)[1] >= common.seconds[0]


def test_a_shared_link_between_nodes_slows_what_crosses_it_at_once() -> None:
    current = plan(actor_training="t1@0", critic_training="t1@1")
    pair = pair_of(current, plan(actor_training="t1@2", critic_training="t1@3"), devices=2, nodes=2)
    shared = Rates(4e9, 1e9, 4e9, 2e9, setup_s=0.0, destroy_s=0.0, node_bytes_per_s=1e9)
    own = Rates(4e9, 1e9, 4e9, 2e9, setup_s=0.0, destroy_s=0.0)
    seconds: list[float] = []
    longest = total = 0.0
    for rates in (own, shared):
        dag = build_dag(pair.current, pair.target, states=STATES, table=pair.table(), rates=rates)
        assert isinstance(dag, TransitionDag)
        seconds.append(transition_seconds(dag, rates))
        longest, total = max(dag.seconds), float(dag.moved_bytes)
    assert seconds == [pytest.approx(longest), pytest.approx(total / 1e9)]


def test_a_target_device_that_is_not_there_is_named() -> None:
    pair = pair_of(plan(actor_training="t1@0"), plan(actor_training="t1@0"), devices=2)
    for device in (2, 70):
        dag = build_dag(
            pair.current, plan(actor_training=f"t1@{device}"), states=STATES, table=pair.table(), rates=RATES
        )  # fmt: skip
        assert isinstance(dag, Infeasible) and f"device {device}" in dag.reason


def test_devices_of_the_current_plan_that_are_gone_count_as_lost() -> None:
    small = pair_of(plan(actor_training="t1@0"), plan(actor_training="t1@0"), devices=2)
    current, target = plan(actor_training="d2t1@0,70"), plan(actor_training="d2t1@0-1")
    dag = build_dag(current, target, states=STATES, table=small.table(), rates=RATES)
    assert isinstance(dag, TransitionDag)
    (extend,) = dag.operations
    assert (extend.sources, extend.acquires) == (((0,),), (1,))
    gone = build_dag(plan(actor_training="t1@70"), target, states=STATES, table=small.table(), rates=RATES)
    assert isinstance(gone, Infeasible) and "checkpoint" in gone.reason


def test_equal_plans_give_an_empty_dag() -> None:
    pair = pair_of(plan(actor_training="t1@0"), plan(actor_training="t1@0"))
    assert build(pair) == TransitionDag(pair.current, pair.target, Mode.SHADOW)

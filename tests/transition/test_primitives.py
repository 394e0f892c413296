"""What an operation says of itself."""

from plan_pairs import CPU, RATES, STATES, Pair

from nereus.cluster import uniform_cluster
from nereus.plan import ACTOR_TRAINING, Layout, Plan
from nereus.transition.dag import build_dag
from nereus.transition.operations import Edge, EdgeKind, Load, Mode, Operation, Primitive, TransitionDag


def dag_of(current: str, target: str, *, fuse: bool = True, devices: int = 8) -> TransitionDag:
    cluster = uniform_cluster(num_nodes=1, devices_per_node=devices, accelerator=CPU)
    pair = Pair(cluster, Plan.parse({"actor-training": current}), Plan.parse({"actor-training": target}))
    dag = build_dag(pair.current, pair.target, states=STATES, table=pair.table(), rates=RATES, fuse=fuse)
    assert isinstance(dag, TransitionDag)
    return dag


def primitives(dag: TransitionDag) -> list[Primitive]:
    return [operation.primitive for operation in dag.operations]


def test_an_operation_names_its_devices_and_their_ranks() -> None:
    layout = Layout(tp=2)
    operation = Operation(
        0, Primitive.EXTEND, ACTOR_TRAINING, ACTOR_TRAINING, layout, ((0, 1),), layout, ((2, 3),), (2, 3)
    )
    assert operation.devices == {0, 1, 2, 3}
    assert operation.target_ranks() == {2: 0, 3: 1}
    assert operation.source_ranks() == {0: 0, 1: 1}
    assert str(operation) == "0 extend actor-training: 1 x t2p1 -> 1 x t2p1"


def test_a_destroy_involves_only_the_devices_that_free() -> None:
    layout = Layout(tp=2)
    operation = Operation(0, Primitive.DESTROY, ACTOR_TRAINING, ACTOR_TRAINING, layout, ((0, 1),), layout, (), (), (1,))
    assert operation.devices == {1}


def test_the_commit_of_a_shadow_transition_comes_before_its_destroys() -> None:
    dag = dag_of("d2t2@0-3", "d1t2@4-5")
    assert primitives(dag) == [Primitive.EXTEND, Primitive.DESTROY]
    assert dag.mode is Mode.SHADOW and dag.num_staged == 1
    assert dag.edges == (Edge(0, 1, EdgeKind.LOCAL),) and dag.after(1) == (0,)
    assert [operation.id for operation in dag.of_device(4)] == [0]


def test_more_replicas_are_an_extend_and_fewer_a_destroy() -> None:
    assert primitives(dag_of("d1t2@0-1", "d3t2@0-5")) == [Primitive.EXTEND]
    assert primitives(dag_of("d3t2@0-5", "d1t2@2-3")) == [Primitive.DESTROY]


def test_a_smaller_layout_on_the_same_devices_is_a_split_and_a_larger_one_a_merge() -> None:
    assert primitives(dag_of("d1t4@0-3", "d2t2@0,2,1,3")) == [Primitive.SPLIT, Primitive.DESTROY]
    merge = dag_of("d2t2@0,2,1,3", "d1t4@0-3")
    assert primitives(merge) == [Primitive.MERGE, Primitive.DESTROY]
    assert merge.moved_bytes == 0


def test_without_fusion_a_layout_change_goes_through_the_common_sub_layout() -> None:
    dag = dag_of("d1t4@0-3", "d1t2p2@2-5", fuse=False)
    assert primitives(dag) == [Primitive.SPLIT, Primitive.EXTEND, Primitive.MERGE, Primitive.DESTROY]
    assert dag.operations[0].target_layout == Layout(tp=2)
    fused = dag_of("d1t4@0-3", "d1t2p2@2-5")
    assert primitives(fused) == [Primitive.RESHARD, Primitive.DESTROY]
    assert fused.moved_bytes < dag.moved_bytes


def test_an_empty_dag_is_false_and_moves_nothing() -> None:
    dag = dag_of("d2t2@0-3", "d2t2@2,3,0,1")
    assert not dag and dag.moved_bytes == 0 and dag.seconds == ()
    assert Load(1.0).received_bytes == 0

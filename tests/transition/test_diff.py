"""What differs between two plans, and what does not."""

from hypothesis import given, settings
from plan_pairs import STATES, Pair, pairs

from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, Plan
from nereus.shards.moves import Holding, lower_bound_numel
from nereus.transition.diff import Change, diff
from nereus.transition.operations import Infeasible
from nereus.transition.price import Buffers, lacking_elements


def plan(**stages: str) -> Plan:
    return Plan.parse({name.replace("_", "-"): text for name, text in stages.items()})


def changes(current: Plan, target: Plan, *, lost: tuple[int, ...] = ()) -> tuple[Change, ...]:
    found = diff(current, target, states=STATES, lost=lost)
    assert not isinstance(found, Infeasible), found
    return found


def test_equal_plans_and_units_in_another_order_change_nothing() -> None:
    current = plan(actor_training="d2t2@0-3")
    assert changes(current, current) == ()
    assert changes(current, plan(actor_training="d2t2@2,3,0,1")) == ()


def test_units_recombined_from_the_same_ranks_change_nothing() -> None:
    assert changes(plan(actor_training="d2t2@0-3"), plan(actor_training="d2t2@0,3,2,1")) == ()


def test_only_devices_with_another_rank_or_layout_change() -> None:
    (change,) = changes(plan(actor_training="d2t2@0-3"), plan(actor_training="d2t2@0,1,2,4"))
    assert change.new_buffers.device_ids == (4,)
    assert change.old_buffers.device_ids == (3,)
    assert change.units_to_build == ((2, 4),)


def test_changes_come_in_the_order_generation_inference_training() -> None:
    before = plan(actor_training="t2@0-1", critic_inference="t1@2", actor_generation="t1@3", critic_training="t1@3")
    after = plan(actor_training="t1@0", critic_inference="t1@1", actor_generation="t2@2-3", critic_training="t1@2")
    assert [str(change.model_stage.stage) for change in changes(before, after)] == [
        "generation",
        "inference",
        "training",
        "training",
    ]


def test_generation_that_gets_units_of_its_own_reads_those_of_training() -> None:
    shared = plan(actor_training="t2@0-1", actor_generation="t2@0-1")
    (change,) = changes(shared, plan(actor_training="t2@0-1", actor_generation="t1@2"))
    assert (change.model_stage, change.source_stage) == (ACTOR_GENERATION, ACTOR_TRAINING)
    assert len(change.current.devices) == 0
    (back,) = changes(plan(actor_training="t2@0-1", actor_generation="t1@2"), shared)
    assert back.target_plan is None and back.old_buffers.device_ids == (2,)


def test_units_are_recombined_from_what_lives_after_a_loss() -> None:
    current = plan(actor_training="d2t2@0-3")
    assert changes(current, plan(actor_training="d1t2@2,1"), lost=(0, 3)) == ()
    (change,) = changes(current, plan(actor_training="d1t2@4,1"), lost=(0, 3))
    assert change.source_plan.units == ((2, 1),)
    assert (change.new_buffers.device_ids, change.old_buffers.device_ids) == ((4,), (2,))


def test_a_loss_without_a_living_copy_is_refused_and_names_the_model_stage() -> None:
    found = diff(plan(critic_training="t2@0-1"), plan(critic_training="t1@1"), states=STATES, lost=(0,))
    assert isinstance(found, Infeasible) and "critic-training" in found.reason and "checkpoint" in found.reason


def test_lost_generation_is_rebuilt_from_training() -> None:
    current = plan(actor_training="t1@0", actor_generation="t1@1")
    (change,) = changes(current, plan(actor_training="t1@0", actor_generation="t2@2-3"), lost=(1,))
    assert change.source_stage == ACTOR_TRAINING


def test_a_target_plan_that_drops_a_model_stage_is_refused() -> None:
    found = diff(
        plan(actor_training="t1@0", critic_training="t1@1"), plan(actor_training="t1@0"), states=STATES
    )  # fmt: skip
    assert isinstance(found, Infeasible) and "critic-training" in found.reason


@settings(max_examples=60, deadline=None)
@given(pair=pairs)
def test_lacking_elements_sum_to_the_lower_bound_of_a_move(pair: Pair) -> None:
    size = pair.cluster.num_devices
    for model_stage, target in pair.target.stages:
        source, spec = pair.current[model_stage], STATES[model_stage].spec
        lacking = lacking_elements(spec, Buffers.of(source), Buffers.of(target), size)
        assert lacking.sum() == lower_bound_numel(spec, Holding.of(source), Holding.of(target))

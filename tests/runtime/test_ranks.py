"""The groups of every rank: who is in them, in which order, under which name."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import SPEC

from nereus.comm.groups import GroupSpec
from nereus.plan import ACTOR_TRAINING, Layout, StagePlan
from nereus.runtime.ranks import RankGroupSpecs, rank_group_specs

TIED = dataclasses.replace(SPEC, tied=True)
NAMES = ("tp", "pp", "dp", "tie", "all")


def specs_of(plan: StagePlan, *, tied: bool = False, epoch: int = 0) -> dict[int, RankGroupSpecs]:
    spec = TIED if tied else SPEC
    return {d: rank_group_specs(spec, ACTOR_TRAINING, plan, d, epoch=epoch) for d in plan.devices}


@settings(deadline=None, max_examples=60)
@given(tp=st.integers(1, 4), pp=st.integers(1, 4), dp=st.integers(1, 4), tied=st.booleans(), data=st.data())
def test_all_members_of_a_group_know_it_under_the_same_name_and_order(
    tp: int, pp: int, dp: int, tied: bool, data: st.DataObject
) -> None:
    devices = data.draw(st.permutations(range(tp * pp * dp)))
    specs = specs_of(StagePlan.of(Layout(tp=tp, pp=pp), devices), tied=tied)
    groups: dict[str, GroupSpec] = {}
    for device, of_device in specs.items():
        for name in NAMES:
            group: GroupSpec = getattr(of_device, name)
            assert device in group.devices
            if group.size > 1:
                assert groups.setdefault(group.name, group) == group
    for group in groups.values():
        kind = [name for name in NAMES if getattr(specs[group.devices[0]], name) == group]
        assert all(any(getattr(specs[device], name) == group for name in kind) for device in group.devices)


def test_groups_hold_the_ranks_they_are_for() -> None:
    """Two units of t2p2 on devices 0-7: ranks are pipeline stage after pipeline stage, tensor-parallel rank fastest."""
    specs = specs_of(StagePlan.of(Layout(tp=2, pp=2), range(8)), tied=True)
    assert specs[2].tp.devices == specs[3].tp.devices == (2, 3)
    assert specs[2].pp.devices == specs[0].pp.devices == (0, 2)
    assert specs[2].dp.devices == specs[6].dp.devices == (2, 6)
    assert specs[2].tie.devices == specs[0].tie.devices == (0, 2)
    assert specs[5].all.devices == tuple(range(8))


@pytest.mark.parametrize(("layout", "tied"), [(Layout(pp=1), True), (Layout(pp=3), False)])
def test_embeddings_that_are_not_tied_across_stages_need_no_group(layout: Layout, tied: bool) -> None:
    assert all(of.tie.size == 1 for of in specs_of(StagePlan.of(layout, range(layout.num_ranks)), tied=tied).values())


def test_the_middle_of_a_pipeline_takes_no_part_in_tied_embeddings() -> None:
    specs = specs_of(StagePlan.of(Layout(pp=3), range(3)), tied=True)
    assert [specs[device].tie.size for device in range(3)] == [2, 1, 2]


def test_two_generations_share_no_name() -> None:
    plan = StagePlan.of(Layout(tp=2, pp=2), range(4))
    old, new = specs_of(plan, epoch=3), specs_of(plan, epoch=4)
    names = [{getattr(of, name).name for of in specs.values() for name in NAMES} for specs in (old, new)]
    assert not names[0] & names[1]


def test_a_device_outside_the_plan_has_no_groups() -> None:
    with pytest.raises(AssertionError, match="device 9 has no part"):
        rank_group_specs(SPEC, ACTOR_TRAINING, StagePlan.of(Layout(), [0]), 9, epoch=0)

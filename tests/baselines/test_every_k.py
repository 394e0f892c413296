"""The policy that replans every k steps, driven by the decider that drives every policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_outlook import TableOutlook, lengths, plan_on, report

from nereus.baselines.every_k import EveryK, IntervalTrigger
from nereus.decide.decider import Decider
from nereus.decide.ruling import Action
from nereus.decide.triggers import Aborted, BoundaryReached, Moved, Replanned, StepEnded
from nereus.supply.supply import SupplyView

FOUR = SupplyView((0, 1, 2, 3))


def rulings_of(every, steps, *, outlook=None, plan=None, view=lambda step: FOUR):
    """A run on the table's own times; every move is made at once."""
    outlook = outlook or TableOutlook(transition_s=900.0)
    deciding, rulings = Decider(EveryK(every), outlook, plan or plan_on(0, 1), lengths=lengths()), []
    for step in range(1, steps + 1):
        rulings.append(ruling := deciding.boundary(step, view(step)))
        if ruling.target is not None:
            deciding.moved(ruling.target, seconds=1.0, predicted_s=900.0)
        deciding.observe(report(step, 4.0 / len(deciding.plan.devices)))
    return rulings


@pytest.mark.parametrize("every", [1, 3, 7])
def test_it_replans_every_k_steps_and_moves_to_what_is_faster_whatever_moving_takes(every):
    outlook = TableOutlook(transition_s=900.0)
    rulings = rulings_of(every, 22, outlook=outlook)
    replanned = [r.step for r in rulings if r.triggers]
    assert replanned == list(range(every + 1, 23, every)) and outlook.searches == len(replanned)
    assert [(r.step, r.target) for r in rulings if r.action is Action.MOVE] == [(every + 1, plan_on(0, 1, 2, 3))]
    moved = rulings[every].verdict
    assert moved.name == "admit" and moved.reason == "Moving saves 1 s of 2 s a step; what it takes is not asked."
    assert rulings[every].events[0].signal == "interval"


def test_a_plan_that_cannot_be_reached_gives_way_to_a_slower_one_that_is_still_faster():
    outlook = TableOutlook(infeasible=frozenset({plan_on(0, 1, 2, 3)}), extra=(plan_on(0, 1, 2), plan_on(3)))
    assert [r.target for r in rulings_of(2, 3, outlook=outlook) if r.target] == [plan_on(0, 1, 2)]
    none = TableOutlook(infeasible=frozenset({plan_on(0, 1, 2, 3)}), extra=(plan_on(3),))
    declined = rulings_of(2, 3, outlook=none)[2].verdict
    assert not declined.moves and declined.target == plan_on(0, 1, 2, 3) and "no room" in declined.reason


def test_a_lost_device_is_left_at_once_and_the_count_begins_anew():
    rulings = rulings_of(4, 12, plan=plan_on(0, 1, 2, 3), view=lambda s: FOUR if s < 3 else SupplyView((0, 1, 2)))
    assert [(r.step, r.verdict.name) for r in rulings if r.verdict] == [(3, "urgent"), (7, "decline"), (11, "decline")]


@given(
    every=st.integers(1, 5),
    moments=st.lists(
        st.sampled_from(
            [StepEnded(1.0, None), BoundaryReached(frozenset(), None), Replanned((), None), Moved(), Aborted()]
        )
    ),
)
@settings(max_examples=100, deadline=None)
def test_the_interval_counts_steps_since_the_last_replan(every, moments):
    trigger, since = IntervalTrigger(every), 0
    for moment in moments:
        before = repr(trigger)
        after, fired = trigger.seen(moment)
        assert repr(trigger) == before, "a trigger never changes"
        since = 0 if isinstance(moment, Replanned) else since + isinstance(moment, StepEnded)
        assert (fired is not None) == (isinstance(moment, StepEnded) and since >= every)
        trigger = after

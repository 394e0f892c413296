"""Triggers are state machines over written sequences; every expectation is worked out by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.decide.crossings import Crossings
from nereus.decide.triggers import (
    Aborted,
    BoundaryReached,
    Drift,
    EfficiencyTrigger,
    FellBack,
    Fired,
    LengthTrigger,
    LossTrigger,
    MemoryTrigger,
    Moved,
    Replanned,
    ScriptedTrigger,
    Signal,
    StartTrigger,
    StepEnded,
    SupplyTrigger,
)


def fired(drift: Drift, values: list[float]) -> list[int]:
    """Indices at which the drift fires when every firing is followed by a reset, as at a replan."""
    found = []
    for index, value in enumerate(values):
        drift, trigger = drift.seen(value)
        if trigger:
            found.append(index)
            drift = drift.reset()
    return found


def test_a_length_fires_when_it_leaves_its_reference_by_more_than_the_threshold():
    drift = Drift(Signal.LENGTH, 0.30)
    drift, first = drift.seen(100.0)
    drift, at_threshold = drift.seen(130.0)
    drift, beyond = drift.seen(131.0)
    assert first is None and at_threshold is None
    assert beyond == Fired(Signal.LENGTH, 131.0, 100.0, 0.30, "length +31% (100 -> 131)")


def test_the_reference_is_reset_at_every_replan_so_growth_fires_again_and_again():
    assert fired(Drift(Signal.LENGTH, 0.30), [100, 120, 140, 160, 180, 190, 100]) == [2, 5, 6]


def test_without_a_reset_a_signal_that_stays_beyond_fires_at_every_step():
    drift, count = Drift(Signal.LENGTH, 0.30), 0
    for value in (100.0, 140.0, 140.0):
        drift, trigger = drift.seen(value)
        count += trigger is not None
    assert count == 2


def test_one_outlier_in_a_smoothed_window_fires_nothing():
    assert fired(Drift(Signal.EFFICIENCY, 0.15, size=5), [1.0] * 7 + [9.0] + [1.0] * 7) == []


def test_a_lasting_change_of_efficiency_fires_within_its_window():
    steps = fired(Drift(Signal.EFFICIENCY, 0.15, size=5), [1.0] * 10 + [1.4] * 10)
    assert steps and 10 < steps[0] < 15


def told(trigger, moments):
    """What a trigger fires at each of these moments."""
    found = []
    for moment in moments:
        trigger, fired = trigger.seen(moment)
        found.append(fired)
    return found


def devices(*ids):
    return BoundaryReached(frozenset(ids), 0.5)


def memory(share):
    return BoundaryReached(frozenset({0}), share)


TRIGGERS = [
    LengthTrigger.of(0.3), EfficiencyTrigger.of(0.15), StartTrigger(), SupplyTrigger(), MemoryTrigger(),
    LossTrigger(), ScriptedTrigger(frozenset({2, 5})),
]  # fmt: skip
"""All of them: a trigger that is added is added here."""

MOMENTS = st.one_of(
    st.builds(StepEnded, st.floats(1, 1e4), st.none() | st.floats(0.1, 10)),
    st.builds(BoundaryReached, st.frozensets(st.integers(0, 5)), st.none() | st.floats(0, 2)),
    st.builds(Replanned, st.lists(st.floats(0.1, 10), max_size=5).map(tuple), st.none() | st.floats(0.1, 10)),
    st.just(Moved()),
    st.just(Aborted()),
    st.just(FellBack()),
)


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: type(trigger).__name__)
@given(moments=st.lists(MOMENTS, max_size=40))
@settings(max_examples=100, deadline=None)
def test_every_trigger_is_a_value_and_fires_at_steps_and_boundaries_alone(trigger, moments):
    before = repr(trigger)
    found = told(trigger, moments)
    assert repr(trigger) == before and told(trigger, moments) == found, "a trigger never changes"
    for moment, fired in zip(moments, found, strict=True):
        if fired is not None:
            assert isinstance(moment, StepEnded | BoundaryReached)
            assert fired.signal and str(fired), "it has a name and reads as what happened"


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: type(trigger).__name__)
@given(moments=st.lists(MOMENTS, max_size=40), ratio=st.floats(0.1, 10), share=st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_no_trigger_fires_at_what_it_was_replanned_for(trigger, moments, ratio, share):
    """A replan looks at what is seen then; the same seen again is no news to any trigger that does not count steps."""
    if isinstance(trigger, StartTrigger | ScriptedTrigger):
        return
    boundary, step = BoundaryReached(frozenset({0, 1}), share), StepEnded(100.0, ratio)
    ratios = (ratio,) * 5
    found = told(trigger, [*moments, step, boundary, Replanned(ratios, None), step, boundary])
    assert found[-2:] == [None, None]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_noise_whose_extremes_lie_within_the_threshold_of_each_other_fires(noise):
    threshold = 0.15
    amplitude = threshold / (2 + threshold) * 0.999
    assert fired(Drift(Signal.EFFICIENCY, threshold, size=5), [1 + amplitude * x for x in noise]) == []


@pytest.mark.parametrize("seed", range(5))
def test_gaussian_noise_of_five_percent_does_not_fire_efficiency_in_a_thousand_steps(seed):
    draw = random.Random(seed)
    assert fired(Drift(Signal.EFFICIENCY, 0.15, size=5), [draw.gauss(1, 0.05) for _ in range(1000)]) == []


def test_a_window_without_a_reference_takes_its_first_full_value():
    drift = Drift(Signal.EFFICIENCY, 0.15, size=3)
    for value in (1.0, 2.0, 3.0):
        drift, trigger = drift.seen(value)
        assert trigger is None
    assert drift.reference == 2.0


def test_supply_fires_at_once_and_only_on_a_change_of_devices():
    first, same, grown, swapped, again = told(
        SupplyTrigger(), [devices(0, 1), devices(1, 0), devices(0, 1, 2), devices(0, 1, 3), devices(0, 1, 3)]
    )
    assert first is None and same is None
    assert grown == Fired(Signal.SUPPLY, 3, 2, 0.0, "devices: 2 -> 3")
    assert swapped == Fired(Signal.SUPPLY, 3, 3, 0.0, "devices: 3 -> 3")
    assert again is None


def test_memory_fires_when_it_is_crossed_and_again_only_when_it_has_grown():
    asked = told(MemoryTrigger(), [memory(share) for share in (0.99, 1.01, 1.02, 1.05, 0.9, 1.01)])
    assert [fired is not None for fired in asked] == [False, True, False, True, False, True]


def test_memory_fires_again_after_the_move_that_was_to_relieve_it_was_aborted():
    crossed, same, _, again = told(MemoryTrigger(), [memory(1.2), memory(1.2), Aborted(), memory(1.2)])
    assert crossed == again and crossed is not None and same is None


def test_the_first_measured_steps_fire_once_and_those_of_a_warm_up_do_not_count():
    steps = [StepEnded(100.0, None)] * 2 + [StepEnded(100.0, 1.0)] * 10
    assert [i for i, fired in enumerate(told(StartTrigger(), steps)) if fired] == [4]


def test_units_that_were_lost_fire_once_at_the_next_boundary():
    found = told(LossTrigger(), [devices(0), FellBack(), StepEnded(100.0, 1.0), devices(0), devices(0)])
    assert [i for i, fired in enumerate(found) if fired] == [3] and found[3].signal == "start"


def test_after_a_move_efficiency_keeps_its_reference_and_sees_a_whole_window_before_it_fires():
    told_of = [StepEnded(100.0, 1.0)] * 5 + [Moved()] + [StepEnded(100.0, 1.2)] * 5
    found = told(EfficiencyTrigger.of(0.15), told_of)
    assert [i for i, fired in enumerate(found) if fired] == [10]
    assert found[10].reference == 1.0


@pytest.mark.parametrize(("ratios", "expected", "reference"), [((), 1.1, 1.1), ((1.0, 3.0, 2.0), 1.1, 2.0)])
def test_a_replan_gives_efficiency_the_ratios_of_now_or_where_they_are_few_what_is_expected(
    ratios, expected, reference
):
    trigger, _ = EfficiencyTrigger.of(0.15).seen(Replanned(ratios, expected))
    assert trigger.drift.reference == reference and trigger.drift.window == ratios


def test_the_horizon_is_one_step_until_a_signal_has_crossed_twice():
    crossings = Crossings()
    assert crossings.horizon_steps([Signal.LENGTH]) == 1.0
    crossings = crossings.crossed([Signal.LENGTH], 40)
    assert crossings.horizon_steps([Signal.LENGTH]) == 1.0
    crossings = crossings.crossed([Signal.LENGTH], 60)
    assert crossings.horizon_steps([Signal.LENGTH]) == 20.0
    assert crossings.crossed([Signal.LENGTH], 70).horizon_steps([Signal.LENGTH]) == 15.0


def test_the_smallest_horizon_counts_where_several_signals_triggered():
    crossings = Crossings()
    for step in (10, 20):
        crossings = crossings.crossed([Signal.LENGTH], step)
    for step in (10, 90):
        crossings = crossings.crossed([Signal.SUPPLY], step)
    assert crossings.horizon_steps([Signal.SUPPLY]) == 80.0
    assert crossings.horizon_steps([Signal.LENGTH, Signal.SUPPLY]) == 10.0
    assert crossings.horizon_steps([Signal.SUPPLY, Signal.MEMORY]) == 1.0


@given(st.lists(st.integers(1, 50), min_size=2, max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_horizon_equals_the_average_computed_from_all_intervals(gaps):
    crossings, step = Crossings().crossed([Signal.LENGTH], 0), 0
    for gap in gaps:
        step += gap
        crossings = crossings.crossed([Signal.LENGTH], step)
    expected = gaps[0] * 0.5 ** (len(gaps) - 1) + sum(
        gap * 0.5 ** (len(gaps) - i) for i, gap in enumerate(gaps) if i > 0
    )
    assert crossings.horizon_steps([Signal.LENGTH]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("trigger", "moments", "text"),
    [
        (LengthTrigger.of(0.3), [StepEnded(100.0, 1.0), StepEnded(140.0, 1.0)], "length +40% (100 -> 140)"),
        (SupplyTrigger(), [devices(0, 1, 2, 3), devices(0, 1, 2)], "devices: 4 -> 3"),
        (MemoryTrigger(), [memory(1.04)], "a device would need 1.040 of what it may use"),
        (StartTrigger(), [StepEnded(100.0, 1.0)] * 3, "the first 3 steps are measured"),
    ],
)
def test_what_fires_reads_as_what_happened(trigger, moments, text):
    assert str(told(trigger, moments)[-1]) == text

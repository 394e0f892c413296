"""Triggers are state machines over written sequences; every expectation is worked out by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.decide.triggers import Crossings, Drift, Memory, Signal, Supply, Trigger


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
    assert beyond == Trigger(Signal.LENGTH, 131.0, 100.0, 0.30)


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
    supply, first = Supply().seen([0, 1])
    supply, same = supply.seen([1, 0])
    supply, grown = supply.seen([0, 1, 2])
    supply, swapped = supply.seen([0, 1, 3])
    assert first is None and same is None
    assert grown == Trigger(Signal.SUPPLY, 3, 2, 0.0)
    assert swapped == Trigger(Signal.SUPPLY, 3, 3, 0.0)
    assert supply.seen([0, 1, 3])[1] is None


def test_memory_fires_when_it_is_crossed_and_again_only_when_it_has_grown():
    memory, fits = Memory().seen(0.99)
    memory, crossed = memory.seen(1.01)
    memory, same = memory.seen(1.02)
    memory, grown = memory.seen(1.05)
    memory, back = memory.seen(0.9)
    _, once_more = memory.seen(1.01)
    assert [t is not None for t in (fits, crossed, same, grown, back, once_more)] == [
        False, True, False, True, False, True,
    ]  # fmt: skip


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
    ("trigger", "text"),
    [
        (Trigger(Signal.LENGTH, 140, 100, 0.3), "length +40% (100 -> 140)"),
        (Trigger(Signal.SUPPLY, 3, 4, 0), "devices: 4 -> 3"),
        (Trigger(Signal.MEMORY, 1.04, 1, 1), "a device would need 1.040 of what it may use"),
        (Trigger(Signal.START, 3, 0, 0), "the first 3 steps are measured"),
    ],
)
def test_a_trigger_reads_as_what_happened(trigger, text):
    assert str(trigger) == text

"""The account of measured steps, against one that keeps everything."""

import statistics

from hypothesis import given, settings
from hypothesis import strategies as st
from table_outlook import TableOutlook, lengths, plan_on, report

from nereus.decide.measured import RECENT_STEPS, REMEMBERED_PLANS, Measured
from nereus.decide.triggers import EFFICIENCY_WINDOW, MEASURED_STEPS

PLANS = [plan_on(*range(n)) for n in range(1, REMEMBERED_PLANS + 1)]


def predicted_s(plan, mean):
    return TableOutlook().predict(plan, lengths(mean)).step_s


def ratio(steps):
    """The slow way: the median over written steps, None where they are few."""
    last = [step_s / predicted_s(plan, mean) for plan, step_s, mean in steps[-EFFICIENCY_WINDOW:]]
    return statistics.median(last) if len(last) >= MEASURED_STEPS else None


@given(
    warmup=st.integers(0, 4),
    course=st.lists(st.tuples(st.sampled_from(PLANS), st.floats(0.1, 10), st.floats(10, 500)), min_size=1, max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_what_is_remembered_is_what_a_full_record_says(warmup, course):
    measured, outlook, plan, since_move = Measured(), TableOutlook(), None, []
    for index, (now, step_s, mean) in enumerate(course):
        if now != plan:
            plan, measured, since_move = now, measured.moved(), []
        counts = index >= warmup
        measured = measured.seen(plan, ended := report(index + 1, step_s, mean), counts=counts)
        since_move += [ended] if counts else []
    counted = course[warmup:]
    assert list(measured.on_plan) == since_move[-EFFICIENCY_WINDOW:]
    newest = list(dict.fromkeys(step[0] for step in reversed(counted)))
    assert list(measured.by_plan) == newest[::-1], "the newest last"
    last_means = [mean for _, _, mean in course[-RECENT_STEPS:]]
    assert measured.lengths == lengths_of(last_means) and measured.last_s == course[-1][1]
    for known in PLANS:
        assert measured.ratio_on(known, outlook) == ratio([step for step in counted if step[0] == known])
    now = (ratio([step for step in counted if step[0] == plan]), ratio(counted), 1.0)
    assert measured.ratio_now(plan, outlook) == next(found for found in now if found is not None)


def lengths_of(means):
    count = len(means)
    found = [lengths(mean) for mean in means]
    return type(found[0])(
        sum(x.mean for x in found) / count, sum(x.p95 for x in found) / count, max(x.longest for x in found), 20.0
    )


def test_one_plan_too_many_lets_the_one_that_was_left_longest_ago_be_forgotten():
    measured, other = Measured(), plan_on(5)
    for step, plan in enumerate([*PLANS, PLANS[0], other, PLANS[1]], start=1):
        measured = measured.moved().seen(plan, report(step, 1.0), counts=True)
    assert list(measured.by_plan) == [PLANS[3], PLANS[0], other, PLANS[1]]
    assert [len(steps) for steps in measured.by_plan.values()] == [1, 2, 1, 1], "what comes back begins anew"


def test_before_the_first_step_nothing_is_known():
    measured = Measured()
    assert measured.lengths is None and measured.on_plan == () and measured.last_s == 0.0
    assert measured.ratio_now(PLANS[0], TableOutlook()) == 1.0 and measured.ratio_on(PLANS[0], TableOutlook()) is None

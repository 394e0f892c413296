"""The admission rule on written numbers."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_outlook import plan_on

from nereus.decide.admission import (
    CORRECTION_BOUNDS,
    Aborts,
    Admit,
    Assessment,
    Decline,
    Numbers,
    Offer,
    Terms,
    TransitionCorrection,
    Urgent,
    judge,
    judge_urgent,
)
from nereus.transition.operations import Infeasible

CURRENT, FAST, NEAR = plan_on(0, 1), plan_on(0, 1, 2, 3), plan_on(0, 1, 2)


def terms(*, horizon=10.0, gamma=0.5, best=False):
    return Terms(CURRENT, 2.0, horizon, gamma, best_margin=best)


def costs(**seconds):
    """An assessment by plan; a string is a reason why it cannot be made."""
    table = {FAST: seconds.get("fast", 1.0), NEAR: seconds.get("near", 1.0)}

    def assess(plan):
        found = table[plan]
        if isinstance(found, str):
            return Infeasible(found)
        return Assessment(found)

    return assess


OFFERS = [Offer(FAST, 1.0), Offer(NEAR, 1.4)]


def test_a_move_is_admitted_up_to_exactly_gamma_times_the_horizon():
    at_limit = judge(OFFERS, terms(), costs(fast=5.0))
    beyond = judge(OFFERS, terms(), costs(fast=math.nextafter(5.0, 6.0)))
    assert isinstance(at_limit, Admit) and at_limit.target == FAST
    assert isinstance(beyond, Decline) and beyond.target == FAST


@given(
    current=st.floats(0.01, 100), target=st.floats(0.01, 100), cost=st.floats(0, 1000), horizon=st.floats(1, 1000),
    gamma=st.floats(0.01, 2),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_rule_is_the_specification_s_formula(current, target, cost, horizon, gamma):
    saving = current - target
    expected = saving > 0 and cost / saving <= gamma * horizon
    verdict = judge([Offer(FAST, target)], Terms(CURRENT, current, horizon, gamma), lambda _: Assessment(cost))
    assert isinstance(verdict, Admit) == expected


def test_every_number_of_a_verdict_is_there_and_its_sentence_says_them():
    verdict = judge(OFFERS, terms(), costs(fast=8.0))
    assert verdict.numbers == Numbers(2.0, 1.0, 8.0, 10.0, 0.5)
    assert (verdict.numbers.saving_s, verdict.numbers.payback_steps, verdict.numbers.margin_s) == (1.0, 8.0, -3.0)
    assert verdict.reason == (
        "Moving takes 8 s and saves 1 s of 2 s a step (50.0%), so it pays back after 8 steps; 5 are allowed "
        "(0.5 of the 10 until the next change is expected)."
    )


def test_gamma_zero_admits_not_even_what_is_free():
    verdict = judge(OFFERS, terms(gamma=0.0), costs(fast=0.0))
    assert isinstance(verdict, Decline)
    assert verdict.reason.endswith("gamma 0 admits urgent moves only.")


def test_a_slower_target_is_declined_without_a_payback():
    verdict = judge([Offer(FAST, 2.5)], terms(), costs())
    assert isinstance(verdict, Decline) and verdict.numbers.payback_steps is None
    assert verdict.reason == "The best target would take 2.5 s a step, no less than the 2 s of the plan in force."


def test_the_plan_in_force_is_no_target():
    verdict = judge([Offer(CURRENT, 1.0)], terms(), costs())
    assert verdict == Decline(None, "The plan in force is the fastest that fits.", None)


@pytest.mark.parametrize("best", [False, True])
def test_an_infeasible_target_falls_back_to_the_next(best):
    verdict = judge(OFFERS, terms(best=best), costs(fast="device 0 has no room"))
    assert isinstance(verdict, Admit) and verdict.target == NEAR


def test_where_no_target_can_be_reached_the_first_reason_is_given():
    verdict = judge(OFFERS, terms(), costs(fast="device 0 has no room", near="neither here"))
    assert verdict == Decline(FAST, "No target can be reached: device 0 has no room.", None)


def test_the_paper_judges_the_fastest_feasible_target_alone():
    assert isinstance(judge(OFFERS, terms(), costs(fast=50.0, near=0.1)), Decline)


def test_the_default_takes_the_target_that_earns_most_within_the_horizon():
    cheap = judge(OFFERS, terms(best=True), costs(fast=4.0, near=0.1))
    assert isinstance(cheap, Admit) and cheap.target == NEAR, "5 x 0.6 - 0.1 beats 5 x 1.0 - 4.0"
    fast = judge(OFFERS, terms(best=True, horizon=100.0), costs(fast=4.0, near=0.1))
    assert isinstance(fast, Admit) and fast.target == FAST


@given(
    steps=st.lists(st.floats(0.1, 3), min_size=2, max_size=2),
    prices=st.lists(st.floats(0, 50), min_size=2, max_size=2),
    horizon=st.floats(1, 100),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_default_admits_whenever_the_paper_does_and_earns_no_less(steps, prices, horizon):
    steps.sort()
    offers, assess = [Offer(FAST, steps[0]), Offer(NEAR, steps[1])], costs(fast=prices[0], near=prices[1])
    paper, ours = (
        judge(offers, terms(horizon=horizon), assess),
        judge(offers, terms(horizon=horizon, best=True), assess),
    )
    if isinstance(paper, Admit):
        assert isinstance(ours, Admit)
    assert ours.numbers.margin_s >= paper.numbers.margin_s


def test_an_offer_that_ends_early_must_pay_until_then():
    offer = Offer(FAST, 1.0, horizon_steps=4.0, bound="device 3 leaves")
    assert isinstance(judge([offer], terms(), costs(fast=2.0)), Admit)
    verdict = judge([offer], terms(), costs(fast=3.0))
    assert isinstance(verdict, Decline)
    assert verdict.reason.endswith("2 are allowed (0.5 of the 4 until device 3 leaves).")


def test_an_urgent_move_asks_for_feasibility_alone():
    verdict = judge_urgent(OFFERS, current_s=0.5, cause="device 1 is gone", assess=costs(fast=1e9))
    assert isinstance(verdict, Urgent) and verdict.target == FAST
    assert "device 1 is gone" in verdict.reason


def test_an_urgent_move_without_a_way_is_declined_with_both_reasons():
    verdict = judge_urgent(OFFERS, current_s=2.0, cause="device 1 is gone", assess=costs(fast="no room", near="none"))
    nothing = judge_urgent([], current_s=2.0, cause="device 1 is gone", assess=costs())
    assert isinstance(verdict, Decline) and verdict.target == FAST and "no room" in verdict.reason
    assert isinstance(nothing, Decline) and nothing.target is None and "no plan fits" in nothing.reason


def test_the_correction_approaches_the_measured_ratio():
    correction = TransitionCorrection()
    for _ in range(20):
        correction = correction.observed(predicted_s=2.0, measured_s=6.0)
    assert correction.corrected(10.0) == pytest.approx(30.0, rel=1e-3)


def test_one_measurement_moves_the_correction_halfway_and_never_beyond_its_bounds():
    assert TransitionCorrection().observed(predicted_s=1.0, measured_s=4.0).factor == pytest.approx(2.0)
    correction = TransitionCorrection()
    for _ in range(50):
        correction = correction.observed(predicted_s=1e-9, measured_s=1e9)
    assert correction.factor == pytest.approx(CORRECTION_BOUNDS[1])
    assert correction.observed(predicted_s=0.0, measured_s=1.0) == correction


def test_the_n_th_abort_in_a_row_closes_a_target_for_two_to_the_n_steps_and_success_opens_it():
    target, other = plan_on(0), plan_on(1)
    aborts = Aborts().aborted(target, 10)
    assert aborts.closed(target, 11) and aborts.closed(target, 12) is None and aborts.closed(other, 11) is None
    assert aborts.closed(target, 11, urgent=True) is None, "an urgent move is tried once more"
    again = aborts.aborted(target, 12)
    assert again.closed(target, 15) and again.closed(target, 15, urgent=True) and again.closed(target, 16) is None
    assert again.reached(target) == Aborts()

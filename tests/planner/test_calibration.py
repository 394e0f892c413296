import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.cluster import Accelerator, Link
from nereus.engine_facts import Op
from nereus.planner.prices.calibration import FACTOR_BOUNDS, Calibration, prior_line
from nereus.planner.prices.operations import KEYS, key_name, parse_key

PEAK = 989e12


def gemm_seconds(work, calls, *, efficiency, fixed_s):
    return calls * fixed_s + work / (PEAK * efficiency)


def learned_gemm(*, efficiency=0.45, fixed_s=40e-6, noise=0.02, times=60, accelerator="h100"):
    calibration, rng = Calibration(), random.Random(0)
    for _ in range(times):
        calls = rng.randint(1, 50)
        work = calls * rng.choice((1e9, 1e10, 1e11, 1e12))
        seconds = gemm_seconds(work, calls, efficiency=efficiency, fixed_s=fixed_s) * rng.gauss(1, noise)
        calibration.observe(Op.GEMM, work, calls, seconds, accelerator=accelerator)
    return calibration


def test_class_names_are_read_back():
    assert [parse_key(key_name(key)) for key in KEYS] == list(KEYS)


def test_an_unseen_class_starts_at_a_conservative_prior():
    calibration = Calibration()
    for key in KEYS:
        fixed, per_work = calibration.line(key, "h100")
        assert (fixed, per_work) == pytest.approx(prior_line(calibration._accelerators["h100"], key))
    assert calibration.efficiency(Op.GEMM, "h100") < 0.79
    assert calibration.observations(Op.GEMM, "h100") == 0


def test_fixed_part_and_efficiency_are_recovered_from_noisy_times():
    calibration = learned_gemm()
    fixed, _ = calibration.line((Op.GEMM, None), "h100")
    assert calibration.efficiency(Op.GEMM, "h100") == pytest.approx(0.45, rel=0.05)
    assert fixed == pytest.approx(40e-6, rel=0.15)


def test_totals_of_several_classes_teach_each_of_them():
    truth = {(Op.GEMM, None): 0.4, (Op.ALL_REDUCE, Link.INTRA_NODE): 0.3, (Op.ELEMENTWISE, None): 0.5}
    peaks = {(Op.GEMM, None): PEAK, (Op.ALL_REDUCE, Link.INTRA_NODE): 450e9, (Op.ELEMENTWISE, None): 3350e9}
    calibration, rng = Calibration(), random.Random(1)
    for _ in range(200):
        entries = [(key, rng.uniform(0.01, 1) * peaks[key] * truth[key], 0.0) for key in truth]
        seconds = sum(work / (peaks[key] * truth[key]) for key, work, _ in entries)
        calibration.observe_total(entries, seconds, accelerator="h100")
    for (op, link), efficiency in truth.items():
        assert calibration.efficiency(op, "h100", link=link) == pytest.approx(efficiency, rel=0.05)


def observe_reductions(calibration, seconds):
    for each in seconds:
        calibration.observe("all_reduce@inter_node", 1e8, 10, each, accelerator="h100")
    return calibration.predict("all_reduce@inter_node", 1e8, 10, accelerator="h100")


def test_a_changed_efficiency_is_followed_within_a_few_observations():
    calibration = Calibration()
    assert observe_reductions(calibration, [0.01] * 20) == pytest.approx(0.01, rel=0.01)
    assert observe_reductions(calibration, [0.02] * 8) == pytest.approx(0.02, rel=0.1)


def test_one_outlier_moves_little():
    calibration = Calibration()
    observe_reductions(calibration, [0.01] * 20)
    assert observe_reductions(calibration, [0.03]) < 0.0165


def test_one_measured_total_moves_the_classes_not_yet_measured_with_it():
    before, calibration = Calibration(), Calibration()
    calibration.observe(Op.GEMM, 1e15, 1, 2 * before.predict(Op.GEMM, 1e15, 1, accelerator="h100"), accelerator="h100")
    for op in (Op.ATTENTION, Op.ELEMENTWISE):
        ratio = before.efficiency(op, "h100") / calibration.efficiency(op, "h100")
        assert 1.1 < ratio < 2.0


def test_an_accelerator_never_seen_starts_from_the_nearest_one():
    calibration = learned_gemm(efficiency=0.3)
    prior = Calibration().efficiency(Op.GEMM, "h200")
    near, far = calibration.efficiency(Op.GEMM, "h200"), calibration.efficiency(Op.GEMM, "v100")
    assert 0.3 < near < prior
    assert near < far < prior
    assert calibration.efficiency(Op.GEMM, "cpu") == Calibration().efficiency(Op.GEMM, "cpu")


def test_links_are_learned_apart():
    calibration = Calibration()
    for _ in range(30):
        calibration.observe(Op.ALL_REDUCE, 1e9, 1, 1.0, accelerator="h100", link=Link.INTER_NODE)
        calibration.observe(Op.ALL_REDUCE, 1e9, 1, 0.004, accelerator="h100", link=Link.INTRA_NODE)
    slow = calibration.predict(Op.ALL_REDUCE, 1e9, 1, accelerator="h100", link=Link.INTER_NODE)
    fast = calibration.predict(Op.ALL_REDUCE, 1e9, 1, accelerator="h100", link=Link.INTRA_NODE)
    assert slow == pytest.approx(1.0, rel=0.05)
    assert fast == pytest.approx(0.004, rel=0.05)


def test_traffic_beside_the_computation_counts_by_the_root_of_squares():
    calibration = Calibration()
    compute, traffic = [((Op.GEMM, None), 1e15, 1.0)], [((Op.ALL_GATHER, Link.INTRA_NODE), 3e11, 1.0)]
    alone = [calibration.predict_total(rows, accelerator="h100") for rows in (compute, traffic)]
    both = calibration.predict_total(compute, accelerator="h100", hidden=traffic)
    assert both == pytest.approx(math.hypot(*alone))
    assert max(alone) < both < sum(alone)


def test_impossible_times_stay_within_bounds():
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(Op.GEMM, 1e15, 1, 1e-6, accelerator="h100")
        calibration.observe(Op.ATTENTION, 1e12, 1, 1e6, accelerator="h100")
    assert calibration.efficiency(Op.GEMM, "h100") <= 1.0 + 1e-9
    fixed, per_work = prior_line(calibration._accelerators["h100"], (Op.ATTENTION, None))
    line = calibration.line((Op.ATTENTION, None), "h100")
    assert line[0] <= fixed * FACTOR_BOUNDS[1] * 1.001
    assert line[1] <= per_work * FACTOR_BOUNDS[1] * 1.001


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_not_above_zero_are_ignored(seconds):
    calibration = Calibration()
    calibration.observe(Op.GEMM, 1e12, 1, seconds, accelerator="h100")
    assert calibration.observations(Op.GEMM, "h100") == 0


def test_a_saved_state_predicts_and_learns_the_same():
    calibration = learned_gemm(times=10)
    loaded = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    for name in ("h100", "h200", "cpu"):
        assert (loaded.lines(name) == calibration.lines(name)).all()
    for each in (calibration, loaded):
        each.observe(Op.GEMM, 1e13, 3, 0.05, accelerator="h100")
    assert (loaded.lines("h100") == calibration.lines("h100")).all()
    assert loaded.observations(Op.GEMM, "h100") == 11


def test_an_accelerator_of_the_users_own_is_saved_with_the_state():
    own = Accelerator("mychip", 400e12, 64 * 10**9, 2e12, 200e9, 25e9)
    calibration = Calibration([own])
    calibration.observe(Op.GEMM, 1e12, 1, 0.01, accelerator="mychip")
    loaded = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert loaded.line((Op.GEMM, None), "mychip") == calibration.line((Op.GEMM, None), "mychip")


@settings(max_examples=30, deadline=None)
@given(
    observations=st.lists(
        st.tuples(
            st.sampled_from([key for key in KEYS if key[0] is not Op.GROUP_SETUP]),
            st.integers(0, 10**14),
            st.integers(1, 10**4),
            st.floats(1e-9, 1e4),
        ),
        max_size=25,
    )
)
def test_whatever_is_observed_every_line_stays_positive_and_finite(observations):
    calibration = Calibration()
    for key, work, calls, seconds in observations:
        calibration.observe_total([(key, float(work), float(calls))], seconds, accelerator="h100")
    lines = calibration.lines("h100")
    assert (lines >= 0).all() and (lines < math.inf).all()
    assert (lines[1] > 0).all()

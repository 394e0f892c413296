"""Length distributions from a step's summary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.planner.workload import LengthSummary


@given(mean=st.floats(20, 1000), spread=st.floats(1.0, 4.0), tail=st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None)
def test_quantiles_have_the_mean_and_the_longest_of_the_summary(mean, spread, tail):
    summary = LengthSummary(mean, mean * spread, mean * spread * tail, 10.0)
    quantiles = summary.quantiles()
    assert quantiles.longest == summary.longest
    if quantiles.values[-2] < summary.longest and quantiles.values[0] > 1:
        assert quantiles.mean == pytest.approx(mean)
        assert quantiles.values[-2] == pytest.approx(summary.p95, rel=0.35)


def test_equal_lengths_give_a_constant_distribution():
    assert set(LengthSummary(64.0, 64.0, 64.0, 10.0).quantiles().values) == {64.0}

"""Signals of reports and of recorded steps."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.decide.signals import LengthSummary, Signals
from nereus.errors import DataError
from nereus.plan import ACTOR_TRAINING, Plan
from nereus.reports.events import StepEnd
from nereus.runtime.seam import StepReport

REPORT = StepReport(
    7,
    2,
    {"response_length/mean": 100 / 3, "response_length/p95": 80.0, "response_length/max": 97.0,
     "prompt_length/mean": 12.1},
    1.1 + 2.2,
    {ACTOR_TRAINING: 0.1 + 0.2},
    operations={"gemm": (1e12, 0.7)},
    peak_bytes={3: 123},
)  # fmt: skip


def test_a_recorded_step_gives_the_signals_of_its_report():
    event = StepEnd(7, Plan.parse({"actor-training": "d1"}), REPORT)
    line = json.loads(json.dumps({"type": "step", "step": 7, **event.fields()}))
    assert Signals.from_event(line) == Signals.of(REPORT)
    assert Signals.of(REPORT).operation_s == {"gemm": 0.7}


def test_a_step_line_that_lacks_a_field_is_refused():
    with pytest.raises(DataError, match="step 4 lacks 'step_s'"):
        Signals.from_event({"step": 4, "lengths": {}})


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

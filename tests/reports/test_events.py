"""A step as its line of `events.jsonl` and back."""

import dataclasses
import json

import pytest

from nereus.errors import DataError
from nereus.plan import ACTOR_TRAINING, Plan
from nereus.planner.workload import LengthSummary
from nereus.reports.events import StepEnd
from nereus.runtime.seam import StepReport

REPORT = StepReport(
    7,
    2,
    {"actor/pg_loss": 0.1},
    1.1 + 2.2,
    {ACTOR_TRAINING: 0.1 + 0.2},
    LengthSummary(100 / 3, 80.0, 97.0, 12.1, shortest=3.0, cut_share=1 / 7),
    sync_s=0.3,
    sync_bytes=11,
    reward_problem="KeyError: 'x'",
    operations={"gemm": (1e12, 0.7)},
    peak_bytes={3: 123},
    engine_bytes={3: 7},
)
ENDED = StepEnd(7, Plan.parse({"actor-training": "d1"}), REPORT, predicted_step_s=1 / 3, decision_s=0.01)


def line(event=ENDED):
    return json.loads(json.dumps({"type": event.type, "step": event.step, **event.fields()}))


def test_a_recorded_step_is_the_one_that_ended_but_for_its_metrics():
    assert StepEnd.from_line(line()) == dataclasses.replace(ENDED, report=dataclasses.replace(REPORT, metrics={}))


def test_a_step_s_line_names_its_lengths_by_statistic():
    assert line()["lengths"] == {
        "mean": 100 / 3, "max": 97.0, "min": 3.0, "p95": 80.0, "clip_ratio": 1 / 7, "prompt_mean": 12.1,
    }  # fmt: skip


@pytest.mark.parametrize("field", ["step_s", "tasks", "operations", "peak_bytes", "lengths"])
def test_a_step_line_that_lacks_a_field_is_refused(field):
    lacking = {key: value for key, value in line().items() if key != field}
    with pytest.raises(DataError, match=f"step 7 lacks '{field}'"):
        StepEnd.from_line(lacking)

"""What a person is told of a step."""

import io

import pytest
from rich.console import Console

from nereus.plan import Plan
from nereus.planner.workload import LengthSummary
from nereus.reports.events import StepEnd
from nereus.reports.view import Lines, LiveView, View
from nereus.runtime.seam import StepReport


def ended(*, num_failed: int, problem: str | None) -> StepEnd:
    metrics = {
        "train/reward/mean": 0.5,
        "response_length/mean": 7.0,
        "perf/throughput": 10.0,
        "reward/num_failed": float(num_failed),
        "reward/num_late": 0.0,
    }
    lengths = LengthSummary(7.0, 9.0, 9.0, 3.0)
    report = StepReport(4, 0, metrics, 1.0, {}, lengths, reward_problem=problem)
    return StepEnd(4, Plan.parse({"actor-training": "d1"}), report)


def shown(view: type[Lines] | type[LiveView], event: StepEnd) -> str:
    console = Console(file=io.StringIO(), width=200)
    told: View = view(console)
    with told:
        told.event(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("view", [Lines, LiveView])
def test_a_step_whose_rewards_failed_says_how_many_and_why_the_first_did(view: type[Lines] | type[LiveView]) -> None:
    text = shown(view, ended(num_failed=3, problem="KeyError: 'x'"))
    assert text.count("the reward function failed for 3 responses, first with KeyError: 'x'") == 1
    assert "reward function" not in shown(view, ended(num_failed=0, problem=None))

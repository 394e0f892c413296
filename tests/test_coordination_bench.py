"""The coordination trials: drawn the same every time, hard for a reason, and passed by the global DAG on processes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def coordination() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("coordination")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_trials_are_drawn_the_same_every_time_and_overlap(coordination: Any) -> None:
    for overlap, model_stages in coordination.OVERLAPS.items():
        trials = list(coordination.draw_trials(overlap, 5))
        assert trials == list(coordination.draw_trials(overlap, 5))
        for trial in trials:
            assert trial.crossing_edges and {*trial.target.model_stages} == {*model_stages}
            used = [max(coordination.used_by(plan).values()) for plan in (trial.current, trial.target)]
            assert max(used) <= trial.limit_bytes <= 2 * max(used), "both plans fit, but not much more"


def test_trials_that_no_timing_saves_are_not_all(coordination: Any) -> None:
    possible = [coordination.some_timing_succeeds(trial) for trial in coordination.draw_trials("cm_ss", 20)]
    assert 0 < sum(possible) < 20


def test_the_global_dag_comes_through_on_processes_and_independent_chains_only_where_they_can(
    coordination: Any,
) -> None:
    bench = coordination.Bench()
    try:
        rows = coordination.measure(bench, "sm_cs", 4)
    finally:
        bench.close()
    assert all(row["ours"]["succeeded"] for row in rows)
    for row in rows:
        found = row["independent"]
        assert found["succeeded"] != found["stuck"]
        assert row["some_timing_succeeds"] or found["stuck"]
    summary = coordination.summary(rows)
    assert summary["success_rate"] == 1 and summary["trials"] == 4
    assert summary["baseline_success_rate"] + summary["baseline_stuck_rate"] == 1

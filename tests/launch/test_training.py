"""A run's course from its recipe to its result, on machinery that is not Ray."""

import dataclasses
import json
import os
from io import StringIO
from pathlib import Path

import pytest
from job_recipes import PLAN, job_recipe
from rich.console import Console
from runs import descendants
from table_outlook import CLUSTER, report

from nereus.controller import Progress
from nereus.errors import ClusterError
from nereus.launch.build import Machinery
from nereus.launch.job import Job
from nereus.launch.training import run_training
from nereus.plan import Plan
from nereus.recipe.config import RunConfig, parse_config
from nereus.reports.events import TransitionEnd
from nereus.reports.view import Lines
from nereus.runtime.scripted import ScriptedRuntime
from nereus.runtime.seam import Runtime, StepReport
from nereus.supply.supply import StaticSupply

METRICS = {"train/reward/mean": 0.5, "response_length/mean": 8.0, "perf/throughput": 64.0}
"""What is shown of a step."""


def scored(step: int, plan: Plan) -> StepReport:
    return dataclasses.replace(report(step, 0.5), metrics=METRICS)


class Workshop:
    """Builds machinery of scripted runtimes, and remembers what was built and closed. broken: it cannot start."""

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken
        self.jobs: list[Job] = []
        self.runtimes: list[ScriptedRuntime] = []
        self.num_closed = 0

    def build(self, config: RunConfig, job: Job, progress: Progress) -> Machinery:
        self.jobs.append(job)
        return Machinery(CLUSTER, StaticSupply(CLUSTER.device_ids), self._start, self._close)

    def _start(self, plan: Plan) -> Runtime:
        if self._broken:
            raise ClusterError("no worker came up")
        self.runtimes.append(ScriptedRuntime(plan, CLUSTER, scored))
        return self.runtimes[-1]

    def _close(self) -> None:
        self.num_closed += 1


def recipe_of(folder: Path, **changes: object) -> RunConfig:
    recipe = job_recipe(folder)
    trainer = {**recipe["trainer"], "steps": 3, "val_every": 0}
    return parse_config(recipe | {"trainer": trainer, "cluster": {"workers": 6}} | changes)


def lines() -> Lines:
    return Lines(Console(file=StringIO()))


def test_a_run_goes_its_whole_course_on_machinery_that_was_passed_in(tmp_path: Path) -> None:
    moved = {"critic-training": "d1t1p1@1", "critic-inference": "d1t1p1@1"}
    workshop = Workshop()
    config = recipe_of(tmp_path, transitions=[{"step": 2, "plan": moved}])
    result = run_training(config, lines(), build=workshop.build)

    (runtime,) = workshop.runtimes
    assert [(row[0], row[1]) for row in runtime.asked if row[0] == "step"] == [("step", 1), ("step", 2), ("step", 3)]
    assert [row[0] for row in runtime.asked] == ["step", "transition", "step", "step"]
    assert runtime.plan.placed == Plan.parse(PLAN | moved)
    assert [change.step for change in result.changes if isinstance(change, TransitionEnd)] == [2]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in result.steps] == [1, 2, 3]
    assert list(result.steps) == [row for row in written if "step" in row], "the last step's row is among them"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["phase"] == "done"
    assert workshop.num_closed == 1


def test_a_run_that_names_no_plan_starts_on_the_planners_for_the_machinerys_devices(tmp_path: Path) -> None:
    workshop = Workshop()
    run_training(recipe_of(tmp_path, plan={}), lines(), build=workshop.build)
    (runtime,) = workshop.runtimes
    assert {str(model_stage) for model_stage, _ in runtime.plan.stages} == set(PLAN)
    assert set(runtime.plan.devices) <= set(CLUSTER.device_ids)


def test_machinery_that_cannot_start_is_closed_and_leaves_no_reward_process(tmp_path: Path) -> None:
    before, workshop = descendants(os.getpid()), Workshop(broken=True)
    with pytest.raises(ClusterError, match="no worker came up"):
        run_training(recipe_of(tmp_path), lines(), build=workshop.build)
    assert workshop.num_closed == 1
    assert descendants(os.getpid()) <= before
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["phase"], status["reason"]) == ("failed", "no worker came up")

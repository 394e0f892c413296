"""`nereus train`: one run from a recipe to its last evaluation, and everything it started ended again."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nereus.cluster import Cluster
from nereus.controller import Adapting, Clock, Controller, Course
from nereus.decide.outlook import JobShape, ModelOutlook, decider_of
from nereus.errors import NereusError, NoFeasiblePlan
from nereus.launch.build import Build, build_on_ray
from nereus.launch.discovery import check_address
from nereus.launch.job import Job, prepare_job
from nereus.plan import Plan
from nereus.planner.prices.calibration import Calibration
from nereus.recipe.config import RunConfig
from nereus.recipe.sections import TransitionConfig
from nereus.reports.control import Requests, Status, started_ticks
from nereus.reports.events import (
    Decision,
    Evaluation,
    Event,
    Start,
    StepEnd,
    TransitionEnd,
    TransitionFailed,
)
from nereus.reports.run_folder import RunFolder
from nereus.reports.view import View
from nereus.supply.supply import Supply


@dataclasses.dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to. evaluations: (step, held-out metrics), the first before any step; steps: rows of
    `metrics.jsonl`; changes: decisions and transitions as in `events.jsonl`."""

    run_dir: Path
    evaluations: tuple[tuple[int, Mapping[str, float]], ...]
    steps: tuple[Mapping[str, float], ...]
    changes: tuple[Event, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "evaluations": [{"step": step, **metrics} for step, metrics in self.evaluations],
            "steps": list(self.steps),
            "changes": [{"type": c.type, "step": c.step, **c.fields()} for c in self.changes],
        }


class _Recorder:
    """Writes events to the run folder, shows them, and keeps what the result is made of."""

    def __init__(self, folder: RunFolder, view: View, steps: int) -> None:
        self._folder, self._view, self._steps = folder, view, steps
        self._row: dict[str, float] = {}
        self._step, self._plan = 0, Plan(())
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.steps: list[Mapping[str, float]] = []
        self.changes: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._folder.event(event)
        self._view.event(event)
        if isinstance(event, Start):
            self._plan = event.plan
        elif isinstance(event, Evaluation):
            self.evaluations.append((event.step, event.metrics))
            self._row |= {"step": event.step} | dict(event.metrics)
        elif isinstance(event, StepEnd):
            self.flush()
            self._row, self._step, self._plan = dict(event.row), event.step, event.plan
        elif isinstance(event, TransitionEnd | Decision | TransitionFailed):
            self.changes.append(event)
        self._status("training")

    def finish(self, phase: str, reason: str = "") -> None:
        """Write what is still held back, and how the run ended."""
        self.flush()
        self._status(phase, reason)

    def flush(self) -> None:
        """Write the row of the last step, once nothing more belongs to it."""
        if self._row:
            self._folder.metrics(self._row)
            self.steps.append(self._row)
            self._row = {}

    @property
    def phase(self) -> str:
        """How the run has ended where nothing went wrong."""
        return "done" if self._step == self._steps else "stopped"

    def begin(self, phase: str) -> None:
        """Say what the run does before its first step."""
        self._status(phase)

    def _status(self, phase: str, reason: str = "") -> None:
        process = os.getpid()
        started, plan = started_ticks(process) or 0, self._plan if self._plan.stages else None
        self._folder.status(Status(process, phase, self._step, self._steps, plan, time.time(), started, reason))


def run_training(config: RunConfig, view: View, *, build: Build = build_on_ray) -> TrainResult:
    """Run a recipe. Raises InputError before any worker starts where that is possible.

    build: makes the machinery the run stands on.

    The run folder is this run's from the first second on, and says at its end how the run ended.
    """
    folder = RunFolder(config.run.dir, tell=view.note)
    folder.open(config.to_yaml(), overwrite=config.run.overwrite)
    recorder = _Recorder(folder, view, config.trainer.steps)
    recorder.begin("starting")
    phase, reason = "failed", "an error of its own; see what it printed"
    try:
        result = _run(config, view, folder, recorder, build)
        phase, reason = recorder.phase, ""
        return result
    except KeyboardInterrupt:
        phase, reason = "stopped", "interrupted"
        raise
    except NereusError as error:
        reason = str(error)
        raise
    finally:
        recorder.finish(phase, reason)
        folder.close()


def _run(config: RunConfig, view: View, folder: RunFolder, recorder: _Recorder, build: Build) -> TrainResult:
    """What happens between taking the run folder and giving it back."""

    def progress(what: str, done: int, total: int) -> None:
        view.phase(what, done=done, total=total)

    if config.cluster.address is not None:
        view.phase(f"asking for Ray at {config.cluster.address}")
        check_address(config.cluster.address)
    requests = Requests(config.run.dir)
    requests.clear()
    job = prepare_job(config, progress)
    try:
        machinery = build(config, job, progress)
        try:
            outlook = job_outlook(config, job, machinery.cluster)
            named = config.initial_plan
            plan = outlook.complete(named) if named else first_plan(outlook, machinery.supply)
            view.phase(f"starting {len(plan.devices)} workers")
            runtime = machinery.start(plan)
            recorder(_start_event(config, job, plan, outlook))
            clock = Clock(folder.elapsed_s)
            adapting = Adapting(machinery.supply, decider_of(config, outlook, plan)) if config.adapt else None
            course = Course(config.trainer.steps, config.trainer.val_every, _transitions(config.transitions))
            Controller(
                runtime, outlook, course, recorder, progress=progress, requests=requests, clock=clock, adapting=adapting
            ).run()
        finally:
            machinery.close()
    finally:
        if job.reward is not None:
            job.reward.close()
    recorder.flush()
    return TrainResult(
        config.run.dir, tuple(recorder.evaluations), tuple(recorder.steps), tuple(recorder.changes), job.notes
    )


def job_outlook(config: RunConfig, job: Job, cluster: Cluster) -> ModelOutlook:
    """What plans of this job cost, before anything is measured."""
    return ModelOutlook(JobShape.of(config, job.specs, cluster), Calibration(cluster.accelerators))


def first_plan(outlook: ModelOutlook, supply: Supply) -> Plan:
    """The planner's choice for a recipe that names no plan; raises NoFeasiblePlan saying why there is none."""
    plans = outlook.plans(None, outlook.job.first_lengths, supply.at(0.0).devices)
    if not plans:
        raise NoFeasiblePlan(outlook.refusal)
    return plans[0]


def _transitions(named: tuple[TransitionConfig, ...]) -> dict[int, Callable[[Plan], Plan]]:
    """For each step a function from the plan in force to the plan the recipe wants before that step."""

    def change(stages: Mapping[str, str]) -> Callable[[Plan], Plan]:
        return lambda current: Plan.parse(stages, base=current)

    return {transition.step: change(transition.plan) for transition in named}


def _start_event(config: RunConfig, job: Job, plan: Plan, outlook: ModelOutlook) -> Start:
    return Start(
        0,
        config=config.model_dump(mode="json"),
        cluster=outlook.job.cluster.to_json(),
        models={role.value: dataclasses.asdict(spec) for role, spec in job.specs.items()},
        plan=plan,
        calibration=outlook.calibration.to_json(),
    )

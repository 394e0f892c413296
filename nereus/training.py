"""`nereus train`: one run from a recipe to its last evaluation, and everything it started ended again."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from nereus.config import RunConfig, TransitionConfig
from nereus.controller import Controller, Course
from nereus.job import Job, prepare_job
from nereus.plan import Plan
from nereus.reports.events import Evaluation, Event, RunFolder, Start, StepEnd, TransitionEnd
from nereus.reports.view import View
from nereus.runtime.live import LiveRuntime
from nereus.runtime.ray_runtime import RayPool, RaySettings

GB = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to. evaluations: (step, held-out metrics), the first before any step; steps: rows of
    `metrics.jsonl`; transitions: as in `events.jsonl`."""

    run_dir: Path
    evaluations: tuple[tuple[int, Mapping[str, float]], ...]
    steps: tuple[Mapping[str, float], ...]
    transitions: tuple[TransitionEnd, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "evaluations": [{"step": step, **metrics} for step, metrics in self.evaluations],
            "steps": list(self.steps),
            "transitions": [{"step": t.step, **t.fields()} for t in self.transitions],
        }


class _Recorder:
    """Writes events to the run folder, shows them, and keeps what the result is made of."""

    def __init__(self, folder: RunFolder, view: View) -> None:
        self._folder, self._view = folder, view
        self._open_row: dict[str, float] = {}
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.steps: list[Mapping[str, float]] = []
        self.transitions: list[TransitionEnd] = []

    def __call__(self, event: Event) -> None:
        self._folder.event(event)
        self._view.event(event)
        if isinstance(event, Evaluation):
            self.evaluations.append((event.step, event.metrics))
            self._open_row |= {"step": event.step} | dict(event.metrics)
        elif isinstance(event, StepEnd):
            self.flush()
            self._open_row = dict(event.row)
        elif isinstance(event, TransitionEnd):
            self.transitions.append(event)

    def flush(self) -> None:
        """Write the row of the last step, once nothing more can belong to it."""
        if self._open_row:
            self._folder.metrics(self._open_row)
            self.steps.append(self._open_row)
            self._open_row = {}


def run_training(config: RunConfig, view: View) -> TrainResult:
    """Run a recipe. Raises InputError before any worker starts where that is possible."""
    folder = RunFolder(config.run.dir)

    def progress(what: str, done: int, total: int) -> None:
        view.phase(what, done=done, total=total)

    job = prepare_job(config, progress)
    pool = RayPool(ray_settings(config))
    runtime = LiveRuntime(pool, job.setup, job.plan)
    try:
        folder.open(config.to_yaml())
        view.phase("starting Ray")
        pool.connect()
        for path in (config.run.dir, *sorted({role.folder / "config.json" for role in job.setup.roles.values()})):
            pool.check_shared(path)
        view.phase(f"starting {len(job.plan.devices)} workers")
        runtime.start()
        recorder = _Recorder(folder, view)
        recorder(_start_event(config, job, pool))
        course = Course(config.trainer.steps, config.trainer.val_every, _transitions(config.transitions))
        Controller(runtime, course, recorder, progress).run()
        recorder.flush()
        return TrainResult(
            config.run.dir, tuple(recorder.evaluations), tuple(recorder.steps), tuple(recorder.transitions), job.notes
        )
    finally:
        runtime.close()
        folder.close()
        if job.reward is not None:
            job.reward.close()


def ray_settings(config: RunConfig) -> RaySettings:
    cluster = config.cluster
    return RaySettings(
        num_workers=cluster.workers,
        timeout=timedelta(seconds=cluster.timeout_s),
        address=cluster.address,
        device=cluster.device,
        memory_bytes=int(cluster.memory_gb * GB) if cluster.memory_gb is not None else None,
        cores_per_node=cluster.cores or os.cpu_count(),
    )


def _transitions(named: tuple[TransitionConfig, ...]) -> dict[int, Callable[[Plan], Plan]]:
    """For each step a function from the plan in force to the plan the recipe wants before that step."""

    def change(stages: Mapping[str, str]) -> Callable[[Plan], Plan]:
        return lambda current: Plan.parse(stages, base=current)

    return {transition.step: change(transition.plan) for transition in named}


def _start_event(config: RunConfig, job: Job, pool: RayPool) -> Start:
    return Start(
        0,
        config=config.model_dump(mode="json"),
        cluster=dataclasses.asdict(pool.cluster),
        models={role.value: dataclasses.asdict(spec) for role, spec in job.specs.items()},
        plan=job.plan,
    )

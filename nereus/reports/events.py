"""What a run says of itself, as typed values, and the two files they are written to.

`events.jsonl`: one object a line with `type`, `step` and `time_s` (seconds since the run started), numbers unrounded,
so that decisions can be replayed. `metrics.jsonl`: one row a step under verl's names.
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from nereus.plan import Plan
from nereus.runtime.base import StepReport, TransitionReport


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a step."""

    type: ClassVar[str]
    step: int

    def fields(self) -> dict[str, Any]:
        """The event's own keys of its line."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Start(Event):
    """The first event: everything a replay needs besides the steps."""

    type: ClassVar[str] = "start"
    config: Mapping[str, Any]
    cluster: Mapping[str, Any]
    models: Mapping[str, Any]
    plan: Plan
    calibration: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "cluster": self.cluster,
            "models": self.models,
            "plan": self.plan.to_json(),
            "calibration": self.calibration,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation(Event):
    """Held-out metrics after `step` steps."""

    type: ClassVar[str] = "evaluation"
    metrics: Mapping[str, float]

    def fields(self) -> dict[str, Any]:
        return {"metrics": self.metrics}


@dataclasses.dataclass(frozen=True, slots=True)
class StepEnd(Event):
    """A step with all its updates committed."""

    type: ClassVar[str] = "step"
    plan: Plan
    report: StepReport
    transition_s: float = 0.0
    predicted_step_s: float | None = None

    def fields(self) -> dict[str, Any]:
        report = self.report
        return {
            "plan": self.plan.to_json(),
            "plan_generation": report.plan_generation,
            "step_s": report.step_s,
            "predicted_step_s": self.predicted_step_s,
            "tasks": {model_stage.name: seconds for model_stage, seconds in report.task_s.items()},
            "operations": {name: {"work": w, "seconds": s} for name, (w, s) in report.operations.items()},
            "sync_s": report.sync_s,
            "sync_bytes": report.sync_bytes,
            "peak_bytes": {str(device): peak for device, peak in report.peak_bytes.items()},
            "lengths": _lengths(report.metrics),
        }

    @property
    def row(self) -> dict[str, float]:
        """The step's row of `metrics.jsonl`."""
        report = self.report
        return {
            "step": report.step,
            "plan_generation": report.plan_generation,
            "timing_s/step": report.step_s,
            "timing_s/transition": self.transition_s,
            **report.metrics,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionEnd(Event):
    """The live state moved to another plan before `step`."""

    type: ClassVar[str] = "transition"
    before: Plan
    after: Plan
    report: TransitionReport

    def fields(self) -> dict[str, Any]:
        return {
            "from": self.before.to_json(),
            "to": self.after.to_json(),
            **{f.name: getattr(self.report, f.name) for f in dataclasses.fields(self.report)},
        }


def _lengths(metrics: Mapping[str, float]) -> dict[str, float]:
    prefix = "response_length/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


class RunFolder:
    """Writes the files of one run. Lines are flushed as they come, so a crash loses none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TextIO] = {}
        self._started = time.monotonic()

    def open(self, config_text: str) -> None:
        """Create the folder and its files; an earlier run in it is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(config_text)
        for name in ("metrics.jsonl", "events.jsonl"):
            self._files[name] = (self.folder / name).open("w", encoding="utf-8")

    def event(self, event: Event) -> None:
        head = {"type": event.type, "step": event.step, "time_s": time.monotonic() - self._started}
        self._line("events.jsonl", head | event.fields())

    def metrics(self, row: Mapping[str, float]) -> None:
        self._line("metrics.jsonl", row)

    def _line(self, name: str, value: Mapping[str, Any]) -> None:
        file = self._files[name]
        file.write(json.dumps(value, allow_nan=True) + "\n")
        file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

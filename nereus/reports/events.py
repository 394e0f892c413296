"""What a run says of itself, as typed values, and the two files they are written to.

`events.jsonl`: one object a line with `type`, `step` and `time_s` (seconds since the run started), numbers unrounded,
so that decisions can be replayed. `metrics.jsonl`: one row a step under verl's names.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nereus.cluster import Cluster
from nereus.decide.admission import Numbers
from nereus.errors import DataError
from nereus.plan import ModelStage, Plan
from nereus.planner.workload import LengthSummary
from nereus.runtime.seam import StepReport
from nereus.transition.operations import TransitionReport


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


LENGTH_FIELDS = {
    "mean": "mean", "max": "longest", "min": "shortest", "p95": "p95", "clip_ratio": "cut_share",
    "prompt_mean": "prompt_mean",
}  # fmt: skip
"""Keys of a step line's `lengths`, and which field of a `LengthSummary` each is."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepEnd(Event):
    """A step with all its updates committed.

    decision_s: what deciding took: the ruling before it and learning from it, moving not counted.
    """

    type: ClassVar[str] = "step"
    plan: Plan
    report: StepReport
    transition_s: float = 0.0
    predicted_step_s: float | None = None
    decision_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        report = self.report
        return {
            "plan": self.plan.to_json(),
            "plan_epoch": report.plan_epoch,
            "step_s": report.step_s,
            "predicted_step_s": self.predicted_step_s,
            "decision_s": self.decision_s,
            "tasks": {model_stage.name: seconds for model_stage, seconds in report.task_s.items()},
            "operations": {name: {"work": w, "seconds": s} for name, (w, s) in report.operations.items()},
            "sync_s": report.sync_s,
            "sync_bytes": report.sync_bytes,
            "reward_problem": report.reward_problem,
            "peak_bytes": {str(device): peak for device, peak in report.peak_bytes.items()},
            "engine_bytes": {str(device): held for device, held in report.engine_bytes.items()},
            "lengths": {field: getattr(report.lengths, name) for field, name in LENGTH_FIELDS.items()},
        }

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "StepEnd":
        """The step of a line of `events.jsonl`, without its metrics; raises DataError where the line lacks a field."""
        try:
            recorded = line["lengths"]
            report = StepReport(
                line["step"],
                line["plan_epoch"],
                {},
                line["step_s"],
                {ModelStage.parse(name): seconds for name, seconds in line["tasks"].items()},
                LengthSummary(**{name: recorded[field] for field, name in LENGTH_FIELDS.items()}),
                sync_s=line["sync_s"],
                sync_bytes=line["sync_bytes"],
                reward_problem=line.get("reward_problem"),
                operations={name: (row["work"], row["seconds"]) for name, row in line["operations"].items()},
                peak_bytes={int(device): peak for device, peak in line["peak_bytes"].items()},
                engine_bytes={int(device): held for device, held in line.get("engine_bytes", {}).items()},
            )
            plan, predicted_step_s, decision_s = line["plan"], line["predicted_step_s"], line["decision_s"]
        except KeyError as error:
            raise DataError(f"the event of step {line.get('step', '?')} lacks {error}") from None
        return cls(report.step, Plan.from_json(plan), report, predicted_step_s=predicted_step_s, decision_s=decision_s)

    @property
    def row(self) -> dict[str, float]:
        """The step's row of `metrics.jsonl`."""
        report = self.report
        return {
            "step": report.step,
            "plan_epoch": report.plan_epoch,
            "timing_s/step": report.step_s,
            "timing_s/transition": self.transition_s,
            "timing_s/decision": self.decision_s,
            **report.metrics,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionEnd(Event):
    """The live state moved to another plan before `step`. predicted_s: what the transition was judged to take."""

    type: ClassVar[str] = "transition"
    before: Plan
    after: Plan
    report: TransitionReport
    predicted_s: float | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "from": self.before.to_json(),
            "to": self.after.to_json(),
            "predicted_s": self.predicted_s,
            **{f.name: getattr(self.report, f.name) for f in dataclasses.fields(self.report)},
        }


@dataclasses.dataclass(frozen=True, slots=True)
class SupplyChange(Event):
    """The devices that may be used from `step` on, and what is announced: rows of {devices, deadline_s, leaving}.

    cluster: what the device ids stand for, where that has changed.
    """

    type: ClassVar[str] = "supply"
    devices: tuple[int, ...]
    announced: tuple[Mapping[str, Any], ...] = ()
    deadline_s: float | None = None
    cluster: Cluster | None = None

    def fields(self) -> dict[str, Any]:
        fields = {
            "devices": list(self.devices),
            "announced": [dict(row) for row in self.announced],
            "deadline_s": self.deadline_s,
        }
        return fields | ({"cluster": self.cluster.to_json()} if self.cluster else {})


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionFailed(Event):
    """A transition wanted before `step` was refused or rolled back; the job goes on as it was.

    target: null where what was asked for is no plan.
    """

    type: ClassVar[str] = "transition_failed"
    plan: Plan
    target: Plan | None
    reason: str

    def fields(self) -> dict[str, Any]:
        target = self.target.to_json() if self.target else None
        return {"plan": self.plan.to_json(), "target": target, "reason": self.reason}


@dataclasses.dataclass(frozen=True, slots=True)
class TriggerFired(Event):
    """A signal crossed before `step`; a replan follows."""

    type: ClassVar[str] = "trigger"
    signal: str
    value: float
    reference: float
    threshold: float

    def fields(self) -> dict[str, Any]:
        return {
            "signal": self.signal,
            "value": self.value,
            "reference": self.reference,
            "threshold": self.threshold,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Decision(Event):
    """What was decided before `step`, with its numbers; None where the decision never came to them.

    action: what follows (keep, move, restart, pause). again: a declined target was examined again without a replan.
    """

    type: ClassVar[str] = "decision"
    verdict: str
    action: str
    reason: str
    current: Plan | None
    target: Plan | None
    again: bool
    numbers: Numbers | None

    def fields(self) -> dict[str, Any]:
        names = ("current_s", "target_s", "saving_s", "transition_s", "payback_steps", "horizon_steps", "gamma")
        return {
            "verdict": self.verdict,
            "action": self.action,
            "reason": self.reason,
            "current": self.current.to_json() if self.current else None,
            "target": self.target.to_json() if self.target else None,
            "again": self.again,
            **{name: getattr(self.numbers, name) if self.numbers else None for name in names},
        }


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's `events.jsonl`; raises DataError."""
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a run's file; a last line cut short by a crash is left out."""
    if not path.is_file():
        raise DataError(f"{path}: not found; name the folder of a run")
    lines = path.read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = []
    for number, text in enumerate(lines, start=1):
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"{path}, line {number}: not JSON ({error.msg})") from None
    return events

"""How people reach a running job: small files in its run folder, read by the controller between two steps.

    nereus reshape --> control/reshape-N.json --> before the next step --> a transition, or why not, in events.jsonl
    nereus stop    --> control/stop           --> before the next step --> the run ends as if it had been its last
    nereus status  <-- status.json            <-- written as the run goes on

A file appears by a rename, so it is never read half-written. Nothing here runs anything.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nereus.errors import InputError, PlanError
from nereus.plan import Plan

STATUS = "status.json"
ENDED = ("done", "stopped", "failed")
"""Phases after which a run does nothing more."""


class Requests:
    """What was asked of the run in `folder` since it began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "control"

    def clear(self) -> None:
        """Forget what an earlier run in the folder was asked."""
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    def stop_wanted(self) -> bool:
        return (self._folder / "stop").is_file()

    def reshapes(self) -> list[Callable[[Plan], Plan]]:
        """Changes of the plan in the order they were asked for; each is handed out once.

        A request that cannot be read is set aside under another name; its change raises PlanError, as one does that
        no plan can be made of. A file that cannot be opened or moved is looked at again the next time.
        """
        changes: list[Callable[[Plan], Plan]] = []
        for path in sorted(self._folder.glob("reshape-*.json")):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
                change = _requested(text, path.name)
                path.replace(path.with_suffix(".refused")) if isinstance(change, _Refused) else path.unlink()
            except OSError:
                continue
            changes.append(change)
        return changes


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """A request that is none: whoever carries it out is told why."""

    reason: str

    def __call__(self, current: Plan) -> Plan:
        raise PlanError(self.reason)


def _requested(text: str, name: str) -> Callable[[Plan], Plan]:
    try:
        stages = json.loads(text)
    except ValueError as error:
        return _Refused(f"{name}: not JSON ({error}); it was set aside")
    texts = isinstance(stages, dict) and all(isinstance(plan, str) for plan in stages.values())
    if not texts or not stages:
        return _Refused(f'{name}: expected {{"actor-training": "d1t4p1@0-3"}}; it was set aside')
    return _change(stages)


def _change(stages: Mapping[str, str]) -> Callable[[Plan], Plan]:
    return lambda current: Plan.parse(stages, base=current, devices=current.devices)


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """Where a run is.

    process, started: its driver's id, and when that process started, in ticks since the machine did; so that another
    process of the same id is not taken for it. reason: why it failed.
    """

    process: int
    phase: str
    step: int
    steps: int
    plan: Plan | None
    updated_s: float
    started: int = 0
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def alive(self) -> bool:
        """Whether the run goes on: its process is there and has not said how it ended."""
        if self.ended:
            return False
        started = started_ticks(self.process)
        return started is not None and self.started in (0, started)

    def write(self, folder: Path) -> None:
        fields = dataclasses.asdict(self) | {"plan": self.plan.to_json() if self.plan else None}
        write_whole(folder / STATUS, json.dumps(fields))

    @classmethod
    def read(cls, folder: Path) -> "Status":
        """The status of a run folder; raises InputError where it is none."""
        path = folder / STATUS
        if not path.is_file():
            raise InputError(f"{folder}: no run here ({STATUS} is missing); name the run.dir of a run")
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            plan = Plan.from_json(fields["plan"]) if fields["plan"] is not None else None
            return cls(**{**fields, "plan": plan})
        except (ValueError, KeyError, TypeError, PlanError):
            raise InputError(f"{path}: not a status that a run has written") from None


def started_ticks(process: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None where there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def running(folder: Path) -> Status:
    """The status of a run that goes on; raises InputError where it has ended."""
    status = Status.read(folder)
    if not status.alive:
        raise InputError(f"{folder}: the run has ended ({status.phase} after step {status.step} of {status.steps})")
    return status


def ask_stop(folder: Path) -> Status:
    """Ask a run to end before its next step."""
    status = running(folder)
    write_whole(folder / "control" / "stop", "")
    return status


def parse_stages(texts: list[str]) -> dict[str, str]:
    """`{model-stage: text}` of `actor-training=d1t4p1@0-3` arguments."""
    stages: dict[str, str] = {}
    for text in texts:
        name, equals, plan = text.partition("=")
        if not equals:
            raise PlanError(f"{text!r}: write MODEL-STAGE=PLAN such as actor-training=d1t4p1@0-3")
        stages[name] = plan
    if not stages:
        raise PlanError("name at least one model-stage: actor-training=d1t4p1@0-3")
    return stages


def target_plan(status: Status, stages: Mapping[str, str]) -> Plan:
    """What the run's plan would become; raises PlanError where that is no plan."""
    if status.plan is None:
        raise InputError("the run has no plan yet; ask again when its workers have started")
    return _change(stages)(status.plan)


def ask_reshape(folder: Path, stages: Mapping[str, str]) -> None:
    """Ask a run to move before its next step."""
    write_whole(folder / "control" / f"reshape-{time.time_ns()}.json", json.dumps(dict(stages)))

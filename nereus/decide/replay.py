"""Decides a recorded run again: `events.jsonl` in, the rulings it must have come to out.

    start --> Decider --supply--> boundary --> Ruling
                  ^-- transition, transition_failed, step

A ruling depends on recorded inputs alone, so the rulings of a replay equal those of the run bit for bit. A boundary is
ruled once for each `supply` event, and once for each step that none came before: where its first `trigger` or
`decision` stands, else at the step. A `transition`, or one that failed, before that was asked for by the recipe or by
a person.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nereus.cluster import Cluster
from nereus.decide.decider import Decider
from nereus.decide.ruling import Ruling
from nereus.errors import DataError
from nereus.plan import Plan
from nereus.reports.events import StepEnd
from nereus.supply.supply import SupplyView

Line = Mapping[str, Any]


def replay(events: Iterable[Line], decider: Callable[[Line], Decider]) -> Iterator[Ruling]:
    """The ruling at every boundary of a recorded run; `decider` makes the one of its `start` line."""
    source = iter(events)
    start = next(source, None)
    if start is None or start.get("type") != "start":
        raise DataError("the first event is not of type start; nothing can be replayed without it")
    deciding, view = decider(start), None
    ruled = False
    for line in source:
        kind = line["type"]
        if kind == "supply":
            view, ruled = SupplyView.from_event(line), True
            if "cluster" in line:
                deciding.recluster(Cluster.from_json(line["cluster"]))
            yield deciding.boundary(line["step"], view)
        elif kind in ("trigger", "decision", "step") and not ruled:
            ruled = True
            yield deciding.boundary(line["step"], _known(view))
        if kind == "transition" and line["mode"] == "fall_back":
            deciding.fell_back(Plan.from_json(line["to"]))
        elif kind == "transition":
            live = line["mode"] != "restart"
            seconds, predicted_s = line["seconds"] if live else None, line.get("predicted_s") or 0.0
            deciding.moved(Plan.from_json(line["to"]), seconds=seconds, predicted_s=predicted_s)
        elif kind == "transition_failed" and line.get("target") is not None:
            deciding.aborted(Plan.from_json(line["target"]), line["step"])
        elif kind == "step":
            ended = StepEnd.from_line(line)
            if ended.plan != deciding.plan:
                deciding.moved(ended.plan)
            deciding.observe(ended.report)
            ruled = False


def _known(view: SupplyView | None) -> SupplyView:
    if view is None:
        raise DataError("no supply event before the first step; this run did not adapt and has nothing to replay")
    return view


def recorded_decisions(events: Iterable[Line]) -> list[Line]:
    """The `trigger` and `decision` lines of a run without their times: what a replay's rulings must come to."""
    return [
        {key: value for key, value in line.items() if key != "time_s"}
        for line in events
        if line["type"] in ("trigger", "decision")
    ]


def ruled_decisions(rulings: Iterable[Ruling]) -> list[Line]:
    """The same of a replay."""
    return [{"type": event.type, "step": event.step, **event.fields()} for ruling in rulings for event in ruling.events]

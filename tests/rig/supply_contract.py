"""What every supply keeps to, checked on its views at ascending times."""

import json
from collections.abc import Sequence

from nereus.decide.ruling import supply_event
from nereus.supply.supply import Supply, SupplyView


def check_view(view: SupplyView) -> None:
    """One view: devices ascend, who is announced to leave is there, and its line of a record is the same view."""
    assert list(view.devices) == sorted(set(view.devices)), "each device once, ascending"
    assert view.leaving <= set(view.devices), "a device that is announced to leave is there until it does"
    for announced in view.announced:
        assert announced.devices and announced.deadline_s >= 0
        if not announced.leaving:
            assert set(announced.devices).isdisjoint(view.devices), "who is announced to come is not there yet"
    line = json.loads(json.dumps(supply_event(1, view).fields()))
    assert SupplyView.from_event(line) == view


def check_supply(supply: Supply, times_s: Sequence[float]) -> list[SupplyView]:
    """The views at these ascending times, each asked for twice."""
    views = []
    for time_s in times_s:
        views.append(view := supply.at(time_s))
        check_view(view)
        assert supply.at(time_s) == view, "the same time has the same answer"
    return views

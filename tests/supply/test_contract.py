"""One suite over every supply: views that are values, and announcements of devices that are there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from supply_contract import check_supply

from nereus.cluster import ACCELERATORS
from nereus.recipe.sections import SupplyConfig
from nereus.supply.slots import Node, SlotMap
from nereus.supply.supply import (
    Announcement,
    NoticedSupply,
    StaticSupply,
    Supply,
    SupplyView,
    TraceSupply,
    configured_supply,
)
from nereus.supply.traces import trace_of_counts

COUNTS = [(0.0, 4), (7.0, 6), (12.0, 3), (20.0, 0), (31.0, 2), (40.0, 5)]
TIMES = [i / 2 for i in range(100)]
NOTICES = '[{"device": 1, "deadline_s": 9}, {"device": 2, "deadline_s": 3}]'


class SlotSupply(Supply):
    """The slots of written nodes, as those of a joined cluster are read: the second drains, a third joins."""

    def __init__(self) -> None:
        self._map = SlotMap(5, self._nodes(0.0))

    def _nodes(self, time_s: float) -> list[Node]:
        cpu = ACCELERATORS["cpu"]
        first, third = Node("a" * 8, "10.0.0.1", 2, cpu), Node("c" * 8, "10.0.0.3", 2, cpu)
        second = Node("b" * 8, "10.0.0.2", 2, cpu, 30.0 if time_s >= 10 else None)
        return [first, *([second] if time_s < 30 else []), *([third] if time_s >= 20 else [])]

    def at(self, time_s: float) -> SupplyView:
        busy = range(4) if time_s < 30 else range(2)
        self._map.update(self._nodes(time_s), busy)
        return self._map.view(busy, now_s=time_s)


def noticed(folder: Path, under: Supply) -> Supply:
    (folder / "notices.json").write_text(NOTICES)
    return NoticedSupply(under, folder / "notices.json")


def configured(folder: Path) -> Supply:
    (folder / "trace.csv").write_text("time_s,devices\n0,4\n10,2\n20,5\n")
    (folder / "notices.json").write_text(NOTICES)
    config = SupplyConfig(trace=folder / "trace.csv", notices=str(folder / "notices.json"))
    return configured_supply(config, range(6))


SUPPLIES: dict[str, Callable[[Path], Supply]] = {
    "static": lambda folder: StaticSupply(range(3)),
    "the fake": lambda folder: StaticSupply(
        [1, 0], later=[(4.0, SupplyView((0, 1), (Announcement((1,), 6.0),))), (10.0, SupplyView(()))]
    ),
    "trace": lambda folder: TraceSupply(trace_of_counts(COUNTS, seed=1)),
    "announced trace": lambda folder: TraceSupply(trace_of_counts(COUNTS, seed=1), notice_s=9.0),
    "notices": lambda folder: noticed(folder, StaticSupply(range(4))),
    "notices over an announced trace": lambda folder: noticed(
        folder, TraceSupply(trace_of_counts(COUNTS, seed=1), notice_s=9.0)
    ),
    "configured": configured,
    "slots": lambda folder: SlotSupply(),
}
"""A supply that is added is added here; that of a joined Ray cluster is checked where there is one."""


@pytest.mark.parametrize("name", SUPPLIES)
def test_every_supply_keeps_to_what_its_seam_says(name: str, tmp_path: Path) -> None:
    views = check_supply(SUPPLIES[name](tmp_path), TIMES)
    assert views[0].devices
    assert name == "static" or len({view.devices for view in views}) > 1

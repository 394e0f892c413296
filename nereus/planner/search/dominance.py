"""Which candidates of a model-stage others make needless below one partial choice."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from nereus.plan import ModelStage, Stage
from nereus.planner.space.candidates import Candidates, Floats, Ints
from nereus.planner.space.line import Line

Mask = npt.NDArray[np.bool_]


def most_beside(
    tables: Mapping[ModelStage, Candidates], m: ModelStage, chosen: Mapping[ModelStage, int], *, in_turn: bool
) -> tuple[int, int]:
    """(idle, peak) bytes that the other model-stages put on a device of `m` at most; `chosen` ones have their row."""
    idle, peak = dict[Stage, int](), 0
    for other, table in tables.items():
        if other == m or (other.stage is m.stage and not in_turn):
            continue
        rows = slice(chosen[other], chosen[other] + 1) if other in chosen else slice(None)
        held = int(table.idle[rows].max(initial=0))
        before = idle.get(other.stage, 0)
        idle[other.stage] = before + held if in_turn else max(before, held)
        for active, kept in ((table.active, table.idle), (table.shared_active, table.shared_idle)):
            peak = max(peak, int((active[rows] - kept[rows]).max(initial=0)))
    return sum(idle.values()), peak


def carefree(table: Candidates, beside: tuple[int, int], line: Line) -> Mask:
    """[rows]: whether memory cannot bind wherever the candidate lies, with at most `beside` on its devices."""
    idle, peak = beside
    least = min(capacity for _, capacity in line.runs)
    fits: Mask = table.idle + idle + np.maximum(table.active - table.idle, peak) <= least
    return fits


class Frontier:
    """The candidates of one model-stage already tried below one partial choice; what they dominate need not be.

    Dominated: no better in any of `waves`, synchronization, devices, active and idle bytes, with groups that fit
    wherever the other's do. by_shape: only within one shape; where synchronization is still to come, or where blocks
    begin at one device and their ends decide on which types they run.
    """

    def __init__(self, table: Candidates, waves: Floats, sync: Floats | None, *, by_shape: bool) -> None:
        self.table, self.waves, self.by_shape = table, waves, by_shape
        self.sync = np.zeros(len(table)) if sync is None else sync
        self.devices = table.num_devices
        self.tried: dict[bool, list[int]] = {False: [], True: []}

    def needless(self, hopeful: Mask, carefree: Mask) -> Ints:
        """Rows that another dominates where memory is out of the question.

        Of the rows of one region and grain (and, where synchronization differs, one number of devices), in the order
        of their seconds, only those are kept that beat all before them in devices (or in synchronization).
        """
        rows = np.flatnonzero(hopeful & carefree)
        if len(rows) < 2:
            return rows[:0]
        varying = (self.waves[rows] != self.waves[rows[0]]).any(axis=0)
        if varying.sum() > 1:
            return rows[:0]
        kinds = [self.table.region[rows], self.table.grain[rows]]
        values = self.devices[rows].astype(np.float64)
        if self.by_shape:
            kinds = [self.table.region[rows], self.table.shape_keys[rows]]
        elif self.sync.any():
            kinds, values = [*kinds, self.devices[rows]], self.sync[rows]
        order = np.lexsort((values, self.waves[rows].sum(axis=1), *kinds))
        changes = np.any([kind[order][1:] != kind[order][:-1] for kind in kinds], axis=0)
        group = np.concatenate([[0], np.cumsum(changes)])
        # one running minimum serves all groups: each lies below all groups before it
        lowered = values[order] - group * (2.0 * float(values.max()) + 1.0)
        lowest = np.minimum.accumulate(lowered)
        return rows[order[1:][lowered[1:] >= lowest[:-1]]]

    def dominates(self, row: int, together: bool) -> bool:
        """Whether an earlier candidate makes this one needless; remembers it where not."""
        rows, table = np.array(self.tried[together], dtype=np.int64), self.table
        active, idle = (table.shared_active, table.shared_idle) if together else (table.active, table.idle)
        worse = (active[rows] <= active[row]) & (idle[rows] <= idle[row]) & (table.region[rows] == table.region[row])
        worse &= (self.waves[rows] <= self.waves[row]).all(axis=1)
        if together or self.by_shape:
            for column in (table.tp, table.pp, table.dp, table.grain):
                worse &= column[rows] == column[row]
        else:
            worse &= (self.devices[rows] <= self.devices[row]) & (table.grain[row] % table.grain[rows] == 0)
            worse &= self.sync[rows] <= self.sync[row]
        if worse.any():
            return True
        self.tried[together].append(row)
        return False

"""Candidates that need not be tried below a partial choice, because another of the same model-stage is as good there.

A candidate is needless where another needs no more of anything that can still matter: seconds in each wave, seconds
of synchronization, devices, bytes, and a place to lie. Whatever completes the first completes the other too, no
slower. Example, where memory cannot bind: candidates of one type and grain with (seconds, devices)

    (3.0, 8)  (3.5, 4)  (3.6, 6)  (4.0, 2)

The third is needless, for the second is faster on fewer devices. The others stay: what is left of the devices decides.
"""

from collections.abc import Mapping

import numpy as np

from nereus.plan import ModelStage, Stage
from nereus.planner.space.arrays import Floats, Ints, Mask
from nereus.planner.space.candidates import Candidates
from nereus.planner.space.line import Line


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

    def dominates(self, row: int, shares: bool) -> bool:
        """Whether a candidate remembered before makes this one needless. Those that share parameters are compared with
        each other alone."""
        rows, table = np.array(self.tried[shares], dtype=np.int64), self.table
        active, idle = (table.shared_active, table.shared_idle) if shares else (table.active, table.idle)
        worse = (active[rows] <= active[row]) & (idle[rows] <= idle[row]) & (table.region[rows] == table.region[row])
        worse &= (self.waves[rows] <= self.waves[row]).all(axis=1)
        if shares or self.by_shape:
            for column in (table.tp, table.pp, table.dp, table.grain):
                worse &= column[rows] == column[row]
        else:
            worse &= (self.devices[rows] <= self.devices[row]) & (table.grain[row] % table.grain[rows] == 0)
            worse &= self.sync[rows] <= self.sync[row]
        return bool(worse.any())

    def remember(self, row: int, shares: bool) -> None:
        """Count a candidate among those tried."""
        self.tried[shares].append(row)

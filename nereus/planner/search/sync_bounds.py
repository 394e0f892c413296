"""What weight synchronizations add to a choice at least: known, one end known, or both ends still open.

    known        the source has been chosen: a price for each candidate of the target (`known`)
    one end      a source is being chosen: what bringing its weights to the best target adds (`to_come`)
    both ends    nothing is chosen: the least over pairs of what both ends and the price between them add (`ahead`)

A synchronization is a cost of the pair, so a bound may not take the cheapest price alone: a target that is cheap to
reach may be slow. Each bound is therefore the least *sum* of a price and of what its ends lift the step by. Example:
a step takes 10 s anyway. Target A is reached in 1 s and lifts the step by 3 s, target B in 2 s and lifts it by none:
the bound is 2 s, not 1.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nereus.plan import ModelStage
from nereus.planner.prices.syncs import Pair, SyncPrice, SyncTable
from nereus.planner.search.bounds import Bounds, step_of
from nereus.planner.search.choices import Part
from nereus.planner.space.arrays import Floats, Mask
from nereus.planner.space.candidates import Candidates


class SyncBounds:
    """Bounds on the synchronizations `syncs` between the candidates of `tables`."""

    def __init__(
        self, tables: Mapping[ModelStage, Candidates], bounds: Bounds, syncs: Sequence[Pair], price: SyncPrice
    ) -> None:
        self.tables, self.bounds = tables, bounds
        self.prices = SyncTable(tables, syncs, price)
        self._tasks = {m: (table.seconds > 0).any(axis=0) for m, table in tables.items()}

    def known(self, target: ModelStage, part: Part) -> tuple[Pair, Floats, Mask] | None:
        """(the pair, seconds of each row where parameters are not shared, rows of the source's shape), where the source
        of `target` has been chosen."""
        for pair in self.prices.pairs:
            if pair[1] == target and pair[0] in part.rows:
                return pair, *self.prices.apart(pair, part.rows[pair[0]])
        return None

    def to_come(
        self, source: ModelStage, part: Part, floors: Floats, hopeful: Mask, *, limit_s: float
    ) -> Floats | float:
        """[rows of `source`]: seconds that bringing weights to a target chosen later adds at least to hopeful rows.

        floors: [rows, waves] what no completion of a row undercuts. Targets that lift the step to `limit_s` are out.
        """
        total: Floats | float = 0.0
        for pair in self.prices.pairs:
            if pair[0] == source and pair[1] not in part.rows and hopeful.any():
                if self.bounds.in_turn:
                    seconds = self.tables[pair[1]].seconds
                    added = seconds.sum(axis=1) - seconds.min(axis=0).sum()
                elif self.bounds.overlapped:  # what a wave adds may grow with the others
                    added = np.zeros(len(self.tables[pair[1]]))
                else:  # what a row adds falls as the floor rises: the highest floor serves all rows
                    added = self._lift(pair[1], part, floors[hopeful].max(axis=0))
                least_s = float(self._step(floors[hopeful]).min()) + part.sync_seconds
                added[added >= limit_s - least_s] = math.inf
                total = total + self.prices.least_from(pair, hopeful, added)
        return total

    def ahead(self, part: Part, possible: Mapping[ModelStage, Mask], *, limit_s: float) -> float:
        """Seconds that synchronizations to model-stages still to be chosen add at least to the floor of a choice.

        possible: the candidates that are left, of each. Only the largest is taken where the tasks of pairs meet in a
        wave, or waves overlap: what each adds alone may not add up then.
        """
        slack_s = limit_s - float(self._step(part.floor)) - part.sync_seconds
        total, largest, taken = 0.0, 0.0, np.zeros(self.bounds.num_waves, dtype=np.int64)
        for pair in self.prices.pairs:
            source, target = pair
            if target in part.rows:
                continue
            if source in part.rows:
                added = self._step(np.maximum(self.tables[target].seconds, part.floor)) - self._step(part.floor)
                added[~possible[target] | (added >= slack_s)] = math.inf
                chosen = np.arange(len(self.tables[source])) == part.rows[source]
                least = float(self.prices.least_from(pair, chosen, added)[part.rows[source]])
                taken += self._tasks[target]
            elif (self._tasks[source] & self._tasks[target]).any():
                continue  # both ends lift one wave, by the larger of the two: their sum would count it twice
            else:
                added = self._lift(target, part, part.floor)
                added[~possible[target] | (added >= slack_s)] = math.inf
                own = self._lift(source, part, part.floor)
                before = np.zeros_like(own) if self.bounds.overlapped else own.copy()
                before[~possible[source] | (own >= slack_s)] = math.inf
                least = self.prices.least_of(pair, before, added)
                taken += self._tasks[source] | self._tasks[target]
            total, largest = total + least, max(largest, least)
        return total if taken.max() <= 1 and not self.bounds.overlapped else largest

    def _lift(self, m: ModelStage, part: Part, floor: Floats) -> Floats:
        """[rows of `m`]: by how much choosing it lifts a step that takes `floor` anyway, at least."""
        lifted: Floats = self._step(self.bounds.completions(m, part.rows, floor)) - self._step(floor)
        return lifted

    def _step(self, waves: Floats) -> Floats:
        return step_of(waves, overlapped=self.bounds.overlapped)

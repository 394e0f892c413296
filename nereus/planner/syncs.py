"""What weight synchronizations between two model-stages cost, for all their candidates at once.

Prices depend on shapes (tp, pp, dp, type) alone, of which a table has far fewer than rows: one matrix of
[shapes of the source, shapes of the target] serves a whole search.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nereus.plan import ModelStage
from nereus.planner.candidates import Candidates, Floats, Ints

Mask = npt.NDArray[np.bool_]
Pair = tuple[ModelStage, ModelStage]


class SyncPrice(Protocol):
    """Prices weight synchronizations."""

    def matrix(self, source: ModelStage, sources: Candidates, targets: Candidates) -> Floats:
        """[sources, targets]: seconds from each candidate of a model-stage to each of another's."""


class Shapes:
    """The rows of a table by shape: `number` [rows] is the shape of each, `first` [shapes] a row of each."""

    def __init__(self, table: Candidates) -> None:
        self.keys, self.first, self.number = np.unique(table.shape_keys, return_index=True, return_inverse=True)
        self._order: Ints = np.argsort(self.number, kind="stable")
        self._starts = np.searchsorted(self.number[self._order], np.arange(len(self.keys)))

    def least(self, values: Floats) -> Floats:
        """[shapes]: the least of the values [rows] of each."""
        found: Floats = np.minimum.reduceat(values[self._order], self._starts)
        return found


class SyncTable:
    """The prices of every synchronization between the candidates of `tables`."""

    def __init__(self, tables: Mapping[ModelStage, Candidates], syncs: Sequence[Pair], price: SyncPrice) -> None:
        self.tables, self.price = tables, price
        self._shapes: dict[ModelStage, Shapes] = {}
        self.pairs = tuple(pair for pair in syncs if pair[0] in tables and pair[1] in tables)

    def apart(self, pair: Pair, row: int) -> tuple[Floats, Mask]:
        """([targets]: seconds from the source's row where parameters are not shared, [targets]: whether they could)."""
        source, target = self._of(pair[0]), self._of(pair[1])
        number = source.number[row]
        prices = self._prices(pair, np.array([number]), np.arange(len(target.keys)))[0]
        return prices[target.number], (target.keys == source.keys[number])[target.number]

    def least_from(self, pair: Pair, among: Mask, added: Floats) -> Floats:
        """[rows of the source]: the least sum of a synchronization and what its target adds, [rows of the target].

        Only for rows `among`, and with targets that add finite seconds; infinite for others.
        """
        source, target = self._of(pair[0]), self._of(pair[1])
        least = target.least(added)
        to, of = np.flatnonzero(np.isfinite(least)), np.unique(source.number[among])
        prices = self._prices(pair, of, to)
        prices[source.keys[of][:, None] == target.keys[to]] = 0.0
        found = np.full(len(source.keys), math.inf)
        found[of] = (prices + least[to]).min(axis=1, initial=math.inf)
        return found[source.number]

    def _of(self, m: ModelStage) -> Shapes:
        if m not in self._shapes:
            self._shapes[m] = Shapes(self.tables[m])
        return self._shapes[m]

    def _prices(self, pair: Pair, of: Ints, to: Ints) -> Floats:
        """[shapes `of` the source, shapes of the target]: seconds where parameters are not shared."""
        sources = self.tables[pair[0]].take(self._of(pair[0]).first[of])
        targets = self.tables[pair[1]].take(self._of(pair[1]).first[to])
        return self.price.matrix(pair[0], sources, targets)

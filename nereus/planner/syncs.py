"""What weight synchronizations between two model-stages cost, for all their candidates at once.

Prices depend on shapes (tp, pp, dp, type) alone, of which a table has far fewer than rows: one matrix of
[shapes of the source, shapes of the target] serves a whole search.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nereus.plan import ModelStage
from nereus.planner.candidates import Candidates, Floats, Ints

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
        self._prices: dict[Pair, tuple[Floats, Floats]] = {}
        self.pairs = tuple(pair for pair in syncs if pair[0] in tables and pair[1] in tables)

    def apart(self, pair: Pair, row: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """([targets]: seconds from the source's row where parameters are not shared, [targets]: whether they could)."""
        source, target = self._of(pair[0]), self._of(pair[1])
        number = source.number[row]
        return self._matrices(pair)[0][number][target.number], (target.keys == source.keys[number])[target.number]

    def least_from(self, pair: Pair, added: Floats) -> Floats:
        """[rows of the source]: the least sum of a synchronization and what its target adds, [rows of the target]."""
        prices = self._matrices(pair)[1]
        least: Floats = (prices + self._of(pair[1]).least(added)).min(axis=1)
        return least[self._of(pair[0]).number]

    def least_at(self, pair: Pair, row: int, added: Floats) -> float:
        """As `least_from`, for one row of the source."""
        prices = self._matrices(pair)[1][self._of(pair[0]).number[row]]
        return float((prices + self._of(pair[1]).least(added)).min())

    def _of(self, m: ModelStage) -> Shapes:
        if m not in self._shapes:
            self._shapes[m] = Shapes(self.tables[m])
        return self._shapes[m]

    def _matrices(self, pair: Pair) -> tuple[Floats, Floats]:
        """[source shapes, target shapes]: seconds where parameters are not shared, and where they are when they can."""
        if pair not in self._prices:
            source, target = self._of(pair[0]), self._of(pair[1])
            sources, targets = self.tables[pair[0]].take(source.first), self.tables[pair[1]].take(target.first)
            apart = self.price.matrix(pair[0], sources, targets)
            self._prices[pair] = apart, np.where(source.keys[:, None] == target.keys[None, :], 0.0, apart)
        return self._prices[pair]

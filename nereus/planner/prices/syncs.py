"""What weight synchronizations between two model-stages cost, for all their candidates at once.

Prices depend on few properties of a candidate, of which a table has far fewer combinations than rows: one matrix over
the classes of equal price serves a whole search.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from nereus.plan import ModelStage
from nereus.planner.space.arrays import Floats, Ints, Mask
from nereus.planner.space.candidates import Candidates

Pair = tuple[ModelStage, ModelStage]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """What the price of a synchronization may depend on of each candidate, [rows]."""

    tp: Ints
    pp: Ints
    dp: Ints
    region: Ints

    @property
    def num_devices(self) -> Ints:
        return self.tp * self.pp * self.dp

    @classmethod
    def of(cls, table: "Shapes | Candidates", rows: "Ints | slice") -> "Shapes":
        return cls(table.tp[rows], table.pp[rows], table.dp[rows], table.region[rows])


class SyncPrice(Protocol):
    """Prices weight synchronizations."""

    def matrix(self, source: ModelStage, sources: "Shapes | Candidates", targets: "Shapes | Candidates") -> Floats:
        """[sources, targets]: seconds from each candidate of a model-stage to each of another's."""

    def classes(self, sources: Candidates, targets: Candidates) -> tuple[Ints, Ints]:
        """([sources], [targets]): keys; candidates with equal ones have equal prices."""


class _Groups:
    """The rows of a table by key: `number` [rows] is the group of each, `first` [groups] a row of each."""

    def __init__(self, keys: Ints) -> None:
        self.keys, self.first, self.number = np.unique(keys, return_index=True, return_inverse=True)
        self._order: Ints = np.argsort(self.number, kind="stable")
        self._starts = np.searchsorted(self.number[self._order], np.arange(len(self.keys)))

    def __len__(self) -> int:
        return len(self.keys)

    def least(self, values: Floats) -> Floats:
        """[groups]: the least of the values [rows] of each."""
        found: Floats = np.minimum.reduceat(values[self._order], self._starts)
        return found


class _PairPrices:
    """Prices between the candidates of two tables; nothing where both have one shape and may share parameters."""

    def __init__(self, source: ModelStage, sources: Candidates, targets: Candidates, price: SyncPrice) -> None:
        of, to = price.classes(sources, targets)
        self.sources, self.targets = _Groups(of), _Groups(to)
        self._source, self._price = source, price
        self._one_of_each = Shapes.of(sources, self.sources.first), Shapes.of(targets, self.targets.first)
        self.source_keys, self.target_keys = sources.shape_keys, targets.shape_keys

    @functools.cached_property
    def _shapes(self) -> _Groups:
        """The targets by shape."""
        return _Groups(self.target_keys)

    @functools.cached_property
    def _twins(self) -> tuple[Ints, Ints]:
        """(rows of the source that a target has the shape of, the number of that shape among the targets')."""
        place = np.minimum(np.searchsorted(self._shapes.keys, self.source_keys), len(self._shapes) - 1)
        rows = np.flatnonzero(self._shapes.keys[place] == self.source_keys)
        return rows, place[rows]

    def _prices(self, of: Ints, to: Ints | slice) -> Floats:
        """[classes `of` the sources, classes `to` of the targets]."""
        sources, targets = self._one_of_each
        return self._price.matrix(self._source, Shapes.of(sources, of), Shapes.of(targets, to))

    def apart(self, row: int) -> tuple[Floats, Mask]:
        prices = self._prices(self.sources.number[row : row + 1], slice(None))[0][self.targets.number]
        return prices, self.target_keys == self.source_keys[row]

    def least_from(self, among: Mask, added: Floats) -> Floats:
        least = self.targets.least(added)
        of = np.unique(self.sources.number[among])
        found = np.full(len(self.sources), math.inf)
        found[of] = self._least(of, least)
        result: Floats = found[self.sources.number]
        rows, shapes = self._twins
        result[rows] = np.minimum(result[rows], self._shapes.least(added)[shapes])
        result[~among] = math.inf
        return result

    def least_of(self, before: Floats, added: Floats) -> float:
        first, least = self.sources.least(before), self.targets.least(added)
        lightest = int(first.argmin())
        if not math.isfinite(first[lightest]):
            return math.inf
        rows, shapes = self._twins
        known = float((before[rows] + self._shapes.least(added)[shapes]).min(initial=math.inf))
        known = min(known, float(first[lightest] + self._least(np.array([lightest]), least)[0]))
        of = np.flatnonzero(first + least.min() < known)  # whatever adds more by itself is beaten
        return min(known, float((first[of] + self._least(of, least)).min(initial=math.inf)))

    def _least(self, of: Ints, least: Floats) -> Floats:
        """[classes `of` the sources]: the least sum of a price and `least` [classes of the targets]."""
        lightest = int(least.argmin())
        if not len(of) or not math.isfinite(least[lightest]):
            return np.full(len(of), math.inf)
        known = self._prices(of, np.array([lightest]))[:, 0] + least[lightest]
        to = np.flatnonzero(least < known.max())
        found: Floats = np.minimum(known, (self._prices(of, to) + least[to]).min(axis=1, initial=math.inf))
        return found


class SyncTable:
    """The prices of every synchronization between the candidates of `tables`."""

    def __init__(self, tables: Mapping[ModelStage, Candidates], syncs: Sequence[Pair], price: SyncPrice) -> None:
        self.tables, self.price = tables, price
        self._known: dict[Pair, _PairPrices] = {}
        self.pairs = tuple(pair for pair in syncs if pair[0] in tables and pair[1] in tables)

    def apart(self, pair: Pair, row: int) -> tuple[Floats, Mask]:
        """([targets]: seconds from the source's row where parameters are not shared, [targets]: whether they could)."""
        return self._of(pair).apart(row)

    def least_from(self, pair: Pair, among: Mask, added: Floats) -> Floats:
        """[rows of the source]: the least sum of a synchronization and what its target adds, [rows of the target].

        Only for rows `among`, and with targets that add finite seconds; infinite for others.
        """
        return self._of(pair).least_from(among, added)

    def least_of(self, pair: Pair, before: Floats, added: Floats) -> float:
        """The least sum of what a source adds, [rows of the source], a synchronization, and what its target adds."""
        return self._of(pair).least_of(before, added)

    def _of(self, pair: Pair) -> _PairPrices:
        if pair not in self._known:
            self._known[pair] = _PairPrices(pair[0], self.tables[pair[0]], self.tables[pair[1]], self.price)
        return self._known[pair]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Candidates of one model-stage as the bounds see them: devices [rows] and seconds [rows, waves]."""

    devices: Ints
    seconds: Floats

    @property
    def fastest(self) -> Floats:
        """[waves]: the fewest seconds of any row in each."""
        return np.array([seconds.min() for seconds in self.seconds.T])

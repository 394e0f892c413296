"""Which (layout, dp, micro-batch, kind of block) a model-stage could have on a line of devices.

Rows depend on the line and on numbers of samples, not on lengths or prices: they are kept between decisions, and roles
whose models admit the same layouts share them.
"""

import dataclasses
import functools

import numpy as np

from nereus.cluster import Link
from nereus.planner.prices.passes import Span
from nereus.planner.prices.task_prices import Layouts
from nereus.planner.space.arrays import Ints, Mask
from nereus.planner.space.line import Region
from nereus.planner.space.settings import Pairs


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Rows [first, last) of a sketch: those on one kind of block whose axes cross the same links.

    cell: [last - first] the place of each row in a matrix of [layouts, settings], flattened.
    """

    region: int
    layouts: Layouts
    span: Span
    first: int
    last: int
    cell: Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a sketch as columns, [rows] each; `at` numbers the layout among all `layouts`."""

    layouts: Layouts
    families: tuple[Family, ...]
    at: Ints
    tp: Ints
    pp: Ints
    dp: Ints
    grain: Ints
    micro_batch: Ints
    region: Ints

    def __len__(self) -> int:
        return len(self.at)

    @functools.cached_property
    def devices(self) -> Ints:
        return self.tp * self.pp * self.dp

    @functools.cached_property
    def continues(self) -> Mask:
        """Rows that differ from the one before in a larger micro-batch alone."""
        same = np.zeros(len(self), dtype=bool)
        if len(self):
            kind = np.stack([self.at, self.dp, self.grain, self.region])
            same[1:] = (kind[:, 1:] == kind[:, :-1]).all(axis=0) & (self.micro_batch[1:] > self.micro_batch[:-1])
        return same


@functools.lru_cache(maxsize=16)
def rows_of(
    layouts: Layouts, held: tuple[bool, ...], pairs: Pairs, regions: tuple[Region, ...], node_sizes: tuple[int, ...]
) -> Rows:
    """The rows that nodes of such sizes admit; held: whether a device holds the state of each layout."""
    families, first = list[Family](), 0
    columns: list[tuple[Ints, ...]] = []
    number = {layout: place for place, layout in enumerate(layouts)}
    keeps = dict(zip(layouts, held, strict=True))
    for region_index, region in enumerate(regions):
        for chosen, grains, span in _variants(layouts, region, node_sizes):
            if not chosen:
                continue
            tp, pp = np.array(chosen, dtype=np.int64).T
            grain = np.array(grains, dtype=np.int64)
            limit = _most_devices(grain, region, node_sizes) * np.array([keeps[layout] for layout in chosen])
            devices = (tp * pp)[:, None] * pairs.dp
            possible = devices <= limit[:, None]
            if not region.one_node:
                possible &= devices > grain[:, None]
            at, setting = np.nonzero(possible)
            place = np.array([number[layout] for layout in chosen])[at]
            region_of = np.full(len(at), region_index, dtype=np.int64)
            columns.append((place, tp[at], pp[at], pairs.dp[setting], grain[at], pairs.micro_batch[setting], region_of))
            cell = at * len(pairs) + setting
            families.append(Family(region_index, chosen, span, first, first + len(at), cell))
            first += len(at)
    empty = (np.zeros(0, dtype=np.int64),) * 7
    return Rows(layouts, tuple(families), *map(np.concatenate, zip(*(columns or [empty]), strict=True)))


def _most_devices(grain: Ints, region: Region, node_sizes: tuple[int, ...]) -> Ints:
    """[layouts]: devices that groups of `grain` can use on a block of a region."""
    if region.one_node:
        inside: Ints = max(node_sizes) // grain * grain
        return inside
    sizes, counts = np.unique(np.array(node_sizes, dtype=np.int64), return_counts=True)
    fit: Ints = (sizes // grain[:, None] * counts).sum(axis=1) * grain
    return fit


def _variants(layouts: Layouts, region: Region, node_sizes: tuple[int, ...]) -> list[tuple[Layouts, list[int], Span]]:
    """(layouts, devices that must stay in one node, links) of the ways to lie in a region.

    Where a whole unit fits in a node, it may be kept there, or only its tensor-parallel groups.
    """
    size, inter = max(node_sizes), Link.INTER_NODE
    if region.one_node:
        small = tuple((tp, pp) for tp, pp in layouts if tp * pp <= size)
        return [(small, [tp for tp, _ in small], Span())]
    if len(node_sizes) == 1:
        return []
    whole = tuple((tp, pp) for tp, pp in layouts if pp > 1 and tp * pp <= size)
    return [
        (layouts, [tp for tp, _ in layouts], Span(pp_link=inter, dp_link=inter)),
        (whole, [tp * pp for tp, pp in whole], Span(dp_link=inter)),
    ]

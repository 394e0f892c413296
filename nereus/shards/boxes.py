"""Which box of which logical tensor a rank of a layout holds, and where it lies in the rank's flat buffer. Pure.

A box is a hyper-rectangle in the coordinates of the logical (HF-shaped) tensor. Loading, saving, weight
synchronization and every transition are "intersect source boxes with target boxes". The same box holds for the
parameter and for its gradient, fp32 master and Adam moments, so optimizer tensors need no table of their own.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence

from nereus.model import Axis, ModelSpec, Param
from nereus.plan import Layout

ALIGN_ELEMENTS = 64
"""Stored tensors start at multiples of this in a flat buffer, for vector loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Half-open ranges `start[i]:stop[i]` for every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return math.prod(map(operator.sub, self.stop, self.start))

    def intersect(self, other: "Box") -> "Box | None":
        """The common box, or None where it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(operator.lt, start, stop)) else None

    def subtract(self, other: "Box") -> "list[Box]":
        """Disjoint boxes that cover what of this box lies outside `other`."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            if start[dim] < common.start[dim]:
                rest.append(Box(tuple(start), (*stop[:dim], common.start[dim], *stop[dim + 1 :])))
            if common.stop[dim] < stop[dim]:
                rest.append(Box((*start[:dim], common.stop[dim], *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return rest

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that select this box from a tensor that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one logical parameter.

    box: the part it holds (may be empty along the cut dimension: fewer rows than ranks).
    owned: the part it counts for (global norms, saving); over a unit the owned boxes cover the tensor exactly
        once. None where other ranks hold all of the box with a lower rank: a pure replica.
    offset: first element in the rank's flat buffer; the box is stored there row-major.
    """

    param: Param
    box: Box
    owned: Box | None
    offset: int

    @property
    def replicated(self) -> bool:
        return self.owned != self.box


def layer_range(num_layers: int, pp: int, pp_rank: int) -> range:
    """Decoder layers of a pipeline stage; sizes differ by at most one, later stages get the extra ones."""
    return range(num_layers * pp_rank // pp, num_layers * (pp_rank + 1) // pp)


def axis_range(spec: ModelSpec, axis: Axis, tp: int, tp_rank: int) -> range:
    """Items of `axis` (heads, channels, rows) that a tensor-parallel rank holds.

    A rank holds each KV head its query heads use, so KV ranges of neighbours overlap where tp exceeds or does not
    divide the KV heads.
    """
    if axis is Axis.KV_HEADS:
        heads = axis_range(spec, Axis.HEADS, tp, tp_rank)
        group = spec.num_heads // spec.num_kv_heads
        return range(heads.start // group, (heads.stop - 1) // group + 1)
    size = {Axis.HEADS: spec.num_heads, Axis.FFN: spec.ffn, Axis.VOCAB: spec.vocab}[axis]
    return range(size * tp_rank // tp, size * (tp_rank + 1) // tp)


def kv_of_head(spec: ModelSpec, tp: int, tp_rank: int) -> list[int]:
    """For each query head of a tensor-parallel rank the rank's own index of its KV head."""
    group = spec.num_heads // spec.num_kv_heads
    first = axis_range(spec, Axis.KV_HEADS, tp, tp_rank).start
    return [head // group - first for head in axis_range(spec, Axis.HEADS, tp, tp_rank)]


def repeats_of(kv_of_head: Sequence[int]) -> int | None:
    """How many query heads share each local KV head, where that is the same for all; else None."""
    num_kv = kv_of_head[-1] + 1
    each, rest = divmod(len(kv_of_head), num_kv)
    uniform = not rest and list(kv_of_head) == [i // each for i in range(len(kv_of_head))]
    return each if uniform else None


def holds(spec: ModelSpec, param: Param, layout: Layout, pp_rank: int) -> bool:
    """Whether a pipeline stage holds (a part of) the parameter."""
    if param.layer is not None:
        return param.layer in layer_range(spec.num_layers, layout.pp, pp_rank)
    return (param.first and pp_rank == 0) or (param.last and pp_rank == layout.pp - 1)


def _cut(spec: ModelSpec, param: Param, tp: int, tp_rank: int) -> tuple[Box, Box | None]:
    """(box, owned box) of a tensor-parallel rank, before tied copies are considered."""
    whole = Box.whole(param.shape)
    if param.dim is None or param.axis is None:
        return whole, whole if tp_rank == 0 else None

    def rows(first: int, last: int) -> Box:
        start, stop = list(whole.start), list(whole.stop)
        start[param.dim], stop[param.dim] = first * param.unit, last * param.unit  # type: ignore[index]
        return Box(tuple(start), tuple(stop))

    held = axis_range(spec, param.axis, tp, tp_rank)
    before = axis_range(spec, param.axis, tp, tp_rank - 1).stop if tp_rank else 0
    own_start = max(held.start, before)
    return rows(held.start, held.stop), rows(own_start, held.stop) if own_start < held.stop else None


@functools.lru_cache(maxsize=4096)
def shards(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Shard, ...]:
    """Every shard a rank of a unit holds, in memory order: fused parameters are adjacent, others aligned."""
    tp_rank, pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)
    result: list[Shard] = []
    offset, previous = 0, None
    for param in spec.params:
        if not holds(spec, param, layout, pp_rank):
            continue
        box, owned = _cut(spec, param, layout.tp, tp_rank)
        if param.first and param.last and layout.pp > 1 and pp_rank > 0:
            owned = None
        if previous is None or param.fused is None or previous != (param.layer, param.fused):
            offset = -(-offset // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        result.append(Shard(param, box, owned, offset))
        offset += box.numel
        previous = (param.layer, param.fused)
    return tuple(result)


def flat_numel(spec: ModelSpec, layout: Layout, rank: int) -> int:
    """Elements of a rank's flat buffer, padding included."""
    last = shards(spec, layout, rank)[-1]
    return -(-(last.offset + last.box.numel) // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def held_numel(spec: ModelSpec, layout: Layout, rank: int) -> int:
    """Elements of parameters that a rank holds, padding excluded."""
    return sum(shard.box.numel for shard in shards(spec, layout, rank))


@functools.lru_cache(maxsize=4096)
def shard_table(spec: ModelSpec, layout: Layout, rank: int) -> dict[str, Shard]:
    """The shards of a rank by parameter name. Do not modify."""
    return {shard.param.name: shard for shard in shards(spec, layout, rank)}


def holders(spec: ModelSpec, layout: Layout, param: Param) -> Iterator[tuple[int, Shard]]:
    """(rank, shard) of every rank of a unit that holds a non-empty part of the parameter."""
    for rank in range(layout.num_ranks):
        shard = shard_table(spec, layout, rank).get(param.name)
        if shard is not None and shard.box.numel:
            yield rank, shard

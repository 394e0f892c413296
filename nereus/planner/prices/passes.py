"""Counts of one micro-batch through a pipeline stage: what every task of training and inference is made of.

    layer, head, embedding (`operations`) -> a pass of some tokens -> counts per pass, token, pair and loss token

It knows neither devices nor placement: a `Span` says which links the axes cross.
"""

import dataclasses
import functools

from nereus.cluster import Link
from nereus.engine_facts import Op
from nereus.plan import Layout, Recompute
from nereus.planner.prices.operations import (
    COLUMN,
    Bill,
    Counts,
    Shape,
    Tokens,
    embedding_forward,
    head_forward,
    layer_backward,
    layer_forward,
)
from nereus.shards.boxes import layer_range


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Which link class each axis of a model-stage crosses; tensor parallelism stays inside a node."""

    tp_link: Link = Link.INTRA_NODE
    pp_link: Link = Link.INTRA_NODE
    dp_link: Link = Link.INTRA_NODE


@functools.lru_cache(maxsize=4096)
def pipeline_basis(
    shape: Shape, layout: Layout, value_bytes: int, span: Span, backward: Recompute | None
) -> tuple[Counts, Counts, Counts, Counts]:
    """Counts of a pass without tokens, and per token, per pair and per loss token: all counts are linear in these."""
    units = (Tokens(0, 0, 0), Tokens(1, 0, 0), Tokens(0, 1, 0), Tokens(0, 0, 1))
    empty, *others = (pipeline_pass(shape, layout, value_bytes, span, backward, unit).counts for unit in units)
    count, pairs, loss = (other - empty for other in others)
    return empty, count, pairs, loss


def pipeline_pass(
    shape: Shape, layout: Layout, value_bytes: int, span: Span, backward: Recompute | None, tokens: Tokens
) -> Bill:
    """One micro-batch through the slowest pipeline stage: the last, which has most layers and the head.

    Forward, and with `backward` also the backward pass and what it recomputes.
    """
    tp, pp, link = layout.tp, layout.pp, span.tp_link
    layers = len(layer_range(shape.layers, pp, pp - 1))
    forward = layer_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link)
    ends = head_forward(shape, tokens, tp=tp, tp_link=link)
    if pp == 1:
        ends.add_bill(embedding_forward(shape, tokens, tp=tp, value_bytes=value_bytes, tp_link=link))
    bill = forward.scaled(layers)
    bill.add_bill(ends)
    if backward is not None:
        bill.add_bill(layer_backward(forward), layers)
        bill.add_bill(layer_backward(ends))
        bill.add_bill(recomputed(forward, backward), layers)
    passes = 1 if backward is None else 2
    if pp > 1:
        bill.add(Op.POINT_TO_POINT, passes * tokens.count * shape.hidden * value_bytes, passes, span.pp_link)
    bill.add(Op.LAUNCH, 0, passes)
    return bill


def recomputed(forward: Bill, recompute: Recompute) -> Bill:
    """What the backward pass of a layer computes again."""
    if recompute is Recompute.FULL:
        return forward
    bill = Bill()
    if recompute is Recompute.SELECTIVE:
        column = COLUMN[(Op.ELEMENTWISE, None)]
        bill.counts[:, column] = forward.counts[:, column] / 2
    return bill

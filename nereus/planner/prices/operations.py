"""What a rank computes and sends, counted from shapes: floating-point operations, bytes and calls per operation class.

Knows nothing of seconds. A `Bill` is a sum of (work, calls) per class and link; `calibration` turns it into time. The
counts follow the engine: sequences are packed for linear layers, logits exist for response tokens only, a collective
of n ranks over b bytes puts 2(n-1)/n * b (all-reduce) or (n-1)/n * b (all-gather, reduce-scatter) on the wire.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nereus.cluster import Link
from nereus.engine_facts import Op, causal_pairs
from nereus.model import Head, ModelSpec

COMPUTE = frozenset({Op.GEMM, Op.ATTENTION, Op.ATTENTION_BACKWARD})
"""Classes whose work is in floating-point operations."""

MEMORY = frozenset({Op.DECODE_GEMM, Op.ATTENTION_DECODE, Op.ELEMENTWISE})
"""Classes whose work is in bytes of device memory read and written."""

COLLECTIVES = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.POINT_TO_POINT})
"""Classes whose work is in bytes a rank puts on a link."""

GEMMS_PER_LAYER = 4
"""Fused qkv, attention output, fused gate-up, down."""

ELEMENTWISE_PER_LAYER = 6
"""Two norms, two residual sums, rotary embedding, activation."""

LOGITS_PASSES = 4
"""Times the fp32 logits are read or written per forward: product, maximum, exponential sum, gather."""

OpKey = tuple[Op, Link | None]
Counts = npt.NDArray[np.float64]


def key_name(key: OpKey) -> str:
    """`gemm` or `all_reduce@inter_node`: how events and reports name a class."""
    op, link = key
    return op.value if link is None else f"{op.value}@{link.value}"


def parse_key(name: str) -> OpKey:
    """The class named by `key_name`."""
    op, _, link = name.partition("@")
    return Op(op), Link(link) if link else None


KEYS: tuple[OpKey, ...] = tuple(
    (op, link)
    for op in Op
    for link in ((Link.INTRA_NODE, Link.INTER_NODE) if op in COLLECTIVES or op is Op.GROUP_SETUP else (None,))
)
"""Every class and link, in the order of a bill's columns."""

COLUMN = {key: column for column, key in enumerate(KEYS)}
COLUMN |= {(op, Link.SELF): COLUMN[(op, link)] for op, link in KEYS if link is Link.INTRA_NODE}


class Bill:
    """Work (row 0) and calls (row 1) per operation class; a vector, so that sums and prices are cheap."""

    __slots__ = ("counts",)

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = np.zeros((2, len(KEYS))) if counts is None else counts

    def add(self, op: Op, work: float, calls: float, link: Link | None = None) -> None:
        column = COLUMN[(op, link)]
        self.counts[0, column] += work
        self.counts[1, column] += calls

    def add_bill(self, other: "Bill", times: float = 1.0) -> None:
        self.counts += other.counts * times

    def scaled(self, times: float) -> "Bill":
        return Bill(self.counts * times)

    def __iter__(self) -> Iterator[tuple[OpKey, float, float]]:
        """(class, work, calls) of what is not zero."""
        for column in np.flatnonzero(self.counts.any(axis=0)):
            yield KEYS[column], float(self.counts[0, column]), float(self.counts[1, column])


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What the counts need of a decoder-only transformer; also those the engine cannot run (MoE, ungated MLP).

    mlp_matrices: 3 for a gated MLP, 2 otherwise. experts: experts per layer of which a token uses `experts_per_token`;
    `ffn` is the width of one expert. vocab 0 stands for a scalar head.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    mlp_matrices: int = 3
    experts: int = 1
    experts_per_token: float = 1
    window: int | None = None

    @classmethod
    def of(cls, spec: ModelSpec) -> "Shape":
        return _shape_of(spec)

    @property
    def attention_params(self) -> int:
        """Weights of one layer's four attention projections."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Weights of one expert (or of the MLP) of one layer."""
        return self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_params(self) -> int:
        """Weights of one layer, all experts."""
        return self.attention_params + self.experts * self.mlp_params

    @property
    def active_layer_params(self) -> float:
        """Weights of one layer a token is multiplied with."""
        return self.attention_params + self.experts_per_token * self.mlp_params


@functools.lru_cache(maxsize=64)
def _shape_of(spec: ModelSpec) -> Shape:
    return Shape(
        layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=spec.vocab if spec.head is Head.LM else 0,
        window=spec.sliding_window,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """One micro-batch: `count` packed tokens, `pairs` query-key pairs of its causal attention, `loss` with logits."""

    count: float
    pairs: float
    loss: float

    @classmethod
    def of(cls, samples: float, length: float, *, loss_length: float, window: int | None = None) -> "Tokens":
        """`samples` sequences of one length, of which the last `loss_length` tokens have logits."""
        return cls(samples * length, samples * causal_pairs(length, window), samples * loss_length)

    def scaled(self, times: float) -> "Tokens":
        return Tokens(self.count * times, self.pairs * times, self.loss * times)


def hops(num_ranks: int) -> float:
    """Latency steps of one call over a tree."""
    return max(1.0, math.log2(num_ranks)) if num_ranks > 1 else 0.0


def add_collective(
    bill: Bill, op: Op, payload_bytes: float, calls: float, num_ranks: int, link: Link, *, ranks_per_node: int = 1
) -> None:
    """`calls` collectives over `num_ranks` that together reduce, gather or exchange `payload_bytes` (the full tensor).

    ranks_per_node: ranks of the group in one node; between nodes they share the traffic over their network cards.
    """
    if num_ranks == 1:
        return
    factor = 2 if op is Op.ALL_REDUCE else 1
    shared = min(ranks_per_node, num_ranks) if link is Link.INTER_NODE else 1
    steps = num_ranks - 1 if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) else hops(num_ranks)
    bill.add(op, factor * payload_bytes * (num_ranks - 1) / num_ranks / shared, calls * steps, link)


def layer_forward(
    shape: Shape, tokens: Tokens, *, tp: int, value_bytes: int, tp_link: Link, sequence_parallel: bool = False
) -> Bill:
    """One decoder layer, one micro-batch, on one tensor-parallel rank. `sequence_parallel` shares out the norms too."""
    bill, heads = Bill(), -(-shape.heads // tp)
    bill.add(Op.GEMM, 2 * tokens.count * shape.active_layer_params * heads / shape.heads, GEMMS_PER_LAYER)
    bill.add(Op.ATTENTION, 4 * tokens.pairs * heads * shape.head_dim, 1)
    whole = 10 * shape.hidden / (tp if sequence_parallel else 1)
    mlp = shape.mlp_matrices * shape.ffn * shape.experts_per_token
    cut = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + mlp
    bill.add(Op.ELEMENTWISE, tokens.count * (whole + cut / tp) * value_bytes, ELEMENTWISE_PER_LAYER)
    add_collective(bill, Op.ALL_REDUCE, 2 * tokens.count * shape.hidden * value_bytes, 2, tp, tp_link)
    return bill


def layer_backward(forward: Bill) -> Bill:
    """Backward of a layer: twice the products (inputs and weights), 2.5 times the attention (scores again)."""
    bill = Bill()
    for (op, link), work, calls in forward:
        if op is Op.ATTENTION:
            bill.add(Op.ATTENTION_BACKWARD, 2.5 * work, calls, link)
        elif op in COLLECTIVES:
            bill.add(op, work, calls, link)
        else:
            bill.add(op, 2 * work, 2 * calls, link)
    return bill


def head_forward(shape: Shape, tokens: Tokens, *, tp: int, tp_link: Link) -> Bill:
    """Logits and log-probabilities of the loss tokens, vocabulary-parallel, in fp32; a scalar head costs nothing."""
    bill = Bill()
    if shape.vocab:
        bill.add(Op.GEMM, 2 * tokens.loss * shape.hidden * shape.vocab / tp, 1)
        bill.add(Op.ELEMENTWISE, LOGITS_PASSES * tokens.loss * shape.vocab / tp * 4, LOGITS_PASSES)
        add_collective(bill, Op.ALL_REDUCE, 3 * tokens.loss * 4, 3, tp, tp_link)
    return bill


def embedding_forward(shape: Shape, tokens: Tokens, *, tp: int, value_bytes: int, tp_link: Link) -> Bill:
    """Vocabulary-parallel lookup, summed over the tensor-parallel ranks."""
    bill = Bill()
    bill.add(Op.ELEMENTWISE, 2 * tokens.count * shape.hidden * value_bytes, 1)
    add_collective(bill, Op.ALL_REDUCE, tokens.count * shape.hidden * value_bytes, 1, tp, tp_link)
    return bill


def decode_step(
    shape: Shape, *, batch: float, context: float, tp: int, value_bytes: int, tp_link: Link, compute_bound: bool
) -> Bill:
    """One new token for `batch` sequences through all layers and the head, on one tensor-parallel rank.

    context: tokens a sequence attends to. compute_bound: the products take longer than reading the weights.
    """
    bill, heads = Bill(), -(-shape.heads // tp)
    weights = (shape.layers * shape.active_layer_params * heads / shape.heads) + shape.hidden * shape.vocab / tp
    products = GEMMS_PER_LAYER * shape.layers + 1
    if compute_bound:
        bill.add(Op.GEMM, 2 * batch * weights, products)
    else:
        bill.add(Op.DECODE_GEMM, weights * value_bytes, products)
    kv_heads = min(shape.kv_heads, max(1, -(-shape.kv_heads // tp)))
    cache_bytes = 2 * kv_heads * shape.head_dim * value_bytes * shape.layers
    bill.add(Op.ATTENTION_DECODE, batch * context * cache_bytes, shape.layers)
    bill.add(
        Op.ELEMENTWISE,
        batch * (shape.layers * 12 * shape.hidden * value_bytes + shape.vocab / tp * 4 * LOGITS_PASSES),
        ELEMENTWISE_PER_LAYER * shape.layers + LOGITS_PASSES,
    )
    calls = 2 * shape.layers + 2
    add_collective(bill, Op.ALL_REDUCE, calls * batch * shape.hidden * value_bytes, calls, tp, tp_link)
    return bill

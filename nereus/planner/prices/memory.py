"""Bytes of the tensors that a rank holds: per token and layer, per vocabulary matrix, per flat buffer.

State follows the flat buffers of the engine exactly (alignment included). Activations are counted tensor by tensor as
the engine keeps them. `footprints` makes model-stages of these.
"""

import functools

from nereus.engine_facts import LOGITS_COPIES
from nereus.model import Axis, Head, ModelSpec, Param
from nereus.plan import Layout, Recompute
from nereus.shards.boxes import ALIGN_ELEMENTS, axis_range, layer_range


def logits_bytes(
    spec: ModelSpec, tp: int, value_bytes: int, tokens: float, output: float = 0, *, copies: int = LOGITS_COPIES
) -> int:
    """fp32 logits of the loss tokens on a rank, and the hidden states they are made from: the stage's `output` (its
    bytes), the rows picked of it, those rows behind the norm. A scalar head counts as nothing.
    """
    if spec.head is not Head.LM:
        return 0
    return int(tokens * (copies * 4 * -(-spec.vocab // tp) + 2 * spec.hidden * value_bytes) + output)


@functools.lru_cache(maxsize=256)
def _widths(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """(query and KV channels, MLP channels) of the rank that has most of each."""
    ranks = range(tp)
    heads = max(sum(len(axis_range(spec, axis, tp, r)) for axis in (Axis.HEADS, Axis.KV_HEADS)) for r in ranks)
    return heads * spec.head_dim, -(-spec.ffn // tp)


@functools.lru_cache(maxsize=1024)
def layer_bytes_per_token(spec: ModelSpec, tp: int, recompute: Recompute, value_bytes: int) -> float:
    """Bytes a layer keeps per token until its backward pass, on one tensor-parallel rank.

    Without recomputation: input and output of both norms; queries, keys and values as computed and as rotated; the
    attention's output; gate and up, the activated gate, their product. Scores are never kept (attention is computed in
    blocks). Selective recomputation drops the outputs of norms, the activated gate and the product; full keeps the
    input alone.
    """
    attention, ffn = _widths(spec, tp)
    if recompute is Recompute.FULL:
        return spec.hidden * value_bytes
    if recompute is Recompute.SELECTIVE:
        return (2 * spec.hidden + 3 * attention + 2 * ffn) * value_bytes
    return (4 * spec.hidden + 3 * attention + 4 * ffn) * value_bytes


@functools.lru_cache(maxsize=1024)
def forward_bytes_per_token(spec: ModelSpec, tp: int, value_bytes: int) -> float:
    """Bytes per token of a layer's largest moment without gradients: input of the stage, of the layer and of its MLP,
    gate and up, the activated gate, the product."""
    _, ffn = _widths(spec, tp)
    return (3 * spec.hidden + 4 * ffn) * value_bytes


@functools.lru_cache(maxsize=1024)
def backward_bytes_per_token(spec: ModelSpec, tp: int, recompute: Recompute, value_bytes: int) -> float:
    """Bytes per token of a layer's backward pass besides what was kept and one more tensor of the MLP's width.

    At its largest moment, inside the MLP: the gradients of the hidden states and of the product, with selective
    recomputation also the activated gate, the product and their gradients; with full all the layer would have kept.
    """
    _, ffn = _widths(spec, tp)
    if recompute is Recompute.FULL:
        return layer_bytes_per_token(spec, tp, Recompute.NONE, value_bytes) + ffn * value_bytes
    return (spec.hidden + (1 if recompute is Recompute.NONE else 5) * ffn) * value_bytes


def mlp_bytes_per_token(spec: ModelSpec, tp: int, value_bytes: int) -> float:
    """Bytes per token of one tensor of the MLP's width; per hidden unit, of the gradient of the MLP's last matrix.

    A backward pass holds the larger of the two: the matrix's gradient is whole before it is accumulated.
    """
    return _widths(spec, tp)[1] * value_bytes


def vocabulary_matrix_bytes(spec: ModelSpec, tp: int, value_bytes: int) -> int:
    """Bytes of a rank's part of the embedding, or of the head. The gradient of either is as large."""
    return -(-spec.vocab // tp) * spec.hidden * value_bytes


@functools.lru_cache(maxsize=4096)
def state_numel(spec: ModelSpec, layout: Layout, pp_rank: int) -> int:
    """Elements of the largest flat buffer among the tensor-parallel ranks of a pipeline stage.

    Equals the maximum of `boxes.flat_numel`, from one layer's sizes instead of all shards.
    """
    layers = len(layer_range(spec.num_layers, layout.pp, pp_rank))
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    largest = 0
    for tp_rank in range(layout.tp):
        layer, ends = _padded_sizes(spec, layout.tp, tp_rank)
        total = layers * layer
        for numel, on_first, on_last in ends:
            if (on_first and first) or (on_last and last):
                total += numel
        largest = max(largest, total)
    return largest


@functools.lru_cache(maxsize=4096)
def _padded_sizes(spec: ModelSpec, tp: int, tp_rank: int) -> tuple[int, tuple[tuple[int, bool, bool], ...]]:
    """(elements of one layer, (elements, on first stage, on last stage) of the other tensors), each padded."""
    groups: dict[object, int] = {}
    ends: list[tuple[int, bool, bool]] = []
    for param in spec.params:
        if param.layer is None:
            ends.append((_padded(_held(spec, param, tp, tp_rank)), param.first, param.last))
        elif param.layer == 0:
            group = param.fused or param.name
            groups[group] = groups.get(group, 0) + _held(spec, param, tp, tp_rank)
    return sum(map(_padded, groups.values())), tuple(ends)


def _held(spec: ModelSpec, param: Param, tp: int, tp_rank: int) -> int:
    """Elements of a parameter on a tensor-parallel rank."""
    if param.dim is None or param.axis is None:
        return param.numel
    return param.numel // param.shape[param.dim] * len(axis_range(spec, param.axis, tp, tp_rank)) * param.unit


def _padded(numel: int) -> int:
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

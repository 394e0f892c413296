"""Bytes of one model-stage on the fullest rank of a unit, part by part.

State follows the flat buffers of the engine exactly (alignment included). Activations are counted per token and layer;
a rank's peak is at the pipeline stage where state, in-flight micro-batches and the logits of the last stage sum
highest. Lengths enter by their longest samples: a micro-batch is assumed to hold the longest ones of the unit.

It does not know the device's size, the headroom, or what else lives on the device: the search adds those up.
"""

import dataclasses
import enum
import functools

from nereus.boxes import ALIGN_ELEMENTS, axis_range, layer_range
from nereus.model import Axis, Head, ModelSpec, Param
from nereus.plan import Layout, ModelStage, Stage
from nereus.planner.workload import Workload

LOGITS_COPIES = 3
"""fp32 tensors of [loss tokens, vocabulary / tp] alive at the peak: logits, shifted logits, probabilities. An objective
with an entropy term keeps one more."""

SYNC_BUCKET_BYTES = 16 << 20
"""Bytes of one bucket of weight synchronization; a rank holds one that is sent and one that is received."""


class Recompute(enum.StrEnum):
    """What the backward pass computes again instead of keeping: nothing, attention scores, whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one parameter or activation, of one gradient, master or moment, and whether masters are kept."""

    param_bytes: int
    wide_bytes: int
    has_masters: bool


BF16 = Precision(param_bytes=2, wide_bytes=4, has_masters=True)
FP32 = Precision(param_bytes=4, wide_bytes=4, has_masters=False)
FP64 = Precision(param_bytes=8, wide_bytes=8, has_masters=False)
PRECISIONS = {"bfloat16": BF16, "float32": FP32, "float64": FP64}
"""By the names of `trainer.dtype`."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the fullest rank of one unit of one model-stage.

    active: parts while its tasks run (weights, gradients, masters, moments, activations, logits, kv_cache,
        sync_buffers, workspace); a part that is zero is absent.
    idle: parts that stay while other model-stages run.
    """

    active: dict[str, int]
    idle: dict[str, int]

    @property
    def active_bytes(self) -> int:
        return sum(self.active.values())

    @property
    def idle_bytes(self) -> int:
        return sum(self.idle.values())


def stage_memory(
    model_stage: ModelStage,
    spec: ModelSpec,
    layout: Layout,
    *,
    dp: int,
    workload: Workload,
    micro_batch: int,
    recompute: Recompute,
    precision: Precision,
    shares_weights: bool = False,
) -> StageMemory:
    """Memory of the fullest rank of the fullest unit.

    micro_batch: samples of a micro-batch; for generation, sequences decoded at once by a unit (slots).
    shares_weights: the role's training model-stage holds the parameters and counts them.
    """
    trains = model_stage.stage is Stage.TRAINING
    samples = -(-workload.num_samples // dp)
    if trains:
        samples = -(-workload.num_samples // workload.mini_batches // dp)
    samples, micro_batch = max(1, samples), max(1, min(micro_batch, samples))
    fullest: tuple[dict[str, int], dict[str, int]] | None = None
    for pp_rank in range(layout.pp):
        idle = _state(spec, layout, pp_rank, precision, trains=trains, shared=shares_weights)
        active = dict(idle)
        if trains:
            active |= _training(spec, layout, pp_rank, workload, samples, micro_batch, recompute, precision)
        elif model_stage.stage is Stage.GENERATION:
            active |= _generation(spec, layout, pp_rank, workload, samples, micro_batch, precision)
        else:
            active |= _forward_only(spec, layout, pp_rank, workload, samples, micro_batch, precision)
        if trains or not shares_weights:
            active["sync_buffers"] = _sync_buffers(spec, layout, pp_rank, precision)
        if fullest is None or sum(active.values()) > sum(fullest[0].values()):
            fullest = active, idle
    assert fullest is not None
    active, idle = fullest
    return StageMemory(
        {part: size for part, size in active.items() if size}, {part: size for part, size in idle.items() if size}
    )


def _state(
    spec: ModelSpec, layout: Layout, pp_rank: int, precision: Precision, *, trains: bool, shared: bool
) -> dict[str, int]:
    """Flat buffers that live as long as the unit."""
    numel = state_numel(spec, layout, pp_rank)
    parts = {"weights": 0 if shared and not trains else numel * precision.param_bytes}
    if trains:
        parts["gradients"] = numel * precision.wide_bytes
        parts["masters"] = numel * precision.wide_bytes if precision.has_masters else 0
        parts["moments"] = 2 * numel * precision.wide_bytes
    return parts


def _sync_buffers(spec: ModelSpec, layout: Layout, pp_rank: int, precision: Precision) -> int:
    return 2 * min(SYNC_BUCKET_BYTES, state_numel(spec, layout, pp_rank) * precision.param_bytes)


def _training(
    spec: ModelSpec,
    layout: Layout,
    pp_rank: int,
    workload: Workload,
    samples: int,
    micro_batch: int,
    recompute: Recompute,
    precision: Precision,
) -> dict[str, int]:
    """Activations of the micro-batches in flight under 1F1B, the logits, and the transients of one layer's backward."""
    layers = len(layer_range(spec.num_layers, layout.pp, pp_rank))
    micro_batches = -(-samples // micro_batch)
    in_flight = min(layout.pp - pp_rank, micro_batches)
    tokens = _tokens(workload, in_flight * micro_batch, samples)
    kept = layer_bytes_per_token(spec, layout.tp, recompute, precision.param_bytes) * layers * tokens
    kept += tokens * spec.hidden * precision.param_bytes
    backward = backward_bytes_per_token(spec, layout.tp, recompute, precision.param_bytes)
    holds_vocabulary = pp_rank in (0, layout.pp - 1)
    transient = backward * _tokens(workload, micro_batch, samples)
    if recompute is not Recompute.FULL:
        transient += largest_matrix_bytes(spec, layout.tp, precision.param_bytes, vocabulary=holds_vocabulary)
    loss_tokens = workload.response.longest_of(micro_batch, among=samples)
    return {"activations": int(kept)} | _head_or_body(spec, layout, pp_rank, loss_tokens, transient)


def _head_or_body(
    spec: ModelSpec, layout: Layout, pp_rank: int, loss_tokens: float, transient: float
) -> dict[str, int]:
    """The logits and a layer's transients are not alive together: the larger counts, as logits and the rest."""
    logits = _logits(spec, layout.tp, loss_tokens) if pp_rank == layout.pp - 1 else 0
    return {"logits": logits, "workspace": max(0, int(transient) - logits)}


def _forward_only(
    spec: ModelSpec,
    layout: Layout,
    pp_rank: int,
    workload: Workload,
    samples: int,
    micro_batch: int,
    precision: Precision,
) -> dict[str, int]:
    """One layer's transients or the logits; nothing is kept for a backward pass."""
    tokens = _tokens(workload, micro_batch, samples)
    transient = forward_bytes_per_token(spec, layout.tp, precision.param_bytes) * tokens
    return _head_or_body(spec, layout, pp_rank, workload.response.longest_of(micro_batch, among=samples), transient)


def _generation(
    spec: ModelSpec,
    layout: Layout,
    pp_rank: int,
    workload: Workload,
    samples: int,
    slots: int,
    precision: Precision,
) -> dict[str, int]:
    """The cache, whose slots all hold the longest sequence, and prefill transients or one step's logits.

    The engine stores a mask entry beside each key.
    """
    layers = len(layer_range(spec.num_layers, layout.pp, pp_rank))
    kv_heads = max(len(axis_range(spec, Axis.KV_HEADS, layout.tp, rank)) for rank in range(layout.tp))
    per_token = layers * kv_heads * (2 * spec.head_dim + 1) * precision.param_bytes
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    slots = min(slots, samples)
    transient = forward_bytes_per_token(spec, layout.tp, precision.param_bytes) * prompt * slots
    parts = {"kv_cache": int(per_token * slots * workload.longest_tokens)}
    return parts | _head_or_body(spec, layout, pp_rank, slots, transient)


def _tokens(workload: Workload, count: int, samples: int) -> float:
    """Tokens of the `count` longest of a unit's samples, prompts at their longest."""
    count = min(count, samples)
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    return count * prompt + workload.response.longest_of(count, among=samples)


def _logits(spec: ModelSpec, tp: int, tokens: float) -> int:
    """fp32 logits of the loss tokens on a rank; a scalar head has none."""
    if spec.head is not Head.LM:
        return 0
    return int(LOGITS_COPIES * tokens * -(-spec.vocab // tp) * 4)


@functools.lru_cache(maxsize=1024)
def layer_bytes_per_token(spec: ModelSpec, tp: int, recompute: Recompute, value_bytes: int) -> float:
    """Bytes a layer keeps per token until its backward pass, on one tensor-parallel rank.

    Without recomputation: input, normalized input and output of both norms; queries, keys and values as computed, as
    rotated and as laid out for the attention; its output twice; gate and up, the activated gate, their product. Scores
    are never kept (attention is computed in blocks), so selective recomputation drops what costs least to compute
    again, norms and the activated gate; full keeps the input alone.
    """
    hidden, attention = spec.hidden, 5 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    if recompute is Recompute.FULL:
        return hidden * value_bytes
    if recompute is Recompute.SELECTIVE:
        return (2 * hidden + (attention + 3 * spec.ffn) / tp) * value_bytes
    return (6 * hidden + (attention + 4 * spec.ffn) / tp) * value_bytes


@functools.lru_cache(maxsize=1024)
def forward_bytes_per_token(spec: ModelSpec, tp: int, value_bytes: int) -> float:
    """Bytes per token of a layer's largest moment without gradients: two hidden states, gate and up, both activated."""
    return (3 * spec.hidden + 4 * spec.ffn / tp) * value_bytes


@functools.lru_cache(maxsize=1024)
def backward_bytes_per_token(spec: ModelSpec, tp: int, recompute: Recompute, value_bytes: int) -> float:
    """Bytes per token of a layer's backward pass besides what was kept: gradients, and what is computed again."""
    if recompute is Recompute.FULL:
        return layer_bytes_per_token(spec, tp, Recompute.NONE, value_bytes) + 2 * spec.ffn / tp * value_bytes
    return (2 * spec.hidden + 5 * spec.ffn / tp) * value_bytes


@functools.lru_cache(maxsize=1024)
def largest_matrix_bytes(spec: ModelSpec, tp: int, value_bytes: int, *, vocabulary: bool) -> int:
    """Bytes of a rank's largest matrix, whose gradient is whole before it is added to the flat gradients."""
    rows = 2 * -(-spec.ffn // tp)
    if vocabulary:
        rows = max(rows, -(-spec.vocab // tp))
    return rows * spec.hidden * value_bytes


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

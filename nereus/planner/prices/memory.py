"""Bytes of one model-stage on the fullest rank of a unit, part by part.

State follows the flat buffers of the engine exactly (alignment included). Activations are counted tensor by tensor as
the engine keeps them, per token and layer; a rank's peak is the largest of the moments that can be it (the logits, a
layer's backward, the embedding's gradient), at the pipeline stage where it is highest. Lengths enter by their longest
samples: a micro-batch is assumed to hold the longest ones of the unit.

It does not know the device's size, the headroom, or what else lives on the device: the search adds those up.
"""

import dataclasses
import functools

from nereus.engine_facts import LOGITS_COPIES, MAX_PACKED_BYTES, MAX_SENDS, SAMPLING_COPIES, SYNC_BUCKET_BYTES
from nereus.model import Axis, Head, ModelSpec, Param
from nereus.plan import Layout, ModelStage, Recompute, Stage
from nereus.planner.workload import Workload
from nereus.shards.boxes import ALIGN_ELEMENTS, axis_range, kv_of_head, layer_range, repeats_of


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
        packed_weights, sync_buffers, workspace); a part that is zero is absent.
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
    ranks = [
        rank_memory(
            model_stage, spec, layout, pp_rank, dp=dp, workload=workload, micro_batch=micro_batch, recompute=recompute,
            precision=precision, shares_weights=shares_weights,
        )
        for pp_rank in range(layout.pp)
    ]  # fmt: skip
    return max(ranks, key=lambda rank: rank.active_bytes)


def rank_memory(
    model_stage: ModelStage,
    spec: ModelSpec,
    layout: Layout,
    pp_rank: int,
    *,
    dp: int,
    workload: Workload,
    micro_batch: int,
    recompute: Recompute,
    precision: Precision,
    shares_weights: bool = False,
) -> StageMemory:
    """Memory of the fullest tensor-parallel rank of one pipeline stage of the fullest unit; as `stage_memory`."""
    trains = model_stage.stage is Stage.TRAINING
    samples = -(-workload.num_samples // dp)
    if trains:
        samples = -(-workload.num_samples // workload.mini_batches // dp)
    samples, micro_batch = max(1, samples), max(1, min(micro_batch, samples))
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
    """What micro-batches in flight under 1F1B keep, and the largest of the moments beside it.

    A stage keeps of each micro-batch its layers' activations and what it sent on. The first stage's embedding has a
    whole gradient when the layers of a micro-batch have given theirs back.
    """
    value_bytes, last = precision.param_bytes, pp_rank == layout.pp - 1
    state = spec.hidden * value_bytes
    layers = len(layer_range(spec.num_layers, layout.pp, pp_rank))
    micro_batches = -(-samples // micro_batch)
    in_flight = min(layout.pp - pp_rank, micro_batches)
    kept = layer_bytes_per_token(spec, layout.tp, recompute, value_bytes) * layers
    tokens = _tokens(workload, micro_batch, samples)
    transient = backward_bytes_per_token(spec, layout.tp, recompute, value_bytes) * tokens
    transient += mlp_bytes_per_token(spec, layout.tp, value_bytes) * max(tokens, spec.hidden)
    if pp_rank == 0:
        transient = max(transient, vocabulary_matrix_bytes(spec, layout.tp, value_bytes) + (state - kept) * tokens)
    else:
        transient += min(MAX_SENDS, micro_batches - 1) * state * tokens
    loss_tokens = workload.response.longest_of(micro_batch, among=samples)
    logits = training_logits_bytes(spec, layout.tp, value_bytes, loss_tokens, state * tokens) if last else 0
    activations = (kept + (0 if last else state)) * _tokens(workload, in_flight * micro_batch, samples)
    return {"activations": int(activations)} | _one_moment(logits, transient)


def _one_moment(logits: int, transient: float) -> dict[str, int]:
    """The logits and a layer's transients are not alive together: the larger counts, as logits and the rest."""
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
    """One layer's transients or the logits; nothing is kept for a backward pass, but what is on its way to be sent."""
    tokens = _tokens(workload, micro_batch, samples)
    transient = forward_bytes_per_token(spec, layout.tp, precision.param_bytes) * tokens
    if pp_rank < layout.pp - 1:
        return _one_moment(0, transient + MAX_SENDS * spec.hidden * precision.param_bytes * tokens)
    loss_tokens = workload.response.longest_of(micro_batch, among=samples)
    output = spec.hidden * precision.param_bytes * tokens
    return _one_moment(logits_bytes(spec, layout.tp, precision.param_bytes, loss_tokens, output), transient)


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

    The engine stores a mask entry beside each key. The slots of a pipeline's stages take turns, a lane a stage.
    """
    value_bytes = precision.param_bytes
    layers = len(layer_range(spec.num_layers, layout.pp, pp_rank))
    per_token = layers * cache_heads(spec, layout.tp) * (2 * spec.head_dim + 1) * value_bytes
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    slots = min(slots, samples)
    lane = -(-slots // layout.pp)
    transient = forward_bytes_per_token(spec, layout.tp, value_bytes) * prompt * lane
    logits = logits_bytes(spec, layout.tp, value_bytes, lane, copies=SAMPLING_COPIES) if pp_rank == layout.pp - 1 else 0
    parts = {"kv_cache": int(per_token * slots * workload.longest_tokens)}
    parts["packed_weights"] = _packed(spec, layout, pp_rank, precision)
    return parts | _one_moment(logits, transient)


def _tokens(workload: Workload, count: int, samples: int) -> float:
    """Tokens of the `count` longest of a unit's samples, prompts at their longest."""
    count = min(count, samples)
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    return count * prompt + workload.response.longest_of(count, among=samples)


def logits_bytes(
    spec: ModelSpec, tp: int, value_bytes: int, tokens: float, output: float = 0, *, copies: int = LOGITS_COPIES
) -> int:
    """fp32 logits of the loss tokens on a rank, and the hidden states they are made from: the stage's `output` (its
    bytes), the rows picked of it, those rows behind the norm. A scalar head counts as nothing.
    """
    if spec.head is not Head.LM:
        return 0
    return int(tokens * (copies * 4 * -(-spec.vocab // tp) + 2 * spec.hidden * value_bytes) + output)


def training_logits_bytes(spec: ModelSpec, tp: int, value_bytes: int, tokens: float, output: float) -> int:
    """The larger of the forward's moment and the backward's: the logits' gradient and the head's, whole."""
    if spec.head is not Head.LM:
        return 0
    backward = logits_bytes(spec, tp, value_bytes, tokens, copies=1) + vocabulary_matrix_bytes(spec, tp, value_bytes)
    return max(logits_bytes(spec, tp, value_bytes, tokens, output), backward)


@functools.lru_cache(maxsize=256)
def cache_heads(spec: ModelSpec, tp: int) -> int:
    """KV heads that the fullest rank stores of each token: query heads where those share KV heads unevenly."""
    groups = [kv_of_head(spec, tp, rank) for rank in range(tp)]
    return max(len(group) if repeats_of(group) is None else group[-1] + 1 for group in groups)


def _packed(spec: ModelSpec, layout: Layout, pp_rank: int, precision: Precision) -> int:
    """Bytes of the copy that generation decodes from: all but an embedding that is no head too."""
    size = state_numel(spec, layout, pp_rank) * precision.param_bytes
    if precision.has_masters or size > MAX_PACKED_BYTES:
        return 0
    embeds = pp_rank == 0 and not (spec.tied and layout.pp == 1)
    return size - (vocabulary_matrix_bytes(spec, layout.tp, precision.param_bytes) if embeds else 0)


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
    """Bytes of a rank's part of the embedding, or of the head; so many has the whole gradient of either."""
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

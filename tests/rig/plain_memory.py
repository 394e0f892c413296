"""Memory of one rank, part by part, written out for one setting: what the planner's columns of bytes are held to."""

import math

from nereus.engine_facts import BUCKET_BYTES, BUCKETS_STAGED, MAX_PACKED_BYTES, MAX_SENDS, SAMPLING_COPIES
from nereus.model import Head
from nereus.plan import Stage
from nereus.planner.prices.footprints import StageMemory
from nereus.planner.prices.memory import (
    backward_bytes_per_token,
    forward_bytes_per_token,
    layer_bytes_per_token,
    logits_bytes,
    mlp_bytes_per_token,
    state_numel,
    vocabulary_matrix_bytes,
)
from nereus.shards.boxes import layer_range
from nereus.shards.kv_blocks import BLOCK_TOKENS, cache_heads


def stage_memory(
    model_stage,
    spec,
    layout,
    *,
    dp,
    workload,
    micro_batch,
    recompute,
    precision,
    shares_weights=False,
):
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
    model_stage,
    spec,
    layout,
    pp_rank,
    *,
    dp,
    workload,
    micro_batch,
    recompute,
    precision,
    shares_weights=False,
):
    """Memory of the fullest tensor-parallel rank of one pipeline stage of the fullest unit; as `stage_memory`."""
    trains = model_stage.stage is Stage.TRAINING
    samples = -(-workload.num_samples // dp)
    if trains:
        samples = -(-workload.mini_batch_samples // dp)
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


def _state(spec, layout, pp_rank, precision, *, trains, shared):
    """Flat buffers that live as long as the unit."""
    numel = state_numel(spec, layout, pp_rank)
    parts = {"weights": 0 if shared and not trains else numel * precision.param_bytes}
    if trains:
        parts["gradients"] = numel * precision.wide_bytes
        parts["masters"] = numel * precision.wide_bytes if precision.has_masters else 0
        parts["moments"] = 2 * numel * precision.wide_bytes
    return parts


def _sync_buffers(spec, layout, pp_rank, precision):
    return min(BUCKETS_STAGED * BUCKET_BYTES, 2 * state_numel(spec, layout, pp_rank) * precision.param_bytes)


def _training(
    spec,
    layout,
    pp_rank,
    workload,
    samples,
    micro_batch,
    recompute,
    precision,
):
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


def _one_moment(logits, transient):
    """The logits and a layer's transients are not alive together: the larger counts, as logits and the rest."""
    return {"logits": logits, "workspace": max(0, int(transient) - logits)}


def _forward_only(
    spec,
    layout,
    pp_rank,
    workload,
    samples,
    micro_batch,
    precision,
):
    """One layer's transients or the logits; nothing is kept for a backward pass, but what is on its way to be sent."""
    tokens = _tokens(workload, micro_batch, samples)
    transient = forward_bytes_per_token(spec, layout.tp, precision.param_bytes) * tokens
    if pp_rank < layout.pp - 1:
        return _one_moment(0, transient + MAX_SENDS * spec.hidden * precision.param_bytes * tokens)
    loss_tokens = workload.response.longest_of(micro_batch, among=samples)
    output = spec.hidden * precision.param_bytes * tokens
    return _one_moment(logits_bytes(spec, layout.tp, precision.param_bytes, loss_tokens, output), transient)


def _generation(
    spec,
    layout,
    pp_rank,
    workload,
    samples,
    slots,
    precision,
):
    """The cache, whose slots all hold the longest sequence, and prefill transients or one step's logits.

    All ranks count the blocks of the one with most layers: a key and a value a layer, a mask entry, and a key or value
    more while the cache grows. At least one sequence fits that is as long as may be, and may be prefilled again at that
    length. The slots of a pipeline's stages take turns, a lane a stage.
    """
    value_bytes = precision.param_bytes
    layers = max(len(layer_range(spec.num_layers, layout.pp, rank)) for rank in range(layout.pp))
    per_token = cache_heads(spec, layout.tp) * (layers * 2 * spec.head_dim + 1 + spec.head_dim) * value_bytes
    longest = workload.longest_tokens
    cap = max(longest, workload.max_tokens or 0)
    blocks = max(min(slots, samples) * math.ceil(longest / BLOCK_TOKENS), math.ceil(cap / BLOCK_TOKENS))
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    slots = min(slots, samples)
    lane = -(-slots // layout.pp)
    prefilled = max(prompt * lane, cap if cap > longest else 0)
    transient = forward_bytes_per_token(spec, layout.tp, value_bytes) * prefilled
    logits = logits_bytes(spec, layout.tp, value_bytes, lane, copies=SAMPLING_COPIES) if pp_rank == layout.pp - 1 else 0
    parts = {"kv_cache": blocks * BLOCK_TOKENS * per_token}
    parts["packed_weights"] = _packed(spec, layout, pp_rank, precision)
    return parts | _one_moment(logits, transient)


def _tokens(workload, count, samples):
    """Tokens of the `count` longest of a unit's samples, prompts at their longest."""
    count = min(count, samples)
    prompt = workload.max_prompt_tokens or workload.prompt_tokens
    return count * prompt + workload.response.longest_of(count, among=samples)


def _packed(spec, layout, pp_rank, precision):
    """Bytes of the copy that generation decodes from: all but an embedding that is no head too."""
    size = state_numel(spec, layout, pp_rank) * precision.param_bytes
    if precision.has_masters or size > MAX_PACKED_BYTES:
        return 0
    embeds = pp_rank == 0 and not (spec.tied and layout.pp == 1)
    return size - (vocabulary_matrix_bytes(spec, layout.tp, precision.param_bytes) if embeds else 0)


def training_logits_bytes(spec, tp, value_bytes, tokens, output):
    """The larger of the forward's moment and the backward's: the logits' gradient and the head's, whole."""
    if spec.head is not Head.LM:
        return 0
    backward = logits_bytes(spec, tp, value_bytes, tokens, copies=1) + vocabulary_matrix_bytes(spec, tp, value_bytes)
    return max(logits_bytes(spec, tp, value_bytes, tokens, output), backward)

"""The memory model against figures that others published: activations of Megatron-LM, peaks of torchtitan and litgpt.

What the product counts too (layers, logits, in-flight micro-batches, bytes a parameter) comes from its own functions.
What only these systems have (sequence parallelism, ungated MLPs with dropout masks and stored scores, interleaved
stages, FSDP, LoRA) is an input of a row, priced here from the formula that the docstring names. No number is fitted to
a figure; what a row leaves open is in `ASSUMPTIONS`, what cannot be priced in `excluded`.
"""

import collections
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from nereus.engine_facts import BF16, FP32, LOGITS_COPIES
from nereus.model import ModelSpec
from nereus.plan import Layout, Recompute
from nereus.planner.prices.footprints import trained_bytes
from nereus.planner.prices.memory import (
    backward_bytes_per_token,
    layer_bytes_per_token,
    logits_bytes,
    mlp_bytes_per_token,
    state_numel,
    vocabulary_matrix_bytes,
)
from nereus.planner.prices.operations import Shape
from nereus.shards.boxes import layer_range

Row = dict[str, Any]
GIB, GB = 2**30, 10**9

ASSUMPTIONS = (
    "the figures of Korthikanti et al. are computed by their authors, not measured, and their parameters leave out the "
    "embedding; the first stage's is counted here",
    "torchtitan reports what its allocator reserves; fragmentation is not priced",
    "torchtitan's rows of 2024 compute the loss uncompiled, those of 2025 compile it, which leaves one copy of the "
    "logits (pull request 1033)",
    "under pipeline parallelism torchtitan cuts a local batch into as many micro-batches as there are stages",
    "float8 products keep their inputs in bf16",
    "litgpt's activations are those of training all weights; LoRA has rank 8 on queries and values",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One published figure and the model's, both in `unit`."""

    id: str
    source: str
    quantity: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def load_rows(folder: Path) -> list[Row]:
    """Every row that states memory of a device."""
    rows = map(json.loads, (folder / "measured_runs.jsonl").read_text().splitlines())
    return [row for row in rows if any("mem" in key or "gib" in key or "activation" in key for key in row["result"])]


def excluded(row: Row) -> str | None:
    """Why a row is not compared, or None where it is."""
    if row["kind"] == "weight_sync":
        return "memory of another system's parameter server, not of a model-stage"
    if row["kind"] == "rl_step":
        return "recomputation, micro-batch and length of the longest sample are not stated (mixture of experts)"
    if row["result"].get("activation_pct_of_baseline") == 100:
        return "the baseline that the others of its figure are shares of"
    if row["plan"].get("schedule") == "Interleaved1F1B":
        return "the number of interleaved stages is not stated"
    if row["work"].get("lora") and row["plan"]["zero"]:
        return "its peak is outside training: 0.3 to 0.5 GB more a sample, 7.8 GB on one device of the same table"
    return None


def figures(rows: list[Row]) -> list[Figure]:
    """Published and predicted, for every row that is not excluded."""
    found: list[Figure] = []
    for row in rows:
        if excluded(row) is None:
            found += _of_source(row)(row)
    return found


def _of_source(row: Row) -> Any:
    prefixes = {"Reducing Activation": megatron, "torchtitan": torchtitan, "litgpt": litgpt}
    return next(price for prefix, price in prefixes.items() if row["source"]["name"].startswith(prefix))


def summary(found: list[Figure]) -> dict[str, dict[str, float]]:
    """MAPE, largest error and number of figures by source."""
    errors: dict[str, list[float]] = collections.defaultdict(list)
    for figure in found:
        errors[figure.source].append(abs(figure.error))
    return {s: {"mape": statistics.fmean(e), "max": max(e), "rows": len(e)} for s, e in errors.items()}


def megatron(row: Row) -> list[Figure]:
    """Korthikanti et al. (arXiv 2205.05198), figures 1 and 7: state and activations of the first pipeline stage."""
    model, plan, result = row["model"], row["plan"], row["result"]
    shape = Shape(
        layers=model["layers"], hidden=model["hidden"], heads=model["heads"], kv_heads=model["kv_heads"],
        head_dim=model["hidden"] // model["heads"], ffn=model["ffn"], vocab=model["vocab"], mlp_matrices=2,
    )  # fmt: skip
    layers = len(layer_range(shape.layers, plan["pp"], 0))
    if "activation_pct_of_baseline" in result:
        share = _megatron_activations(row, shape) / _megatron_activations(_baseline(row), shape)
        return [_figure(row, "activations", "%", result["activation_pct_of_baseline"], 100 * share)]
    params = (layers * shape.layer_params + shape.vocab * shape.hidden) / plan["tp"]
    activations = _megatron_activations(row, shape)
    return [
        _figure(
            row, "parameters and optimizer", "GiB", result["params_optimizer_gib"], params * trained_bytes(BF16) / GIB
        ),
        _figure(row, "activations", "GiB", result["activations_gib"], activations / GIB),
    ]


def _figure(row: Row, quantity: str, unit: str, published: float, predicted: float) -> Figure:
    return Figure(row["id"], row["source"]["name"], quantity, unit, published, predicted)


def _baseline(row: Row) -> Row:
    return row | {"recompute": "none", "plan": row["plan"] | {"sp": False}}


def _megatron_activations(row: Row, shape: Shape) -> float:
    """Bytes on the first stage, which holds as many micro-batches as there are stages; interleaving adds to it.

    1 + (p - 1) / (p v) times with v interleaved stages: arXiv 2205.05198, section 4.2.3.
    """
    plan, work = row["plan"], row["work"]
    pp, vpp = plan["pp"], plan.get("vpp") or 1
    micro_batches = work["global_batch"] // (plan["dp"] * work["micro_batch"])
    in_flight = min(pp, micro_batches) * (1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1)
    kept = megatron_layer_bytes(
        shape, tp=plan["tp"], seq_len=work["seq_len"], recompute=row["recompute"], sequence_parallel=plan["sp"]
    )
    return kept * len(layer_range(shape.layers, pp, 0)) * work["micro_batch"] * work["seq_len"] * in_flight


def megatron_layer_bytes(shape: Shape, *, tp: int, seq_len: int, recompute: str, sequence_parallel: bool) -> float:
    """Bytes per token that a layer keeps on one rank: arXiv 2205.05198, section 4.1 and table 2.

    Tensors of 2 bytes, dropout masks of 1. Not cut by tp: inputs of norms and of both blocks, masks of both blocks.
    Cut: queries, keys, values, input of the projection, input and output of GeLU; scores, their mask and dropout.
    """
    whole = 2 * 4 * shape.hidden + 2 * shape.hidden
    cut = 2 * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * 2 * shape.ffn
    scores = (2 + 1 + 2) * shape.heads * seq_len
    if recompute == "full":
        whole, cut, scores = 2 * shape.hidden, 0, 0
    elif recompute.startswith("selective"):
        scores = 0
    return whole / (tp if sequence_parallel else 1) + (cut + scores) / tp


def torchtitan(row: Row) -> list[Figure]:
    """Peak of the fullest pipeline rank under FSDP2, with tensor and sequence parallelism."""
    peaks = (torchtitan_bytes(row, pp_rank) for pp_rank in range(row["plan"]["pp"]))
    return [_figure(row, "peak", "GiB", row["result"]["peak_mem_gib"], max(peaks) / GIB)]


def torchtitan_bytes(row: Row, pp_rank: int) -> float:
    """State in shards, gathered weights, activations, and the larger of a layer's backward and the logits.

    FSDP2 (torchtitan's `docs/fsdp.md`) shards fp32 parameters, gradients and moments over dp x cp and gathers bf16
    weights: two layers beside embedding and head, which stay; under pipeline parallelism the whole stage stays, and its
    gradients add up unsharded in fp32 over the micro-batches (`torch.distributed.pipelining.stage`).
    """
    plan, work, spec = row["plan"], row["work"], _spec(row["model"])
    tp, pp = plan["tp"], plan["pp"]
    numel = state_numel(spec, Layout(tp, pp), pp_rank)
    layers = len(layer_range(spec.num_layers, pp, pp_rank))
    sequences = work["micro_batch"] / pp if pp > 1 else work["micro_batch"]
    tokens = sequences * work["seq_len"] / plan["cp"]
    in_flight = pp - pp_rank
    shards = numel * trained_bytes(FP32) / (plan["dp"] * plan["cp"])
    if pp > 1:
        gathered = numel * (2 + 4)
    else:
        ends = 2 * vocabulary_matrix_bytes(spec, tp, 2)
        gathered = ends + 2 * (2 * numel - ends) / layers
    kept = torchtitan_layer_bytes(spec, tp, row["recompute"]) * layers * tokens * in_flight
    backward = backward_bytes_per_token(spec, tp, Recompute.FULL, 2) + mlp_bytes_per_token(spec, tp, 2)
    transient = (backward - _replicated(4 * spec.hidden, tp)) * tokens
    logits = 0
    if pp_rank == pp - 1:
        compiled_loss = "202506" in row["source"]["path"]
        logits = logits_bytes(spec, tp, 2, tokens, copies=1 if compiled_loss else LOGITS_COPIES)
    return shards + gathered + kept + max(transient, logits)


def torchtitan_layer_bytes(spec: ModelSpec, tp: int, recompute: str) -> float:
    """Bytes per token that a layer keeps on one rank; hidden states are cut by sequence parallelism.

    Full: the layer's input. Selective by operation (`torchtitan/parallelisms/parallelize_llama.py`): also the
    attention's output and the first of every two products, which are queries, values, gate and down.
    """
    kept = layer_bytes_per_token(spec, tp, Recompute.FULL, 2) - _replicated(spec.hidden, tp)
    if recompute == "full":
        return kept
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return kept + 2 * (heads + heads + kv_heads + spec.ffn + spec.hidden) / tp


def _replicated(hidden: int, tp: int) -> float:
    """Bytes of bf16 hidden states that the product keeps on every rank and sequence parallelism shares out."""
    return 2 * hidden * (1 - 1 / tp)


def litgpt(row: Row) -> list[Figure]:
    """LoRA on one device: bf16 weights, adapters with gradients and moments, activations of the longest example."""
    spec, work = _spec(row["model"]), row["work"]
    tokens = work["micro_batch"] * work["longest_example_tokens"]
    kv = spec.num_kv_heads * spec.head_dim
    adapters = spec.num_layers * LORA_RANK * (2 * spec.hidden + spec.num_heads * spec.head_dim + kv)
    weights = 2 * (state_numel(spec, Layout(), 0) + 4 * adapters)
    kept = layer_bytes_per_token(spec, 1, Recompute.NONE, 2) * spec.num_layers * tokens
    transient = (backward_bytes_per_token(spec, 1, Recompute.NONE, 2) + mlp_bytes_per_token(spec, 1, 2)) * tokens
    peak = weights + kept + max(transient, logits_bytes(spec, 1, 2, tokens))
    return [_figure(row, "peak", "GB", row["result"]["peak_mem_gb"], peak / GB)]


LORA_RANK = 8
"""litgpt's default, on queries and values."""


def _spec(model: Row) -> ModelSpec:
    return ModelSpec(
        family="llama", num_layers=model["layers"], hidden=model["hidden"], num_heads=model["heads"],
        num_kv_heads=model["kv_heads"], head_dim=model["head_dim"], ffn=model["ffn"], vocab=model["vocab"],
        tied=model["tied_embeddings"],
    )  # fmt: skip

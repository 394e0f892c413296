"""Counts the operations of published training runs with the planner's own formulas, and tests the calibration on them.

Axes that plans of this project do not have (ZeRO stage, interleaved pipeline, context and expert parallelism) are
inputs of a row and are priced here. What a row leaves open is assumed as follows, and said in `ASSUMPTIONS`.
"""

import collections
import dataclasses
import json
import math
import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nereus.cluster import ACCELERATORS, Link
from nereus.engine_facts import Op
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.operations import (
    COLUMN,
    Bill,
    Shape,
    Tokens,
    add_collective,
    head_forward,
    layer_backward,
    layer_forward,
)

Row = dict[str, Any]

ASSUMPTIONS = (
    "a row with pp > 1 that states no interleaving has that of the same source's rows of the same model and pp, else 1",
    "torchtitan's local batch is cut into micro-batches of one sequence under pipeline parallelism",
    "runs of Megatron before FlashAttention (SC21, activation recomputation, MT-NLG) read and write the score matrix",
    "PyTorch FSDP stops recomputing a layer before its last product, whose output the backward pass does not need",
    "'selective (op)' computes every other product again, 'selective (block)' every other layer",
    "float8 products run at the float8 peak; eager elementwise kernels move twice the bytes of compiled ones",
    "asynchronous tensor parallelism hides half of its collectives",
    "gradient and parameter traffic over the data-parallel ranks runs beside the computation",
    "72 devices of GB200 are one node (NVL72)",
    "where a mixture of experts states no active parameters, a token uses its experts' share of the layer",
)

GPUS = {
    "A100-40GB-SXM": "a100-40gb",
    "A100-80GB-SXM": "a100",
    "H100-80GB-SXM": "h100",
    "H100-96GB-HBM2e (500W, 2.4TB/s)": "h100-96gb",
    "H200-141GB-SXM": "h200",
    "B200": "b200",
    "GB200": "gb200",
}

UNFUSED_ATTENTION = ("Megatron-LM SC21", "Reducing Activation", "llm-analysis")
"""Sources whose kernels keep the score matrix in memory."""

SCORE_PASSES = {"forward": 6, "backward": 9}
"""Times a score matrix is written or read: product, mask and softmax, dropout, product."""

STATE_BYTES_PER_PARAM = 30
"""Read and written by one mixed-precision Adam update: gradient, master and both moments, parameter."""


def load_rows(folder: Path) -> list[Row]:
    """Training and fine-tuning rows; repeats of one configuration are one row with their mean step time."""
    lines = (folder / "measured_runs.jsonl").read_text().splitlines()
    groups: dict[str, list[Row]] = {}
    for row in map(json.loads, lines):
        if row["kind"] in ("train", "sft"):
            groups.setdefault(_configuration(row), []).append(row)
    merged = []
    for rows in groups.values():
        step_s = statistics.fmean(row["result"]["step_s"] for row in rows)
        merged.append(rows[0] | {"result": rows[0]["result"] | {"step_s": step_s}, "repeats": len(rows)})
    return merged


def _configuration(row: Row) -> str:
    plan = {key: value for key, value in row["plan"].items() if value not in (None, 1)}
    work = {key: row["work"].get(key) for key in ("micro_batch", "global_batch", "seq_len")}
    parts = [row["source"]["name"], row["model"]["name"], row["hw"]["gpu"], row["hw"]["gpus"]]
    return json.dumps([*parts, plan, work, row["precision"], row["recompute"]], sort_keys=True)


def stated_interleaving(rows: Iterable[Row]) -> dict[tuple[str, str, int], int]:
    """{(source, model, pp): virtual stages} of the rows that state it."""
    return {
        (row["source"]["name"], row["model"]["name"], row["plan"]["pp"]): row["plan"]["vpp"]
        for row in rows
        if row["plan"].get("vpp")
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One published configuration, its axes made explicit."""

    source: str
    accelerator: str
    node: int
    shape: Shape
    layer_params: float
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    vpp: int
    zero: int
    micro_batch: float
    micro_batches: float
    seq_len: int
    sequence_parallel: bool
    async_tp: bool
    recompute: str
    precision: str
    step_s: float

    @classmethod
    def of(cls, row: Row, interleaving: dict[tuple[str, str, int], int]) -> "Run":
        plan, work, name = row["plan"], row["work"], row["source"]["name"]
        tp, pp, dp = plan["tp"], plan["pp"], plan["dp"]
        micro_batch, micro_batches = work["micro_batch"], work["global_batch"] / (dp * work["micro_batch"])
        if name.startswith("torchtitan") and pp > 1:
            micro_batch, micro_batches = 1, work["micro_batch"]
        shape, layer_params = _shape(row["model"])
        accelerator = GPUS[row["hw"]["gpu"]]
        return cls(
            source=name,
            accelerator=accelerator,
            node=72 if accelerator == "gb200" else row["hw"]["gpus_per_node"],
            shape=shape,
            layer_params=layer_params,
            tp=tp,
            pp=pp,
            dp=dp,
            cp=plan.get("cp") or 1,
            ep=plan.get("ep") or 1,
            vpp=plan.get("vpp") or interleaving.get((name, row["model"]["name"], pp), 1),
            zero=plan.get("zero") or 0,
            micro_batch=micro_batch,
            micro_batches=max(1.0, micro_batches),
            seq_len=work["seq_len"],
            sequence_parallel=plan.get("sp", tp > 1 and not name.startswith(UNFUSED_ATTENTION)),
            async_tp=bool(plan.get("async_tp")),
            recompute=row["recompute"],
            precision=row["precision"],
            step_s=row["result"]["step_s"],
        )

    def link(self, span: int) -> Link:
        """Link class of a group that covers `span` consecutive devices."""
        return Link.INTRA_NODE if span <= self.node else Link.INTER_NODE

    @property
    def fsdp(self) -> bool:
        return self.zero >= 2 and not self.source.startswith("Megatron-LM SC21")

    @property
    def layers(self) -> float:
        return self.shape.layers / self.pp

    @property
    def head_share(self) -> float:
        """Part of the vocabulary head on the slowest rank: whole, unless the layers are spread to make room for it."""
        return 1.0 if self.pp == 1 or self.shape.layers % (self.pp * self.vpp) == 0 else 1 / self.pp

    @property
    def passes(self) -> float:
        """Micro-batches a rank works or waits for in a step."""
        return self.micro_batches + (self.pp - 1) / self.vpp


def _shape(model: Row) -> tuple[Shape, float]:
    """(shape whose `experts_per_token` gives the active parameters, parameters of one layer)."""
    hidden, heads, experts = model["hidden"], model["heads"], model.get("num_experts") or 1
    matrices = 3 if model.get("gated_mlp", True) else 2
    dense = Shape(
        layers=model["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=model["kv_heads"],
        head_dim=model.get("head_dim") or hidden // heads,
        ffn=model["ffn"] if experts == 1 else model.get("moe_ffn") or model["ffn"],
        vocab=model["vocab"],
        mlp_matrices=matrices,
    )
    if experts == 1:
        return dense, dense.layer_params
    mixture = dataclasses.replace(dense, experts=experts, experts_per_token=model["experts_per_token"])
    if not model.get("active_params"):
        return mixture, mixture.layer_params
    embedding = dense.vocab * hidden * (1 if model.get("tied_embeddings") else 2)
    active = (model["active_params"] - embedding) / dense.layers
    used = (active - dense.attention_params) / dense.mlp_params
    return dataclasses.replace(mixture, experts_per_token=used), (model["params"] - embedding) / dense.layers


def count(run: Run) -> tuple[Bill, Bill]:
    """(operations of one step on the slowest rank, traffic over the data-parallel ranks that runs beside them)."""
    shape, length = run.shape, run.seq_len / run.cp
    tokens = Tokens(run.micro_batch * length, run.micro_batch * run.seq_len * length / 2, run.micro_batch * length)
    forward = layer_forward(
        shape, tokens, tp=run.tp, value_bytes=2, tp_link=Link.INTRA_NODE, sequence_parallel=run.sequence_parallel
    )
    _adapt(forward, run, tokens)
    one = forward.scaled(run.layers)
    one.add_bill(_backward(forward, run, tokens), run.layers)
    one.add_bill(_recomputed(forward, run, tokens), run.layers)
    head = head_forward(shape, tokens, tp=run.tp, tp_link=Link.INTRA_NODE)
    one.add_bill(head, run.head_share)
    one.add_bill(layer_backward(head), run.head_share)
    _add_boundaries(one, run, tokens)
    bill = one.scaled(run.passes)
    params = _held_params(run)
    bill.add(Op.ELEMENTWISE, params / (run.dp * run.cp) * STATE_BYTES_PER_PARAM, 1)
    return bill, _data_parallel(run, params)


def _adapt(forward: Bill, run: Run, tokens: Tokens) -> None:
    """What the row states about its kernels."""
    accelerator = ACCELERATORS[run.accelerator]
    if "float8" in run.precision:
        _scale(forward, Op.GEMM, 0.5 if accelerator.flops_per_s > 500e12 else 1.0)
    if "eager" in run.precision:
        _scale(forward, Op.ELEMENTWISE, 2.0)
    if run.async_tp:
        _scale(forward, Op.ALL_REDUCE, 0.5, Link.INTRA_NODE)
    if run.source.startswith(UNFUSED_ATTENTION):
        whole = forward.counts[0, COLUMN[(Op.ATTENTION, None)]] * 2
        _scale(forward, Op.ATTENTION, 0.0)
        forward.add(Op.GEMM, whole, 2)
        forward.add(Op.ELEMENTWISE, _score_bytes(run, tokens) * SCORE_PASSES["forward"], 4)


def _score_bytes(run: Run, tokens: Tokens) -> float:
    """Bytes of one layer's score matrix on a rank, in 16 bits, without causal halving."""
    return 2 * tokens.pairs * 2 * run.shape.heads / run.tp


def _backward(forward: Bill, run: Run, tokens: Tokens) -> Bill:
    bill = layer_backward(forward)
    if run.source.startswith(UNFUSED_ATTENTION):
        missing = SCORE_PASSES["backward"] - 2 * SCORE_PASSES["forward"]
        bill.add(Op.ELEMENTWISE, _score_bytes(run, tokens) * missing, 0)
    return bill


def _recomputed(forward: Bill, run: Run, tokens: Tokens) -> Bill:
    """What the backward pass of a layer computes again."""
    share = {"full": 1.0, "selective (block)": 0.5, "selective (op)": 1.0}.get(run.recompute, 0.0)
    bill = forward.scaled(share)
    if run.fsdp and share:
        down = run.shape.hidden * run.shape.ffn * run.shape.experts_per_token / run.shape.active_layer_params
        _scale(bill, Op.GEMM, 1 - down)
    if run.recompute == "selective (op)":
        _scale(bill, Op.GEMM, 0.5)
        _scale(bill, Op.ATTENTION, 0.0)
        _scale(bill, Op.ALL_REDUCE, 0.0, Link.INTRA_NODE)
    if run.recompute == "selective (attention)":
        bill.add(Op.GEMM, 8 * tokens.pairs * run.shape.heads / run.tp * run.shape.head_dim, 2)
        bill.add(Op.ELEMENTWISE, _score_bytes(run, tokens) * SCORE_PASSES["forward"], 4)
    return bill


def _add_boundaries(one: Bill, run: Run, tokens: Tokens) -> None:
    """Traffic of pipeline, context and expert parallelism for one micro-batch, forward and backward."""
    shape, activations = run.shape, tokens.count * run.shape.hidden * 2
    if run.pp > 1:
        link = run.link(run.tp * run.cp * run.pp)
        one.add(Op.POINT_TO_POINT, 2 * activations / run.tp * run.vpp, 2 * run.vpp, link)
    if run.cp > 1:
        keys = 2 * run.micro_batch * run.seq_len * shape.kv_heads * shape.head_dim * 2 / run.tp
        link = run.link(run.tp * run.cp)
        add_collective(one, Op.ALL_GATHER, 3 * keys * run.layers, 3 * run.layers, run.cp, link)
    if shape.experts > 1 and run.ep > 1:
        routed = 6 * activations * shape.experts_per_token / run.tp * run.layers
        add_collective(one, Op.ALL_TO_ALL, routed, 6 * run.layers, run.ep, run.link(run.ep * run.tp))


def _held_params(run: Run) -> float:
    """Parameters of a rank before any sharding over data parallelism; experts are spread over `ep`."""
    layers = run.layer_params * run.layers
    experts = run.ep if run.shape.experts > 1 else 1
    return (layers + 2 * run.shape.vocab * run.shape.hidden / run.pp) / run.tp / experts


def _data_parallel(run: Run, params: float) -> Bill:
    """Gradients reduced and parameters gathered over the data-parallel ranks, by ZeRO stage."""
    bill, ranks = Bill(), run.dp * run.cp
    link, per_node = run.link(run.tp * ranks), max(1, run.node // run.tp)
    gradient_bytes = 4 if "amp" in run.precision or run.source.startswith(UNFUSED_ATTENTION) else 2
    gathers = 2 * run.micro_batches if run.zero == 3 else 1
    scatters = run.micro_batches if run.zero >= 2 else 1
    for op, size, times in ((Op.ALL_GATHER, 2, gathers), (Op.REDUCE_SCATTER, gradient_bytes, scatters)):
        calls = times * run.layers
        add_collective(bill, op, params * size * times, calls, ranks, link, ranks_per_node=per_node)
    return bill


def _scale(bill: Bill, op: Op, factor: float, link: Link | None = None) -> None:
    bill.counts[:, COLUMN[(op, link)]] *= factor


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """How a source's other rows came out after calibration on a few."""

    source: str
    calibrated_on: list[str]
    errors: dict[str, float]
    r2: float

    @property
    def mape(self) -> float:
        return statistics.fmean(map(abs, self.errors.values()))

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors.values()))


def evaluate(rows: list[Row], *, seed: int = 0) -> list[Fit]:
    """Per source: calibrate on max(1, 10%) of its rows, predict the rest. A source of one row cannot be evaluated."""
    interleaving = stated_interleaving(rows)
    sources: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        sources[row["source"]["name"]].append(row)
    return [_fit(name, own, interleaving, seed) for name, own in sources.items() if len(own) > 1]


def _fit(name: str, rows: list[Row], interleaving: dict[tuple[str, str, int], int], seed: int) -> Fit:
    chosen = sorted(random.Random(seed).sample(range(len(rows)), max(1, len(rows) // 10)))
    runs = [Run.of(row, interleaving) for row in rows]
    calibration = Calibration(forgetting=1.0)
    for index in chosen:
        shown, hidden = count(runs[index])
        calibration.observe_total(shown, runs[index].step_s, accelerator=runs[index].accelerator, hidden=hidden)
    errors: dict[str, float] = {}
    measured, predicted = [], []
    for index, (row, run) in enumerate(zip(rows, runs, strict=True)):
        if index not in chosen:
            shown, hidden = count(run)
            seconds = calibration.predict_total(shown, accelerator=run.accelerator, hidden=hidden)
            errors[row["id"]] = seconds / run.step_s - 1
            measured.append(run.step_s)
            predicted.append(seconds)
    return Fit(name, [rows[index]["id"] for index in chosen], errors, r_squared(measured, predicted))


def r_squared(measured: list[float], predicted: list[float]) -> float:
    """Share of the variance that is explained; nan where there is none."""
    mean = statistics.fmean(measured)
    total = sum((value - mean) ** 2 for value in measured)
    left = sum((a - b) ** 2 for a, b in zip(measured, predicted, strict=True))
    return 1 - left / total if total else math.nan

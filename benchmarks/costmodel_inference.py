"""Time to first token and time per output token of dense models, against published measurements.

The rows are `systems/silicon_sample.csv` of the aiconfigurator-core package: continuous batching with a fixed number of
clients. The planner's counts of prefill and decoding are calibrated on 10% of the rows of each (model, system,
precision, server) and predict the rest; beside them stands the package's own estimate for the same rows.

A client that finishes sends its next prompt, so a decode step carries batch / output prompts' worth of prefill. Servers
differ in how much of it delays the others' decoding: that share is the one thing fitted besides the calibration.
Sequences beyond what the cache holds wait for a slot.
"""

import collections
import csv
import dataclasses
import functools
import importlib.util
import logging
import random
import statistics
import warnings
from pathlib import Path
from typing import Any

from nereus.cluster import ACCELERATORS, Link
from nereus.engine_facts import Op
from nereus.known_models import model_by_name
from nereus.model import ModelSpec
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.operations import COLUMN, Bill, Shape, Tokens, decode_step, head_forward, layer_forward

SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200"}

WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
"""By the row's quantization; nvfp4 has an fp8 scale for each 16 values."""

FLOPS_FACTOR = {"": 1.0, "fp8": 2.0, "fp8_block": 2.0, "nvfp4": 4.0}
"""Peak over the bf16 peak."""

MEMORY_SHARE = 0.9
"""Of the device's memory, what a server takes for weights and cache."""

OVERHEAD_BYTES = 2e9
"""Activations and runtime of a server."""

DELAY_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Tried shares of the prefill that delays decoding."""

BURST_SHARE = 0.1
"""Prompts that start together with all others: a benchmark of ten prompts a client opens with one of each."""

CHUNK_TOKENS = 8192
"""Tokens of a mixed step given to the package's estimate (the servers' default)."""

ALIASES = {
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b-instruct": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-8b-instruct-fp8": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-32b-nvfp4": "Qwen/Qwen3-32B",
}
"""Names under which the package has the models' configurations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """One measured row; times in seconds."""

    id: str
    model_path: str
    spec: ModelSpec
    backend: str
    system: str
    quantization: str
    clients: int
    prompt: int
    output: int
    tp: int
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str, str, str]:
        return self.model_path, self.system, self.quantization, self.backend

    @property
    def accelerator(self) -> str:
        return SYSTEMS[self.system]

    @property
    def cache_bytes(self) -> float:
        """Bytes of one cached value: the TensorRT server stores the cache of fp8 models in fp8."""
        return 1.0 if self.backend == "trtllm" and self.quantization else 2.0

    @property
    def batch(self) -> float:
        """Sequences that decode at once: the clients, or as many as the cache holds."""
        spec, device = self.spec, ACCELERATORS[self.accelerator]
        weights = spec.num_params * WEIGHT_BYTES[self.quantization] / self.tp
        free = device.memory_bytes * MEMORY_SHARE - weights - OVERHEAD_BYTES
        per_token = 2 * max(1.0, spec.num_kv_heads / self.tp) * spec.head_dim * self.cache_bytes * spec.num_layers
        return max(1.0, min(self.clients, free / (per_token * (self.prompt + self.output / 2))))


def sample_path() -> Path | None:
    """The package's table of measurements, where the package is installed."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "systems" / "silicon_sample.csv"


def load_servings(path: Path) -> tuple[list[Serving], dict[str, int]]:
    """(rows of dense models served in one pool, {why: how many rows were left out})."""
    kept, left_out = [], collections.Counter[str]()
    with path.open() as file:
        for row in csv.DictReader(file):
            name = row["model_path"].rsplit("/", 1)[-1].lower().removesuffix("-fp8").removesuffix("-nvfp4")
            spec = model_by_name(name)
            if spec is None:
                left_out["mixture of experts or hybrid model"] += 1
            elif row["mode"] != "agg":
                left_out["prefill and decoding on separate devices"] += 1
            else:
                kept.append(_serving(row, spec))
    return kept, dict(left_out)


def _serving(row: dict[str, str], spec: ModelSpec) -> Serving:
    return Serving(
        id=row["id"],
        model_path=row["model_path"],
        spec=spec,
        backend=row["backend"],
        system=row["system"],
        quantization=row["gemm_quant_mode"],
        clients=int(row["batch_size"]),
        prompt=int(row["isl"]),
        output=int(row["osl"]),
        tp=int(row["tp_size"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def prefill(at: Serving) -> Bill:
    """One prompt through the model."""
    shape, link = Shape.of(at.spec), Link.INTRA_NODE
    tokens = Tokens.of(1, at.prompt, loss_length=1)
    bill = layer_forward(shape, tokens, tp=at.tp, value_bytes=2, tp_link=link).scaled(shape.layers)
    bill.add_bill(head_forward(shape, tokens, tp=at.tp, tp_link=link))
    bill.counts[0, COLUMN[(Op.GEMM, None)]] /= FLOPS_FACTOR[at.quantization]
    return bill


def decode(at: Serving, delay_share: float) -> Bill:
    """One decode step of the whole batch, with its share of other prompts' prefill."""
    device, weight_bytes = ACCELERATORS[at.accelerator], WEIGHT_BYTES[at.quantization]
    flops = device.flops_per_s * FLOPS_FACTOR[at.quantization]
    compute_bound = 2 * at.batch / flops >= weight_bytes / device.memory_bytes_per_s
    bill = decode_step(
        Shape.of(at.spec),
        batch=at.batch,
        context=at.prompt + at.output / 2,
        tp=at.tp,
        value_bytes=2,
        tp_link=Link.INTRA_NODE,
        compute_bound=compute_bound,
    )
    bill.counts[0, COLUMN[(Op.GEMM, None)]] /= FLOPS_FACTOR[at.quantization]
    bill.counts[0, COLUMN[(Op.DECODE_GEMM, None)]] *= weight_bytes / 2
    bill.counts[0, COLUMN[(Op.ATTENTION_DECODE, None)]] *= at.cache_bytes / 2
    bill.add(Op.LAUNCH, 0, 1)
    bill.add_bill(prefill(at), delay_share * at.batch / at.output)
    return bill


def first_token(at: Serving) -> Bill:
    """Prefill of a prompt and of those of the opening burst that come before it."""
    bill = prefill(at).scaled(1 + BURST_SHARE * at.batch / 2)
    bill.add(Op.LAUNCH, 0, 2)
    return bill


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds of one row."""

    serving: Serving
    ttft_s: float
    tpot_s: float

    @property
    def tpot_error(self) -> float:
        return self.tpot_s / self.serving.tpot_s - 1

    @property
    def ttft_error(self) -> float:
        return self.ttft_s / self.serving.ttft_s - 1


def estimate(rows: list[Serving], *, seed: int = 0) -> list[Estimate]:
    """Estimates of the rows that were not calibrated on."""
    groups: dict[tuple[str, str, str, str], list[Serving]] = collections.defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    result: list[Estimate] = []
    for own in groups.values():
        chosen = set(random.Random(seed).sample(range(len(own)), max(1, len(own) // 10)))
        known = [own[index] for index in sorted(chosen)]
        decoding, share = _fit_decoding(known)
        opening = _fit_first_token(known, decoding, share)
        for index, row in enumerate(own):
            if index not in chosen:
                tpot_s = decoding.predict_total(decode(row, share), accelerator=row.accelerator)
                prefill_s = opening.predict_total(first_token(row), accelerator=row.accelerator)
                result.append(Estimate(row, prefill_s + tpot_s + _wait_s(row, tpot_s), tpot_s))
    return result


def _fit_decoding(known: list[Serving]) -> tuple[Calibration, float]:
    """The delay share under which the calibrated model fits the calibration rows best."""
    fits = []
    for share in DELAY_SHARES:
        calibration = Calibration(forgetting=1.0)
        for row in known:
            calibration.observe_total(decode(row, share), row.tpot_s, accelerator=row.accelerator)
        predicted = [calibration.predict_total(decode(row, share), accelerator=row.accelerator) for row in known]
        error = statistics.fmean(abs(p / row.tpot_s - 1) for p, row in zip(predicted, known, strict=True))
        fits.append((error, -share, calibration))
    _, share, calibration = min(fits, key=lambda fit: fit[:2])
    return calibration, -share


def _fit_first_token(known: list[Serving], decoding: Calibration, share: float) -> Calibration:
    calibration = Calibration(forgetting=1.0)
    for row in known:
        step_s = decoding.predict_total(decode(row, share), accelerator=row.accelerator)
        own_s = row.ttft_s - step_s - _wait_s(row, step_s)
        if own_s > 0:
            calibration.observe_total(first_token(row), own_s, accelerator=row.accelerator, noise=0.1)
    return calibration


def _wait_s(row: Serving, step_s: float) -> float:
    """Time in the queue for a slot of the cache, by Little's law."""
    return (row.clients - row.batch) / row.batch * row.output * step_s


def reference_estimates(rows: list[Serving]) -> list[Estimate]:
    """The package's own estimates from its kernel tables, at its current table version."""
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    result = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            ttft_ms, tpot_ms = _reference(row)
            result.append(Estimate(row, ttft_ms / 1e3, tpot_ms / 1e3))
    return result


def _reference(row: Serving) -> tuple[float, float]:
    from aiconfigurator_core.sdk import RuntimeConfig
    from aiconfigurator_core.sdk.backends.factory import get_backend

    summary = get_backend(row.backend).run_agg(
        _reference_model(row.model_path, row.quantization, row.tp, row.backend),
        _reference_tables(row.system, row.backend),
        RuntimeConfig(batch_size=row.clients, isl=row.prompt, osl=row.output),
        ctx_tokens=max(CHUNK_TOKENS, row.prompt),
    )
    table = summary.get_summary_df()
    return float(table["ttft"].iloc[0]), float(table["tpot"].iloc[0])


@functools.lru_cache(maxsize=64)
def _reference_tables(system: str, backend: str) -> Any:
    from aiconfigurator_core.sdk.perf_database import get_database

    return get_database(system, backend, "current", database_mode="SILICON")


@functools.lru_cache(maxsize=64)
def _reference_model(path: str, quantization: str, tp: int, backend: str) -> Any:
    from aiconfigurator_core.sdk import ModelConfig, common
    from aiconfigurator_core.sdk.models import get_model

    config = ModelConfig(tp_size=tp, pp_size=1, moe_tp_size=tp, moe_ep_size=1)
    if quantization:
        config.gemm_quant_mode = common.GEMMQuantMode[quantization]
    return get_model(ALIASES.get(path.rsplit("/", 1)[-1].lower(), path), config, backend)

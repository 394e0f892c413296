"""How far the planner's cost model is from measured times: others' GPU runs, plan choice, inference, this machine.

    nereus bench costmodel --json out.json

Published rows are read from `../shared/data` beside the repository; a part whose data or packages are missing is null.
"""

import dataclasses
import math
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import costmodel_inference as inference
import costmodel_machine as machine
import costmodel_memory as memory
import costmodel_plans as plans
import costmodel_published_memory as published
import costmodel_training as training
import numpy
from rich.console import Console
from rich.table import Table

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"

SEED = 0
OTHER_SEEDS = (1, 2, 3, 4)
QUICK_SERVINGS = 12
"""In the quick form every so many-th inference row is used."""

REPETITIONS = 3

COMMAND = "nereus bench costmodel"

PRIOR_NOTE = (
    "Priors (efficiency of a class per accelerator generation) are fixed numbers of planner/prices/calibration.py, "
    "taken from kernels measured alone and set by hand with these tables in view; nothing is fitted over sources. "
    "Learning them from the other sources instead (leave one source out) was worse: software stacks differ too much."
)


def run(quick: bool = False) -> dict[str, Any]:
    """Every part, printed as tables on standard error and returned as `metrics`, `setup`, `rows`, `command`."""
    console = Console(stderr=True)
    metrics: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, part in PARTS.items():
        metrics[name], rows[name], table = part(quick)
        if table is None:
            console.print(f"{name}: its data or package is not here, left out")
        else:
            console.print(table)
    return {
        "metrics": metrics,
        "setup": _setup(quick),
        "rows": rows,
        "command": COMMAND + (" --quick" if quick else ""),
    }


def _setup(quick: bool) -> dict[str, Any]:
    return {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "seed": SEED,
        "calibration": "max(1, 10%) of a source's rows",
        "repeats": "of one configuration count once, with their mean time",
        "assumptions": list(training.ASSUMPTIONS),
        "priors": PRIOR_NOTE,
        "quick": quick,
    }


Part = tuple[dict[str, Any] | None, Any, Table | None]


def _training(quick: bool) -> Part:
    """Step times of published training runs, per source."""
    if not (DATA / "measured_runs.jsonl").is_file():
        return None, None, None
    data = training.load_rows(DATA)
    fits = training.evaluate(data, seed=SEED)
    single = sorted({row["source"]["name"] for row in data} - {fit.source for fit in fits})
    errors = [error for fit in fits for error in fit.errors.values()]
    metrics: dict[str, Any] = {
        "mape": statistics.median(fit.mape for fit in fits),
        "per_source": {fit.source: {"mape": fit.mape, "max": fit.worst, "r2": fit.r2} for fit in fits},
        "max": max(map(abs, errors)),
        "r2": _log_r2(data, fits),
        "rows": len(errors),
        "excluded": {name: "one row only: nothing is left to predict" for name in single},
    }
    if not quick:
        metrics["mape_of_other_draws"] = {
            seed: statistics.median(fit.mape for fit in training.evaluate(data, seed=seed)) for seed in OTHER_SEEDS
        }
    table = Table(title="published training runs: step time", title_justify="left")
    for column in ("source", "calibrated on", "predicted", "MAPE", "max", "R2"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for fit in sorted(fits, key=lambda fit: fit.mape):
        cells = [len(fit.calibrated_on), len(fit.errors), f"{fit.mape:.1%}", f"{fit.worst:.1%}", f"{fit.r2:.3f}"]
        table.add_row(fit.source, *map(str, cells))
    table.caption = f"median source {metrics['mape']:.2%} (goal under 4.96%)"
    detail = [
        {"id": row, "source": fit.source, "error": error} for fit in fits for row, error in fit.errors.items()
    ] + [{"id": row, "source": fit.source, "calibrated_on": True} for fit in fits for row in fit.calibrated_on]
    return metrics, detail, table


def _log_r2(data: list[training.Row], fits: list[training.Fit]) -> float:
    """R2 of log seconds over all predicted rows: step times span three orders of magnitude."""
    seconds = {row["id"]: row["result"]["step_s"] for row in data}
    pairs = [(seconds[row], error) for fit in fits for row, error in fit.errors.items()]
    measured = [math.log(value) for value, _ in pairs]
    return training.r_squared(measured, [math.log(value * (1 + error)) for value, error in pairs])


def _plan_choice(quick: bool) -> Part:
    """The plan chosen for each setting of the published table, the setting left out of the calibration."""
    if not (DATA / "published_tables.json").is_file():
        return None, None, None
    choices = plans.choose(plans.load_settings(DATA), hypotheses=plans.HYPOTHESES[: 8 if quick else None], seed=SEED)
    regrets = sorted(choice.regret for choice in choices)
    metrics = {
        "exact_rate": statistics.fmean(choice.exact for choice in choices),
        "median_regret": statistics.median(regrets),
        "p95_regret": float(numpy.percentile(regrets, 95)),
        "max_regret": regrets[-1],
        "settings": len(choices),
        "mape": statistics.fmean(choice.mape for choice in choices),
    }
    table = Table(title="plan choice: LLaMA-2-7B on A800", title_justify="left")
    for column in ("setting", "plans", "chosen", "best", "regret", "MAPE", "batch fitted on the other settings"):
        table.add_column(column)
    for choice in choices:
        figures = (f"{choice.regret:.1%}", f"{choice.mape:.1%}")
        table.add_row(choice.setting, str(choice.plans), choice.chosen, choice.best, *figures, str(choice.batching))
    table.caption = f"exact {metrics['exact_rate']:.0%} (goal over 61.1%), worst {regrets[-1]:.1%} (goal 5%)"
    detail = [
        {"setting": c.setting, "chosen": c.chosen, "best": c.best, "regret": c.regret, "batching": str(c.batching)}
        for c in choices
    ]
    return metrics, detail, table


def _inference(quick: bool) -> Part:
    """Inference times beside the estimate of the package that ships the measurements."""
    path = inference.sample_path()
    if path is None:
        return None, None, None
    servings, left_out = inference.load_servings(path)
    if quick:
        servings = servings[::QUICK_SERVINGS]
    ours = inference.estimate(servings, seed=SEED)
    theirs = {e.serving.id: e for e in inference.reference_estimates([estimate.serving for estimate in ours])}
    pairs = [(estimate, theirs[estimate.serving.id]) for estimate in ours]
    metrics = {
        "tpot_mape": _mape(e.tpot_error for e, _ in pairs),
        "aiconfigurator_tpot_mape": _mape(a.tpot_error for _, a in pairs),
        "tpot_median": statistics.median(abs(e.tpot_error) for e, _ in pairs),
        "aiconfigurator_tpot_median": statistics.median(abs(a.tpot_error) for _, a in pairs),
        "ttft_mape": _mape(e.ttft_error for e, _ in pairs),
        "aiconfigurator_ttft_mape": _mape(a.ttft_error for _, a in pairs),
        "ttft_median": statistics.median(abs(e.ttft_error) for e, _ in pairs),
        "aiconfigurator_ttft_median": statistics.median(abs(a.ttft_error) for _, a in pairs),
        "rows": len(pairs),
        "excluded": left_out,
    }
    table = Table(title="inference of dense models: time per output token", title_justify="left")
    for column in ("model", "system", "server", "rows", "MAPE", "aiconfigurator"):
        table.add_column(column)
    groups: dict[tuple[str, str, str, str], list[tuple[inference.Estimate, inference.Estimate]]] = {}
    for estimate, reference in pairs:
        groups.setdefault(estimate.serving.group, []).append((estimate, reference))
    for (model, system, quantization, backend), group in groups.items():
        figures = (f"{_mape(e.tpot_error for e, _ in group):.1%}", f"{_mape(a.tpot_error for _, a in group):.1%}")
        table.add_row(f"{model} {quantization}", system, backend, str(len(group)), *figures)
    table.caption = f"all {metrics['tpot_mape']:.1%}, aiconfigurator {metrics['aiconfigurator_tpot_mape']:.1%}"
    detail = [
        {"id": e.serving.id, "tpot_error": e.tpot_error, "aiconfigurator_tpot_error": a.tpot_error} for e, a in pairs
    ]
    return metrics, detail, table


def _mape(errors: Any) -> float:
    return statistics.fmean(abs(error) for error in errors)


def _this_machine(quick: bool) -> Part:
    """The engine's stages on two pinned workers."""
    if (os.cpu_count() or 1) < 2:
        return None, None, None
    seconds = machine.measure(machine.cases(quick), repetitions=1 if quick else REPETITIONS)
    found = machine.compare(seconds, seed=SEED)
    metrics = found["mape"] | {"noise": found["noise"], "predicted": found["cases"]}
    table = Table(title="this machine: two workers, each on a core", title_justify="left")
    for column in ("stage", "predicted", "MAPE", "spread of repetitions"):
        table.add_column(column)
    for stage, mape in found["mape"].items():
        table.add_row(stage, str(found["cases"][stage]), f"{mape:.1%}", f"{found['noise'][stage]:.1%}")
    table.caption = "goal under 10% a stage"
    return metrics, found["rows"], table


def _memory(quick: bool) -> Part:
    """State and peaks of the engine, rank by rank, and published figures, beside the memory model's."""
    if (os.cpu_count() or 1) < 2:
        return None, None, None
    rows = memory.measure(memory.cases(quick))
    errors = [abs(row["error"]) for row in rows]
    metrics: dict[str, Any] = {
        "state_exact": all(row["state_bytes"] == row["predicted_state_bytes"] for row in rows),
        "activation_error": max(errors),
        "activation_error_mean": statistics.fmean(errors),
        "activation_error_any_rank": max(abs(error) for row in rows for error in row["errors_by_rank"]),
        "cases": len(rows),
    }
    table = Table(title="bytes on a processor: peak of the fullest rank beyond its state", title_justify="left")
    for column in ("case", "state exact", "peak MB", "predicted MB", "error"):
        table.add_column(column)
    for row in rows:
        exact = row["state_bytes"] == row["predicted_state_bytes"]
        sizes = (f"{row['peak_bytes'] / 1e6:.1f}", f"{row['predicted_peak_bytes'] / 1e6:.1f}")
        table.add_row(row["case"], str(exact), *sizes, f"{row['error']:+.1%}")
    table.caption = f"largest error {max(errors):.1%} (goal 10%)"
    detail: dict[str, Any] = {"engine": rows}
    if (DATA / "measured_runs.jsonl").is_file():
        metrics |= _published_memory(table, detail)
    return metrics, detail, table


def _published_memory(table: Table, detail: dict[str, Any]) -> dict[str, Any]:
    """Errors on others' figures by source, as metrics, as lines of the table and in detail."""
    stated = published.load_rows(DATA)
    found = published.figures(stated)
    by_source = published.summary(found)
    table.add_section()
    for figure in found:
        sizes = (f"{figure.published:.2f} {figure.unit}", f"{figure.predicted:.2f} {figure.unit}")
        table.add_row(f"{figure.source}, {figure.id}: {figure.quantity}", "", *sizes, f"{figure.error:+.1%}")
    for source, error in by_source.items():
        table.caption = f"{table.caption}\n{source}: MAPE {error['mape']:.1%}, max {error['max']:.1%}"
    detail["published"] = [dataclasses.asdict(figure) | {"error": figure.error} for figure in found]
    left_out = {row["id"]: reason for row in stated if (reason := published.excluded(row)) is not None}
    assumptions = list(published.ASSUMPTIONS)
    return {"published": by_source, "published_excluded": left_out, "published_assumptions": assumptions}


PARTS: dict[str, Callable[[bool], Part]] = {
    "measured_training": _training,
    "plan_choice": _plan_choice,
    "inference": _inference,
    "this_machine": _this_machine,
    "memory": _memory,
}

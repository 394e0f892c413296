"""Does the cost model pick the best of the plans that others measured? LLaMA-2-7B on 16 to 64 A800, 44 plans.

A setting is (devices, devices per node). One is left out at a time: the model is calibrated on the other settings'
rows and ranks the plans of the one left out. The table does not say how the batch is shared out, so that is chosen in
each fold as well, as the hypothesis under which the calibrated model fits the other settings best.
"""

import dataclasses
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodel_training import Run, count

from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.operations import Bill, Shape

Row = dict[str, Any]

LLAMA_2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Batching:
    """How a plan shares out its batch.

    batch: sequences of a step, over all replicas if `fixed` or in each. micro_batch: sequences of a micro-batch; 0
    puts a replica's share in one.
    """

    batch: int
    fixed: bool
    micro_batch: int
    sequence_parallel: bool

    def __str__(self) -> str:
        whose = "of all replicas" if self.fixed else "of each replica"
        cut = f"micro-batches of {self.micro_batch}" if self.micro_batch else "one micro-batch"
        return f"{self.batch} sequences {whose}, {cut}, sequence parallel {self.sequence_parallel}"


HYPOTHESES = tuple(
    Batching(batch, fixed, micro_batch, sequence_parallel)
    for (fixed, batches), micro_batch, sequence_parallel in itertools.product(
        ((True, (8, 16, 32, 64)), (False, (1, 2, 4, 8))), (0, 1, 2), (False, True)
    )
    for batch in batches
)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The plan chosen for a setting that was left out."""

    setting: str
    plans: int
    batching: Batching
    chosen: str
    best: str
    regret: float
    mape: float

    @property
    def exact(self) -> bool:
        return self.regret == 0.0


def load_settings(folder: Path) -> dict[tuple[int, str], list[Row]]:
    """{(devices, devices per node): rows} of the settings with more than one plan; offloading rows have no plan."""
    tables = json.loads((folder / "published_tables.json").read_text())["tables"]
    table = next(table for table in tables if table["id"] == "morphling_llama7b")
    settings: dict[tuple[int, str], list[Row]] = {}
    for row in table["rows"]:
        if "pp" in row:
            settings.setdefault((row["gpus"], row["placement_gpus_per_node"]), []).append(row)
    return {setting: rows for setting, rows in settings.items() if len(rows) > 1}


def as_run(row: Row, batching: Batching) -> Run:
    share = batching.batch / row["dp"] if batching.fixed else batching.batch
    micro_batch = min(batching.micro_batch, share) if batching.micro_batch else share
    return Run(
        source="morphling", accelerator="a800", node=int(row["placement_gpus_per_node"][0]), shape=LLAMA_2_7B,
        layer_params=LLAMA_2_7B.layer_params, tp=row["tp"], pp=row["pp"], dp=row["dp"], cp=1, ep=1, vpp=1, zero=0,
        micro_batch=micro_batch, micro_batches=share / micro_batch, seq_len=SEQ_LEN,
        sequence_parallel=batching.sequence_parallel, async_tp=False, recompute="none", precision="fp16",
        step_s=row["iter_time_s"],
    )  # fmt: skip


def operations(run: Run) -> Bill:
    """All operations in turn: this system reduces gradients after the backward pass."""
    bill, reduction = count(run)
    bill.add_bill(reduction)
    return bill


def calibrated(rows: list[Row], batching: Batching) -> tuple[Calibration, float]:
    """(calibration on the rows, its mean absolute error on them)."""
    runs = [as_run(row, batching) for row in rows]
    bills = [operations(run) for run in runs]
    calibration = Calibration(forgetting=1.0)
    for bill, run in zip(bills, runs, strict=True):
        calibration.observe_total(bill, run.step_s, accelerator=run.accelerator)
    errors = [
        abs(calibration.predict_total(bill, accelerator=run.accelerator) / run.step_s - 1)
        for bill, run in zip(bills, runs, strict=True)
    ]
    return calibration, statistics.fmean(errors)


def choose(
    settings: dict[tuple[int, str], list[Row]], *, hypotheses: Sequence[Batching] = HYPOTHESES, seed: int = 0
) -> list[Choice]:
    """For each setting, the plan the model would have chosen."""
    result = []
    for setting, rows in settings.items():
        others = [row for other, own in settings.items() if other != setting for row in own]
        random.Random(seed).shuffle(others)
        fits = [(calibrated(others, batching), batching) for batching in hypotheses]
        (calibration, _), batching = min(fits, key=lambda fit: fit[0][1])
        runs = [as_run(row, batching) for row in rows]
        predicted = [calibration.predict_total(operations(run), accelerator=run.accelerator) for run in runs]
        result.append(_choice(setting, runs, predicted, batching))
    return result


def _choice(setting: tuple[int, str], runs: list[Run], predicted: list[float], batching: Batching) -> Choice:
    chosen = runs[min(range(len(runs)), key=predicted.__getitem__)]
    best = min(runs, key=lambda run: run.step_s)
    return Choice(
        setting=f"{setting[0]} devices, {setting[1][0]} a node",
        plans=len(runs),
        batching=batching,
        chosen=_shape(chosen),
        best=_shape(best),
        regret=chosen.step_s / best.step_s - 1,
        mape=statistics.fmean(abs(p / run.step_s - 1) for p, run in zip(predicted, runs, strict=True)),
    )


def _shape(run: Run) -> str:
    return f"d{run.dp}t{run.tp}p{run.pp}"

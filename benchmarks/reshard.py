"""How fast live state changes its layout, against checkpoints, shard-level fetches and a plain memory copy.

Actor and critic, about 100M parameters with Adam moments in fp32, one process a device on one machine. Our times are
the move itself into buffers allocated and touched before; allocation and verification are timed apart. The plain copy
writes as many bytes in as many processes as our move does (local copies included). `nereus bench reshard [--quick]`.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reshard_dcp import CheckpointInPlace, checkpoint_and_restart
from reshard_workers import ProcessMovers, shard_requests

from nereus.engine_facts import BUCKET_BYTES, BUCKETS_STAGED
from nereus.model import Head, ModelSpec
from nereus.moving.commands import BufferKey, DeviceOrder, Export, MoveOrder, StageKinds
from nereus.plan import ACTOR_TRAINING, CRITIC_TRAINING, ModelStage, StagePlan, parse_stage_plan
from nereus.shards.moves import Holding, lower_bound_numel
from nereus.shards.state import Counters, StateKind

CASES = {
    "dp 1 -> 2": ("d1t1p1@0", "d2t1p1@0-1"),
    "dp 2 -> 4": ("d2t1p1@0-1", "d4t1p1@0-3"),
    "tp 2 -> 4": ("d1t2p1@0-1", "d1t4p1@0-3"),
    "tp 4 x pp 1 -> tp 2 x pp 2": ("d1t4p1@0-3", "d1t2p2@0-3"),
    "pp 1 -> pp 4": ("d1t1p1@0", "d1t1p4@0-3"),
}
NUM_DEVICES = 4
EXTENDS = ("dp 1 -> 2", "dp 2 -> 4")
KINDS = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))


def model(*, quick: bool) -> ModelSpec:
    """The actor: 52M parameters (8M in the quick form); the critic has a scalar head instead of the vocabulary."""
    if quick:
        return ModelSpec("llama", 4, 256, 8, 4, 32, 704, 8000)
    return ModelSpec("llama", 12, 512, 8, 4, 64, 1408, 16000)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case. Seconds are medians; bytes are of state that crosses between devices."""

    case: str
    bytes_moved: int
    bytes_lower_bound: int
    bytes_written: int
    ours_s: float
    copy_s: float
    allocate_s: float
    verify_s: float
    across_s: float
    send_s: float
    peak_extra_bytes: int
    shard_level_s: float
    checkpoint_s: float
    checkpoint_restart_s: float

    @property
    def extends(self) -> bool:
        return self.case in EXTENDS


class CaseRun:
    """The buffers and orders of one case, in processes that serve every case."""

    def __init__(
        self,
        name: str,
        states: dict[ModelStage, StageKinds],
        source: StagePlan,
        target: StagePlan,
        *,
        movers: ProcessMovers,
    ) -> None:
        self.name, self.states, self.source, self.target, self.movers = name, states, source, target, movers
        for stage, state in states.items():
            ranks = dict(Holding.of(source).ranks)
            self.movers.each("allocate", {d: (0, stage, state, source.layout, r) for d, r in ranks.items()})

    def reset(self) -> None:
        """Free everything, groups included."""
        self.movers.each("reset", dict.fromkeys(self.movers.pipes, ()))

    def orders(self, *, across: bool) -> list[MoveOrder]:
        source, target, node_of = Holding.of(self.source), Holding.of(self.target), str if across else None
        return [
            MoveOrder.plan(
                f"e0/{self.name}/{stage}/{across}", state, stage, source, stage, target,
                node_of=node_of, keeps_group=across,
            )
            for stage, state in self.states.items()
        ]  # fmt: skip

    def prepared(self, orders: list[MoveOrder]) -> list[tuple[dict[int, DeviceOrder], dict[int, Export]]]:
        """Allocate every target."""
        result = []
        for order in orders:
            parts = order.per_device()
            result.append((parts, {d: e for d, e in self.movers.prepare(parts).items() if e is not None}))
        return result

    def move(self, prepared: list[tuple[dict[int, DeviceOrder], dict[int, Export]]]) -> float:
        begun = time.perf_counter()
        for parts, exports in prepared:
            self.movers.move(parts, exports, Counters(1, 1))
        return time.perf_counter() - begun

    def peak_extra(self, prepared: list[tuple[dict[int, DeviceOrder], dict[int, Export]]]) -> int:
        """Most bytes that a move takes in one process beyond the buffers."""
        growths: list[int] = []
        for parts, exports in prepared:
            arguments = {device: (order, exports, Counters(1, 1)) for device, order in parts.items()}
            growths += self.movers.each("move_watched", arguments).values()
        return max(growths)

    def check(self) -> None:
        for stage in self.states:
            for device, rank in Holding.of(self.target).ranks:
                answer = self.movers.each("holds_values", {device: (BufferKey(stage, self.target.layout, rank),)})
                assert answer[device], f"{self.name}: device {device} holds wrong values of {stage}"

    def written(self, orders: list[MoveOrder]) -> dict[int, int]:
        """Bytes each device writes."""
        total: dict[int, int] = {}
        for order in orders:
            for move in (*order.moves.remote, *(m for m in order.moves.local if m.target not in order.moves.kept)):
                total[move.target] = total.get(move.target, 0) + move.numel * order.state.element_bytes
        return total

    def between(self, orders: list[MoveOrder]) -> dict[tuple[int, int], int]:
        """Bytes of each pair of devices."""
        total: dict[tuple[int, int], int] = {}
        for order in orders:
            for move in order.moves.remote:
                pair = move.source, move.target
                total[pair] = total.get(pair, 0) + move.numel * order.state.element_bytes
        return total

    def plain_copy(self, written: dict[int, int]) -> float:
        begun = time.perf_counter()
        self.movers.each("plain_copy", {d: (n,) for d, n in written.items()})
        return time.perf_counter() - begun

    def shard_level(self) -> float:
        """Every rank fetches its ranges from the holders one request at a time, all ranks at once."""
        ports = self.movers.each("serve_shards", dict.fromkeys(self.source.devices, (0,)))
        ranks, source, target = dict(Holding.of(self.target).ranks), Holding.of(self.source), Holding.of(self.target)
        work = {
            device: [
                request
                for stage, state in self.states.items()
                for request in shard_requests(state, stage, source, target, device)
            ]
            for device in ranks
        }
        begun = time.perf_counter()
        self.movers.each("fetch_shards", {d: (r, ports, self.target.layout, ranks[d]) for d, r in work.items() if r})
        seconds = time.perf_counter() - begun
        self.movers.each("stop_serving", dict.fromkeys(self.source.devices, ()))
        return seconds

    def across_nodes(self, repetitions: int) -> tuple[float, float, int]:
        """(our seconds, seconds of one raw send a pair, most private memory a worker grew by) over the group."""
        orders = self.orders(across=True)
        between = self.between(orders)
        devices = tuple(sorted({d for pair in between for d in pair}))
        prepared = self.prepared(orders)
        self.move(prepared)
        ours, raw = [], []
        for index in range(repetitions):
            ours.append(self.move(prepared))
            raw.append(max(self.movers.each(
                "raw_send", dict.fromkeys(devices, (f"{self.name}/raw{index}", devices, between))
            ).values()))  # fmt: skip
        self.check()
        return statistics.median(ours), statistics.median(raw), self.peak_extra(prepared)


def run_case(name: str, *, quick: bool, movers: ProcessMovers, in_place: CheckpointInPlace) -> Row:
    """Every measurement of one case."""
    actor = model(quick=quick)
    states = {ACTOR_TRAINING: StageKinds(actor, KINDS), CRITIC_TRAINING: StageKinds(actor.with_head(Head.SCORE), KINDS)}
    source, target = (parse_stage_plan(text) for text in CASES[name])
    repetitions, restarts = (3, 1) if quick else (9, 3)
    case = CaseRun(name, states, source, target, movers=movers)
    row = _measure(case, repetitions)
    case.reset()
    return dataclasses.replace(
        row,
        checkpoint_s=statistics.median(in_place.seconds(states, source, target) for _ in range(restarts)),
        checkpoint_restart_s=statistics.median(checkpoint_and_restart(states, source, target) for _ in range(restarts)),
    )


def _measure(case: CaseRun, repetitions: int) -> Row:
    orders = case.orders(across=False)
    written = case.written(orders)
    begun = time.perf_counter()
    prepared = case.prepared(orders)
    allocate_s = time.perf_counter() - begun
    case.move(prepared)
    case.plain_copy(written)
    ours, copies = [], []
    for _ in range(repetitions):
        ours.append(case.move(prepared))
        copies.append(case.plain_copy(written))
    peak = case.peak_extra(prepared)
    begun = time.perf_counter()
    for parts, _ in prepared:
        case.movers.digests(parts)
    verify_s = time.perf_counter() - begun
    case.check()
    shard_level = statistics.median(case.shard_level() for _ in range(1 if repetitions < 9 else 3))
    case.check()
    case.movers.each("drop_scratch", dict.fromkeys(case.movers.pipes, ()))
    released = {
        device: tuple(key for p, _ in prepared if (key := p[device].target) is not None and not p[device].keeps_buffer)
        for device in prepared[0][0]
    }
    case.movers.release({device: keys for device, keys in released.items() if keys})
    across_s, send_s, across_peak = case.across_nodes(repetitions)
    lower = sum(
        lower_bound_numel(s.spec, Holding.of(case.source), Holding.of(case.target)) * s.element_bytes
        for s in case.states.values()
    )
    return Row(
        case.name, sum(o.bytes_moved for o in orders), lower, sum(written.values()), statistics.median(ours),
        statistics.median(copies), allocate_s, verify_s, across_s, send_s, max(peak, across_peak), shard_level, 0.0,
        0.0,
    )  # fmt: skip


def metrics_of(rows: list[Row]) -> dict[str, float]:
    """The worst case of each kind."""
    extends, reshards = [r for r in rows if r.extends], [r for r in rows if not r.extends]
    metrics = {}
    for name, some in (("extend", extends), ("reshard", reshards)):
        metrics[f"{name}_vs_checkpoint_restart"] = min(r.checkpoint_restart_s / r.ours_s for r in some)
        metrics[f"{name}_vs_checkpoint"] = min(r.checkpoint_s / r.ours_s for r in some)
        metrics[f"{name}_vs_shard_level"] = min(r.shard_level_s / r.ours_s for r in some)
        metrics[f"{name}_over_copy"] = max(r.ours_s / r.copy_s for r in some)
        metrics[f"{name}_across_over_send"] = max(r.across_s / r.send_s for r in some)
    metrics["reshard_bytes_over_lower_bound"] = max(r.bytes_moved / r.bytes_lower_bound for r in rows)
    metrics["peak_extra_over_bound"] = max(r.peak_extra_bytes for r in rows) / (BUCKETS_STAGED * BUCKET_BYTES)
    return metrics


def print_table(rows: list[Row]) -> None:
    table = Table(title="Live state to a new layout, seconds (x: how many times ours)")
    for column in ("case", "MB", "/ bound", "ours", "copy", "shard-level", "DCP", "DCP + restart", "across", "send",
                   "allocate", "verify", "extra MB"):  # fmt: skip
        table.add_column(column, justify="left" if column == "case" else "right")
    for r in rows:
        times = [f"{s:.3f} ({s / r.ours_s:.1f}x)" for s in (r.shard_level_s, r.checkpoint_s, r.checkpoint_restart_s)]
        table.add_row(
            r.case, f"{r.bytes_moved / 1e6:.0f}", f"{r.bytes_moved / r.bytes_lower_bound:.3f}", f"{r.ours_s:.3f}",
            f"{r.copy_s:.3f}", *times, f"{r.across_s:.3f}", f"{r.send_s:.3f}", f"{r.allocate_s:.3f}",
            f"{r.verify_s:.3f}", f"{r.peak_extra_bytes / 1e6:.1f}",
        )  # fmt: skip
    Console(width=180).print(table)


def run(quick: bool = False) -> dict[str, Any]:
    """Measure every case (two in the quick form), print the table, return what `--json` writes."""
    names = ["dp 1 -> 2", "tp 2 -> 4"] if quick else list(CASES)
    movers, in_place = ProcessMovers(NUM_DEVICES), CheckpointInPlace(NUM_DEVICES)
    try:
        rows = [run_case(name, quick=quick, movers=movers, in_place=in_place) for name in names]
    finally:
        movers.close()
        in_place.close()
    print_table(rows)
    actor = model(quick=quick)
    return {
        "metrics": metrics_of(rows),
        "setup": {
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "parameters": actor.num_params + actor.with_head(Head.SCORE).num_params, "bytes_per_parameter": 12,
            "repetitions": 3 if quick else 9, "restarts": 1 if quick else 3, "bucket_bytes": BUCKET_BYTES,
            "window": BUCKETS_STAGED, "threads_per_process": 1, "seeds": [],
        },
        "rows": [dataclasses.asdict(row) for row in rows],
        "command": "nereus bench reshard" + (" --quick" if quick else ""),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(json.dumps(result["metrics"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))

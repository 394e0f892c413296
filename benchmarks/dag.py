"""How fast two placed plans become an ordered DAG, how short its schedule is, and how much it moves.

Three questions, one table each:

- planning time from 32 to 16,384 devices, by kind of transition; devices are assigned before, and timed apart;
- schedule length against SCIP's on the same formulation (`dag_scip`), on transitions it can solve in its time limit;
- bytes moved against the sum of lower bounds: what target devices do not hold themselves.

`nereus bench dag`; SCIP gets 2 s a transition with --quick, else 20 s, and 600 s with
`python benchmarks/dag.py --scip`.
"""

import argparse
import collections
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dag_scip

from nereus.cluster import ACCELERATORS, Cluster, uniform_cluster
from nereus.model import Head, ModelSpec
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    MODEL_STAGES,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    ModelStage,
    Plan,
    Stage,
    StagePlan,
)
from nereus.transition.assignment import assign
from nereus.transition.dag import build_dag
from nereus.transition.diff import Held, diff
from nereus.transition.operations import Infeasible, TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState, lacking_elements
from nereus.transition.schedule import transition_seconds
from nereus.transition.shadow import bytes_in_use

Row = dict[str, Any]

SEED = 0
NUM_DEVICES = (32, 128, 1024, 4096, 16384)
MODEL = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256)
"""Shapes of an 8B model; the critic and the reward model are the same with a scalar head."""
STATES = {
    m: StageState(
        MODEL if m.role in ("actor", "reference") else MODEL.with_head(Head.SCORE),
        14 if m.stage is Stage.TRAINING else 2,
    )
    for m in MODEL_STAGES
}
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A transition to plan."""

    name: str
    cluster: Cluster
    current: Plan
    target: Plan


def h200(num_devices: int) -> Cluster:
    return uniform_cluster(
        num_nodes=num_devices // 8, devices_per_node=8, accelerator=ACCELERATORS["h200"]
    )  # fmt: skip


def _stages(num_devices: int, layouts: dict[ModelStage, Layout], *, share: float = 1.0) -> Plan:
    """A PPO plan: generation on all devices, then actor and reference on one half, critic and reward on the other."""
    used = int(num_devices * share)
    half, quarter = used // 2, used // 4
    ranges = {
        ACTOR_GENERATION: (0, used),
        REFERENCE_INFERENCE: (0, half),
        REWARD_INFERENCE: (half, half + quarter),
        CRITIC_INFERENCE: (half + quarter, used),
        CRITIC_TRAINING: (half, used),
        ACTOR_TRAINING: (0, half),
    }
    return Plan.of({m: StagePlan.of(layouts[m], range(*ranges[m])) for m in MODEL_STAGES})


def _layouts(*shapes: tuple[int, int]) -> dict[ModelStage, Layout]:
    return {m: Layout(*shape) for m, shape in zip(MODEL_STAGES, shapes, strict=True)}


def timing_cases(num_devices: int) -> list[Case]:
    """The kinds of transition a run meets, at a size: more devices, fewer, longer responses, all at once."""
    before = _layouts((2, 1), (2, 1), (2, 1), (2, 2), (4, 2), (4, 2))
    after = _layouts((4, 1), (4, 1), (2, 2), (4, 1), (8, 1), (4, 1))
    cluster = h200(num_devices)
    half, whole = _stages(num_devices, before, share=0.5), _stages(num_devices, before)
    return [
        Case("scale out", cluster, half, whole),
        Case("scale in", cluster, whole, half),
        Case("new layouts", cluster, whole, _stages(num_devices, after)),
        Case("new layouts, twice the devices", cluster, half, _stages(num_devices, after)),
    ]


def random_case(rng: random.Random, num_devices: int) -> Case:
    """Any layouts on any aligned ranges of devices, as many model-stages as PPO has."""

    def stage_plan() -> StagePlan:
        layout = rng.choice([layout for layout in LAYOUTS if layout.num_ranks <= num_devices])
        dp = rng.randint(1, max(1, min(16, num_devices // layout.num_ranks)))
        size = dp * layout.num_ranks
        first = rng.randint(0, (num_devices - size) // layout.num_ranks) * layout.num_ranks
        return StagePlan.of(layout, range(first, first + size))

    plans = [Plan.of({m: stage_plan() for m in MODEL_STAGES}) for _ in range(2)]
    return Case("random", h200(num_devices), *plans)


def _table(case: Case, *, room: float | None = None) -> DeviceTable:
    """The devices of a case; with `room`, each can hold that many times what the fullest holds under either plan."""
    table = DeviceTable.of(case.cluster)
    if room is not None:
        held = (bytes_in_use(Held.of(plan), STATES, table) for plan in (case.current, case.target))
        table.limit_bytes[:] = int(max(int(used.max()) for used in held) * room)
    return table


def _rotated(plan: Plan, shift: int, num_devices: int) -> Plan:
    """The plan on other devices, made of new objects: nothing kept for another plan serves it."""
    return Plan.of(
        {
            m: StagePlan.of(stage.layout, [(device + shift) % num_devices for device in stage.devices])
            for m, stage in plan.stages
        }
    )


def measure_planning(num_devices: int, repetitions: int) -> list[Row]:
    """Milliseconds from two placed plans to the ordered DAG, and of the assignment, by kind of transition.

    Every repetition takes plans that were not met before, on other devices, and goes the way a decision goes: assign
    devices, then plan. `plan_cold_ms` is the same for copies of the placed plans that the assignment has not seen.
    """
    rows: list[Row] = []
    for case in timing_cases(num_devices):
        table, rates = _table(case), Rates.of(case.cluster)
        times: dict[str, list[float]] = collections.defaultdict(list)
        operations = 0
        for repetition in range(repetitions + 1):
            shift = 16 * repetition
            current, target = (_rotated(plan, shift, num_devices) for plan in (case.current, case.target))
            began = time.perf_counter()
            placed = assign(current, target, states=STATES, table=table, cluster=case.cluster)
            times["assign_ms"].append((time.perf_counter() - began) * 1e3)
            cold = [_rotated(plan, 8, num_devices) for plan in (current, placed)]
            for name, pair in (("plan", (current, placed)), ("plan_cold", cold)):
                began, cpu_began = time.perf_counter(), time.process_time()
                dag = build_dag(*pair, states=STATES, table=table, rates=rates)
                times[f"{name}_ms"].append((time.perf_counter() - began) * 1e3)
                times[f"{name}_cpu_ms"].append((time.process_time() - cpu_began) * 1e3)
                assert isinstance(dag, TransitionDag), dag
                operations = len(dag.operations)
        row: Row = {"devices": num_devices, "transition": case.name, "operations": operations}
        # The first repetition counts the boxes of layouts not met before.
        row |= {name: statistics.median(values[1:]) for name, values in times.items()}
        rows.append(row | {"plan_ms_min": min(times["plan_ms"][1:]), "repetitions": repetitions})
    return rows


def measure_schedules(sizes: tuple[int, ...], per_size: int, limit_s: float) -> list[Row]:
    """Schedule length of random transitions, roomy and tight in memory, against SCIP's."""
    rng = random.Random(SEED)
    rows: list[Row] = []
    for num_devices in sizes:
        for index in range(per_size):
            case = random_case(rng, num_devices)
            table, rates = _table(case, room=(3.0, 1.2, 1.0)[index % 3]), Rates.of(case.cluster)
            placed = assign(case.current, case.target, states=STATES, table=table, cluster=case.cluster)
            dag = build_dag(case.current, placed, states=STATES, table=table, rates=rates)
            if isinstance(dag, Infeasible) or len(dag.operations) < 3:
                continue
            ours_s = transition_seconds(dag, rates)
            theirs = dag_scip.solve(dag, states=STATES, table=table, limit_s=limit_s)
            rows.append(
                {
                    "devices": num_devices, "mode": str(dag.mode), "operations": len(dag.operations),
                    "resource_edges": len(dag.resource_edges), "seconds": ours_s, "scip_seconds": theirs.seconds,
                    "scip_bound_s": theirs.bound_s, "scip_proved": theirs.optimal, "scip_took_s": theirs.took_s,
                    "gap": None if theirs.seconds is None else ours_s / theirs.seconds - 1,
                }
            )  # fmt: skip
    return rows


def measure_bytes(num_devices: int, cases: int) -> list[Row]:
    """Bytes that random transitions move against the sum over target devices of what each does not hold itself."""
    rng = random.Random(SEED)
    rows: list[Row] = []
    for _ in range(cases):
        case = random_case(rng, num_devices)
        table, rates = _table(case, room=3.0), Rates.of(case.cluster)
        changes = diff(case.current, case.target, states=STATES)
        dag = build_dag(case.current, case.target, states=STATES, table=table, rates=rates)
        assert isinstance(dag, TransitionDag) and not isinstance(changes, Infeasible)
        bound = sum(
            int(lacking_elements(c.state.spec, c.source, c.new_buffers, table.size).sum()) * c.state.element_bytes
            for c in changes
        )
        rows.append({"moved_bytes": dag.moved_bytes, "lower_bound_bytes": bound})
    return rows


def run(quick: bool, *, scip_s: float | None = None) -> Row:
    """Measure, print the tables, and return `metrics`, `setup`, `rows` and `command`."""
    planning = [
        row
        for num_devices in NUM_DEVICES
        for row in measure_planning(num_devices, repetitions=(20 if quick else 100) if num_devices < 16384 else 9)
    ]
    limit_s = scip_s or (2.0 if quick else 20.0)
    schedules = measure_schedules((8, 16, 64) if quick else (8, 16, 32, 64, 1024), 3 if quick else 6, limit_s)
    moved = measure_bytes(64, 20 if quick else 100)
    _print(planning, schedules)
    by_size: dict[int, list[Row]] = collections.defaultdict(list)
    for row in planning:
        by_size[row["devices"]].append(row)
    # Where SCIP ran out of time, what it found counts only if it is shorter than ours.
    gaps = [row["gap"] for row in schedules if row["gap"] is not None and (row["scip_proved"] or row["gap"] > 0)]
    metrics = {
        "plan_ms": {str(n): max(row["plan_ms"] for row in rows) for n, rows in by_size.items()},
        **{
            name: {str(n): max(row[name] for row in rows) for n, rows in by_size.items()}
            for name in ("plan_cpu_ms", "plan_ms_min", "plan_cold_ms", "plan_cold_cpu_ms", "assign_ms")
        },
        "gap_to_scip": max(gaps, default=None),
        "gap_to_scip_mean": statistics.fmean(gaps) if gaps else None,
        "scip_proved": sum(row["scip_proved"] for row in schedules),
        "bytes_over_lower_bound": sum(r["moved_bytes"] for r in moved) / sum(r["lower_bound_bytes"] for r in moved),
    }
    setup = {
        "machine": platform.processor() or platform.machine(), "python": platform.python_version(),
        "numpy": np.__version__, "scip_limit_s": limit_s, "seed": SEED, "model": "8B, PPO, six model-stages",
        "load": os.getloadavg()[0], "transfers": len(moved),
    }  # fmt: skip
    command = "nereus bench dag" + (" --quick" if quick else "")
    return {"metrics": metrics, "setup": setup, "rows": planning + schedules, "command": command}


def _print(planning: list[Row], schedules: list[Row]) -> None:
    console = Console(stderr=True)
    first = Table("devices", "transition", "operations", "plan ms", "cpu", "cold", "assign ms", title="Planning")
    for row in planning:
        first.add_row(
            str(row["devices"]), row["transition"], str(row["operations"]), f"{row['plan_ms']:.3f}",
            f"{row['plan_cpu_ms']:.3f}", f"{row['plan_cold_ms']:.3f}", f"{row['assign_ms']:.1f}",
        )  # fmt: skip
    console.print(first)
    second = Table(
        "devices", "mode", "operations", "edges", "seconds", "SCIP", "proved", "gap", title="Schedule against SCIP"
    )  # fmt: skip
    for row in schedules:
        second.add_row(
            str(row["devices"]), row["mode"], str(row["operations"]), str(row["resource_edges"]),
            f"{row['seconds']:.3f}", "-" if row["scip_seconds"] is None else f"{row['scip_seconds']:.3f}",
            "yes" if row["scip_proved"] else "no", "-" if row["gap"] is None else f"{100 * row['gap']:.2f}%",
        )  # fmt: skip
    console.print(second)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scip", action="store_true", help="give SCIP 600 s a transition")
    parser.add_argument("--quick", action="store_true", help="a form that ends within a minute")
    arguments = parser.parse_args()
    result = run(quick=arguments.quick, scip_s=600.0 if arguments.scip else None)
    print(json.dumps(result, indent=2))

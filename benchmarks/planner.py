"""Is the planner's plan the optimum, is it feasible, and how long does a decision take?

    nereus bench planner [--quick] [--json FILE]        .venv/bin/python benchmarks/planner.py --scip

Optimality: random instances of up to 16 devices against enumeration that shares no code with the search (every
candidate at every position; `tests/planner`). Decision: one whole `search` for PPO of an 8B model, with lengths and
calibration changed before every repetition, as at a replan; operation counts that depend on the model's shape alone
stay cached, as they do in a run. SCIP solves the same tables of candidates as a mixed-integer program.
"""

import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nereus.cluster import parse_cluster
from nereus.plan import ModelStage
from nereus.planner.api import problem_for
from nereus.planner.candidates import Candidates, best_settings
from nereus.planner.combine import Combiner, Placement
from nereus.planner.evaluate import price
from nereus.planner.operations import Op
from nereus.planner.problem import PlanningProblem
from nereus.planner.search import Choice, search
from nereus.planner.workload import Lengths

TESTS = Path(__file__).resolve().parent.parent / "tests" / "planner"
CLUSTERS = {32: "4x8xh200", 1024: "128x8xh200", 16384: "2048x8xh200"}
SCIP_LIMIT_S = 600.0
INSTANCES = 300


def run(quick: bool = False, *, scip: bool = False) -> dict[str, Any]:
    """All measurements; `scip` also runs the comparisons that take SCIP minutes."""
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    optimal = optimality(16 if quick else INSTANCES)
    decisions = {size: decision_ms(text, 3 if quick else 9, rows) for size, text in CLUSTERS.items()}
    ratios = {} if quick else against_scip((8, 16, 32, 64) if scip else (8, 16), rows)
    metrics = {
        "optimum_found_rate": optimal["found"] / optimal["instances"],
        "infeasible_returned": optimal["infeasible"],
        "decision_ms": {str(size): value for size, value in decisions.items()},
        "rss_mb": planner_rss_mb(),
        "vs_scip": {str(size): ratio for size, ratio in ratios.items()},
    }
    rows.insert(0, {"question": "optimality", **optimal})
    result = {
        "metrics": metrics,
        "setup": {
            "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
            "model": "llama-3.1-8b", "algorithm": "ppo", "batch": 512, "repetitions": 3 if quick else 9,
            "seeds": f"0..{optimal['instances'] - 1}", "scip_limit_s": SCIP_LIMIT_S,
        },
        "rows": rows,
        "command": "nereus bench planner" + (" --quick" if quick else ""),
    }  # fmt: skip
    show(metrics, rows, console)
    return result


def optimality(count: int) -> dict[str, Any]:
    """Random instances against enumeration: half arbitrary numbers, half whole problems of small models."""
    sys.path.insert(0, str(TESTS))
    import enumeration
    import instances

    found = infeasible = feasible = tried = 0
    for seed in range(count):
        if seed % 2:
            cluster, line, tables, syncs, sync_price, placement = instances.random_tables(seed)
        else:
            problem = instances.random_problem(seed)
            cluster, line, placement = problem.cluster, problem.line, problem.limits.placement
            syncs, sync_price = problem.workflow.syncs, problem.pricing.sync_price
            tables = thinned(problem, seed)
            infeasible += returned_infeasible(problem)
        room = {device.id: line.capacity_at(place) for place, device in enumerate(line.devices)}
        best, combinations = enumeration.optimum(
            cluster, tables, syncs=syncs, sync_price=sync_price.matrix, capacity=room, placement=placement.value
        )
        got = Combiner(line, tables, syncs=syncs, sync_price=sync_price, placement=placement).solve()
        seconds = got.step_seconds if got else math.inf
        found += seconds == best or math.isclose(seconds, best, rel_tol=1e-9)
        feasible += best < math.inf
        tried += combinations
    return {"instances": count, "found": found, "feasible": feasible, "infeasible": infeasible, "enumerated": tried}


def thinned(problem: PlanningProblem, seed: int) -> dict[ModelStage, Candidates]:
    """A random part of every model-stage's candidates, small enough to enumerate."""
    rng, tables = np.random.default_rng(seed), {}
    for m in problem.workflow.model_stages:
        table = problem.pricing.candidates(m, in_turn=problem.limits.placement is Placement.COLOCATED)
        keep = 14 if len(problem.workflow.model_stages) < 4 else 4
        tables[m] = table.take(np.sort(rng.permutation(len(table))[:keep]))
    return tables


def returned_infeasible(problem: PlanningProblem) -> bool:
    """Whether `search` returns a plan that does not fit when each of its devices is added up separately."""
    choice = search(problem)
    if not isinstance(choice, Choice):
        return False
    settings = {m: (s.micro_batch, s.recompute) for m, s in choice.settings.items()}
    return not price(problem, choice.plan, settings, in_turn=choice.placement is Placement.COLOCATED).feasible


def replan(text: str, repetition: int) -> PlanningProblem:
    """The problem of one replan: lengths and calibration differ from those of the others."""
    grown = 1 + 0.07 * repetition
    lengths = Lengths(tuple(grown * (200 + 60 * i) for i in range(48)))
    problem = problem_for("llama-3.1-8b", text, algorithm="ppo", batch=512, prompt=1024, response=lengths)
    problem.cost.calibration.observe(Op.GEMM, 1e15, 100, 1.6 * grown, accelerator="h200")
    return problem


def decision_ms(text: str, repetitions: int, rows: list[dict[str, Any]]) -> float:
    """Median wall milliseconds of a replan on a cluster, after one that fills the caches."""
    search(replan(text, 0))
    wall, processor, gaps = [], [], []
    for repetition in range(1, repetitions + 1):
        problem = replan(text, repetition)
        begin, used = time.perf_counter(), time.process_time()
        choice = search(problem)
        wall.append((time.perf_counter() - begin) * 1e3)
        processor.append((time.process_time() - used) * 1e3)
        assert isinstance(choice, Choice)
        gaps.append(choice.gap)
    rows.append(
        {"question": "decision", "devices": parse_cluster(text).num_devices, "wall_ms": statistics.median(wall),
         "wall_ms_min": min(wall), "wall_ms_max": max(wall), "cpu_ms": statistics.median(processor),
         "gap": max(gaps)}
    )  # fmt: skip
    return statistics.median(wall)


def planner_rss_mb() -> float:
    """Peak resident memory of a process that imports the planner and plans for 16,384 devices."""
    code = (
        "import re\nfrom nereus.planner.api import plan\n"
        "plan('llama-3.1-8b', '2048x8xh200')\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout) / 1024


def against_scip(sizes: tuple[int, ...], rows: list[dict[str, Any]]) -> dict[int, float]:
    """SCIP's seconds over the search's on equal tables, GRPO of a 1B model; stops where SCIP takes too long."""
    try:
        import pyscipopt  # noqa: F401
    except ImportError:
        rows.append({"question": "scip", "skipped": "pyscipopt is not installed"})
        return {}
    ratios: dict[int, float] = {}
    for size in sizes:
        problem = problem_for("llama-3.2-1b", f"1x{size}xh100", algorithm="grpo", batch=32, prompt=512, response=1024)
        tables = {m: best_settings(problem.pricing.candidates(m, in_turn=False)) for m in problem.workflow.model_stages}
        begin = time.perf_counter()
        ours = Combiner(
            problem.line, tables, syncs=(), sync_price=problem.pricing.sync_price, placement=Placement.FREE
        ).solve()
        own_s = time.perf_counter() - begin
        assert ours is not None
        objective, scip_s = solve_with_scip(problem, tables)
        rows.append(
            {"question": "scip", "devices": size, "search_s": own_s, "scip_s": scip_s,
             "search_step_s": ours.step_seconds, "scip_step_s": objective}
        )  # fmt: skip
        ratios[size] = scip_s / own_s
        if scip_s >= SCIP_LIMIT_S:
            break
    return ratios


def solve_with_scip(problem: PlanningProblem, tables: dict[ModelStage, Candidates]) -> tuple[float | None, float]:
    """(step seconds, wall seconds) of the same choice as a mixed-integer program, synchronization left out in both.

    One binary for each candidate and start; memory and load are summed device by device.
    """
    import pyscipopt

    line = problem.line
    model = pyscipopt.Model()
    model.hideOutput()
    model.setParam("limits/time", SCIP_LIMIT_S)
    waves = next(iter(tables.values())).seconds.shape[1]
    length = [model.addVar(lb=0.0) for _ in range(waves)]
    peak = [model.addVar(lb=0.0) for _ in range(line.num_devices)]
    idle: list[Any] = [0.0] * line.num_devices
    busy: dict[tuple[str, int], list[Any]] = {}
    load: list[list[Any]] = [[0.0] * line.num_devices for _ in range(waves)]
    begin = time.perf_counter()
    scale = 1e9
    for m, table in tables.items():
        chosen = []
        for row in range(len(table)):
            c = table[row]
            for start in range(line.num_devices):
                end = line.end(start, c.grain, c.num_groups)
                if end is None or not line.in_region(start, end, line.regions[c.region]):
                    continue
                pick = model.addVar(vtype="B")
                chosen.append(pick)
                for device in range(start, end):
                    idle[device] = idle[device] + pick * (c.idle_bytes / scale)
                    busy.setdefault((m.stage, device), []).append(pick)
                    model.addCons(peak[device] >= pick * ((c.active_bytes - c.idle_bytes) / scale))
                    for wave in range(waves):
                        if c.wave_seconds[wave]:
                            load[wave][device] = load[wave][device] + pick * c.wave_seconds[wave]
        model.addCons(pyscipopt.quicksum(chosen) == 1)
    for picks in busy.values():
        model.addCons(pyscipopt.quicksum(picks) <= 1)
    for device in range(line.num_devices):
        model.addCons(idle[device] + peak[device] <= line.capacity_at(device) / scale)
        for wave in range(waves):
            model.addCons(length[wave] >= load[wave][device])
    model.setObjective(pyscipopt.quicksum(length), "minimize")
    model.optimize()
    spent = time.perf_counter() - begin
    return (model.getObjVal() if model.getStatus() == "optimal" else None), spent


def show(metrics: dict[str, Any], rows: list[dict[str, Any]], console: Console) -> None:
    """The table of the benchmark."""
    table = Table(title="planner", title_justify="left")
    for name in ("question", "case", "result"):
        table.add_column(name)
    for row in rows:
        if row["question"] == "optimality":
            table.add_row("optimum found", f"{row['instances']} instances, {row['feasible']} feasible",
                          f"{row['found']} ({row['infeasible']} infeasible returned)")  # fmt: skip
        elif row["question"] == "decision":
            table.add_row(
                "decision", f"{row['devices']} devices",
                f"{row['wall_ms']:.0f} ms wall, {row['cpu_ms']:.0f} ms processor, gap {row['gap']:.1%}",
            )  # fmt: skip
        elif "scip_s" in row:
            table.add_row("against SCIP", f"{row['devices']} devices",
                          f"{row['search_s'] * 1e3:.1f} ms against {row['scip_s']:.1f} s")  # fmt: skip
    table.add_row("memory", "process", f"{metrics['rss_mb']:.0f} MB")
    console.print(table)


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv, scip="--scip" in sys.argv)["metrics"], indent=2))
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", file=sys.stderr)

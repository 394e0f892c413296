"""Is the planner's plan the optimum, is it feasible, and how long does a decision take?

    nereus bench planner [--quick] [--json FILE]        .venv/bin/python benchmarks/planner.py --scip

Optimality: random instances of up to 16 devices against enumeration that shares no code with the search (every
candidate at every position; `tests/planner`). Decision: one whole `search` for PPO of an 8B model, with lengths and
calibration changed before every repetition, as at a replan: the plan that runs is known, and operation counts that
depend on the model's shape alone stay cached, as in a run. `cold` is the first search of a process.

SCIP gets the same problem (PPO of an 8B model, weight synchronization included) as a mixed-integer program
(`planner_scip.py`): its time is that of solving alone, with candidates priced and the model built; ours is the whole
search. Both must find the same optimum.
"""

import dataclasses
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nereus.cluster import parse_cluster
from nereus.engine_facts import Op
from nereus.plan import ModelStage
from nereus.planner.api import problem_for
from nereus.planner.evaluate import price
from nereus.planner.placement import Placement
from nereus.planner.problem import PlanningProblem
from nereus.planner.search.branch_and_bound import Combiner
from nereus.planner.search.optimum import Choice, search
from nereus.planner.space.candidates import Candidates, best_settings
from nereus.planner.workload import Lengths

if TYPE_CHECKING:
    import planner_scip

TESTS = Path(__file__).resolve().parent.parent / "tests" / "rig"
CLUSTERS = {32: "4x8xh200", 1024: "128x8xh200", 16384: "2048x8xh200"}
SCIP_LIMIT_S = 600.0
SCIP_SIZES = (8, 16)
LONG_SCIP_SIZES = (8, 16, 32, 64, 128, 256)
TOLERANCE = 1e-6
INSTANCES = 300


def run(quick: bool = False, *, scip: bool = False) -> dict[str, Any]:
    """All measurements; `scip` also runs the comparisons that take SCIP minutes, up to where it does not end."""
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    optimal = optimality(16 if quick else INSTANCES)
    decisions = {size: decision_ms(text, 3 if quick else 9, rows) for size, text in CLUSTERS.items()}
    ratios = {} if quick else against_scip(LONG_SCIP_SIZES if scip else SCIP_SIZES, rows)
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
            "cpus": os.cpu_count(), "model": "llama-3.1-8b", "algorithm": "ppo", "batch": 512,
            "repetitions": 3 if quick else 9, "seeds": f"0..{optimal['instances'] - 1}", "scip_limit_s": SCIP_LIMIT_S,
        },
        "rows": rows,
        "command": "python benchmarks/planner.py --scip" if scip else "nereus bench planner" + " --quick" * quick,
    }  # fmt: skip
    show(metrics, rows, console)
    return result


def optimality(count: int) -> dict[str, Any]:
    """Random instances against enumeration: half arbitrary numbers, half whole problems of small models."""
    sys.path.insert(0, str(TESTS))
    import enumeration
    import instances

    begin = time.perf_counter()
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
    return {
        "instances": count, "found": found, "feasible": feasible, "infeasible": infeasible, "enumerated": tried,
        "took_s": time.perf_counter() - begin,
    }  # fmt: skip


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
    return not price(problem, choice.plan, in_turn=choice.placement is Placement.COLOCATED).feasible


def replan(text: str, repetition: int) -> PlanningProblem:
    """The problem of one replan: lengths and calibration differ from those of the others."""
    grown = 1 + 0.07 * repetition
    lengths = Lengths(tuple(grown * (200 + 60 * i) for i in range(48)))
    problem = problem_for("llama-3.1-8b", text, algorithm="ppo", batch=512, prompt=1024, response=lengths)
    problem.cost.calibration.observe(Op.GEMM, 1e15, 100, 1.6 * grown, accelerator="h200")
    return problem


def decision_ms(text: str, repetitions: int, rows: list[dict[str, Any]]) -> float:
    """Median wall milliseconds of a replan on a cluster, as the controller asks it: the plan that runs is known.

    Every repetition is also decided without a current plan. One decision before fills the caches.
    """
    running = search(replan(text, 0))
    assert isinstance(running, Choice)
    wall, processor, anew, gaps = [], [], [], []
    for repetition in range(1, repetitions + 1):
        problem = replan(text, repetition)
        begin, used = time.perf_counter(), time.process_time()
        choice = search(problem, current=running.plan)
        wall.append((time.perf_counter() - begin) * 1e3)
        processor.append((time.process_time() - used) * 1e3)
        begin = time.perf_counter()
        same = search(replan(text, repetition))
        anew.append((time.perf_counter() - begin) * 1e3)
        assert isinstance(choice, Choice) and isinstance(same, Choice)
        assert math.isclose(choice.step_seconds, same.step_seconds, rel_tol=max(TOLERANCE, choice.gap, same.gap))
        gaps.append(choice.gap)
        running = choice
    rows.append(
        {"question": "decision", "devices": parse_cluster(text).num_devices, "wall_ms": statistics.median(wall),
         "wall_ms_min": min(wall), "wall_ms_max": max(wall), "cpu_ms": statistics.median(processor),
         "no_current_ms": statistics.median(anew), "cold_ms": cold_ms(text), "gap": max(gaps)}
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


def cold_ms(text: str) -> float:
    """Milliseconds of the first `search` of a process, after the imports and without any cache."""
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})\n"
        "import planner\n"
        f"problem = planner.replan({text!r}, 0)\n"
        "begin = time.perf_counter()\n"
        "planner.search(problem)\n"
        "print((time.perf_counter() - begin) * 1e3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout)


def warm_ms(text: str, repetitions: int) -> float:
    """Median milliseconds of a `search` once its caches are filled, on the problem that SCIP gets too."""
    search(replan(text, 0))
    wall = []
    for _ in range(repetitions):
        problem = replan(text, 0)
        begin = time.perf_counter()
        search(problem)
        wall.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(wall)


def against_scip(sizes: tuple[int, ...], rows: list[dict[str, Any]]) -> dict[int, float]:
    """SCIP's solving time over that of a whole warm search; ends after the first size that SCIP does not."""
    try:
        import planner_scip
    except ImportError:
        rows.append({"question": "scip", "skipped": "pyscipopt is not installed"})
        return {}
    ratios: dict[int, float] = {}
    for size in sizes:
        text = f"{size // 8}x8xh200"
        problem = replan(text, 0)
        at_once = dataclasses.replace(problem.limits, turns_if_faster=False)  # SCIP's program takes no turns
        problem = dataclasses.replace(problem, limits=at_once)
        choice = search(problem)
        assert isinstance(choice, Choice)
        tables = {m: best_settings(problem.pricing.candidates(m, in_turn=False)) for m in problem.workflow.model_stages}
        answer = planner_scip.solve(
            problem.line, tables, syncs=problem.workflow.syncs, sync_price=problem.pricing.sync_price,
            limit_s=SCIP_LIMIT_S,
        )  # fmt: skip
        row = {
            "question": "scip", "devices": size, "warm_ms": warm_ms(text, 5), "cold_ms": cold_ms(text),
            "scip_s": answer.solve_s, "scip_build_s": answer.build_s, "scip_proved": answer.proved,
            "search_step_s": choice.step_seconds, "search_gap": choice.gap, "scip_step_s": answer.seconds,
            "scip_bound_s": answer.bound_s, "variables": answer.num_variables, "constraints": answer.num_constraints,
            "scip_version": planner_scip.VERSION,
        }  # fmt: skip
        rows.append(row | agreement(problem, choice, answer))
        if not answer.proved:
            break
        ratios[size] = answer.solve_s * 1e3 / row["warm_ms"]
    return ratios


def agreement(problem: PlanningProblem, choice: Choice, answer: "planner_scip.Answer") -> dict[str, Any]:
    """How far the two optima differ. Raises AssertionError where that contradicts what either claims to have proved.

    SCIP's plan is priced once more, device by device, by code that neither uses.
    """
    if answer.seconds is None:
        assert not answer.proved, "SCIP proved that nothing fits"
        return {"difference": None}
    priced = price(problem, answer.plan(problem.line))
    assert priced.feasible, f"SCIP's plan does not fit: {priced.excess_bytes} bytes too many"
    assert math.isclose(priced.step_seconds, answer.seconds, rel_tol=TOLERANCE), "SCIP's plan takes another time"
    difference = choice.step_seconds / answer.seconds - 1
    if answer.proved:
        assert -TOLERANCE <= difference, "the search found a faster plan than SCIP's optimum"
    lowest = choice.step_seconds * (1 - choice.gap)
    assert lowest <= answer.seconds * (1 + TOLERANCE), "SCIP found a faster plan than the search's bound"
    return {"difference": difference}


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
                f"{row['wall_ms']:.0f} ms wall, {row['cpu_ms']:.0f} ms processor, {row['cold_ms']:.0f} ms cold, "
                f"gap {row['gap']:.1%}",
            )  # fmt: skip
        elif "scip_s" in row:
            theirs = f"{row['scip_s']:.1f} s" if row["scip_proved"] else f"no proof in {row['scip_s']:.0f} s"
            differ = "" if row["difference"] is None else f", step {row['difference']:+.4%}"
            table.add_row("against SCIP", f"{row['devices']} devices",
                          f"{row['warm_ms']:.0f} ms ({row['cold_ms']:.0f} cold) against {theirs}{differ}")  # fmt: skip
    table.add_row("memory", "process", f"{metrics['rss_mb']:.0f} MB")
    console.print(table)


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv, scip="--scip" in sys.argv), indent=2))
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", file=sys.stderr)

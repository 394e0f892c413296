"""Do transitions of several model-stages that want each other's memory come through, and how fast?

Two model-stages change layout, size and devices at once on 8 devices, one process each, that hold only so much:

    sm_cs  one model in two stages      actor-generation, actor-training
    cm_ss  two models in one stage      actor-training, critic-training
    cm_cs  two models in two stages     actor-generation, critic-training

A trial draws both plans with their devices, the room on a device (1 to 2 times what the fullest one needs for either
plan) and when each model-stage reaches its boundary, before which nothing of it can be touched. Kept are the trials in
which, by our DAG, one model-stage's acquisition waits for the other's Destroy: the transitions overlap. Ours carries
out that DAG; the baseline (`nereus.baselines.independent`) lets each model-stage move itself. Both move bytes with the
same calls and check the same digests. A trial succeeds where every device ends with exactly the target's buffers, with
the right contents. The baseline fails when every chain that has not ended waits for memory (then none can ever go on;
it is not waited out) or at the time-out. `nereus bench coordination [--quick]`.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from coordination_workers import CappedMovers, LaunchedMovers

from nereus.baselines.independent import IndependentMigration, Outcome, buffer_bytes, local_chain
from nereus.cluster import ACCELERATORS, uniform_cluster
from nereus.errors import NereusError
from nereus.model import Head, ModelSpec
from nereus.moving.commands import BufferKey, StageKinds
from nereus.moving.executor import Execution
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Layout, ModelStage, Plan, StagePlan
from nereus.shards.moves import Holding
from nereus.shards.state import StateKind
from nereus.transition.dag import build_dag
from nereus.transition.operations import Infeasible, Operation, TransitionDag
from nereus.transition.price import DeviceTable, Rates, StageState

OVERLAPS = {
    "sm_cs": (ACTOR_GENERATION, ACTOR_TRAINING),
    "cm_ss": (ACTOR_TRAINING, CRITIC_TRAINING),
    "cm_cs": (ACTOR_GENERATION, CRITIC_TRAINING),
}
NUM_DEVICES = 8
MAX_DP = 4
LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4]
LAUNCH_SPREAD_S = 0.05
TIMEOUT_S = 20.0
"""Of a trial; the paper's. Chains take a hundredth of it."""
SEED = 0

ACTOR = ModelSpec("llama", 4, 64, 8, 4, 8, 176, 500)
TRAINED = tuple((kind, torch.float32) for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ))
KINDS = {
    ACTOR_GENERATION: StageKinds(ACTOR, TRAINED[:1]),
    ACTOR_TRAINING: StageKinds(ACTOR, TRAINED),
    CRITIC_TRAINING: StageKinds(ACTOR.with_head(Head.SCORE), TRAINED),
}
STATES = {model_stage: StageState(kinds.spec, kinds.element_bytes) for model_stage, kinds in KINDS.items()}
CLUSTER = uniform_cluster(num_nodes=1, devices_per_node=NUM_DEVICES, accelerator=ACCELERATORS["cpu"])

Row = dict[str, Any]
Use = collections.Counter[int]


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two plans, the room of a device, when each model-stage can begin, and our DAG between the plans."""

    dag: TransitionDag
    limit_bytes: int
    launch_s: Mapping[ModelStage, float]

    @property
    def current(self) -> Plan:
        return self.dag.current

    @property
    def target(self) -> Plan:
        return self.dag.target

    @property
    def crossing_edges(self) -> int:
        """Resource edges from one model-stage's Destroy to another's acquisition."""
        stage_of = [operation.model_stage for operation in self.dag.operations]
        return sum(stage_of[edge.before] != stage_of[edge.after] for edge in self.dag.resource_edges)


def draw_trials(overlap: str, count: int) -> Iterator[Trial]:
    """The first `count` trials of an overlap in which the two transitions want each other's memory."""
    draws = random.Random(f"{SEED} {overlap}")
    drawn = (draw(draws, OVERLAPS[overlap]) for _ in itertools.count())
    return itertools.islice((trial for trial in drawn if trial is not None and trial.crossing_edges), count)


def draw(draws: random.Random, model_stages: tuple[ModelStage, ModelStage]) -> Trial | None:
    """One trial; None where a model-stage does not move, or where no order of primitives fits."""
    current, target = (Plan.of({m: draw_stage_plan(draws) for m in model_stages}) for _ in range(2))
    launch_s = {m: draws.uniform(0, LAUNCH_SPREAD_S) for m in model_stages}
    limit_bytes = int(max(*used_by(current).values(), *used_by(target).values()) * draws.uniform(1, 2))
    if any(plan[model_stages[0]] == plan[model_stages[1]] for plan in (current, target)):
        return None
    table = DeviceTable.of(CLUSTER)
    table.limit_bytes[:] = limit_bytes
    dag = build_dag(current, target, states=STATES, table=table, rates=Rates.of(CLUSTER))
    if isinstance(dag, Infeasible) or {o.model_stage for o in dag.operations} != {*model_stages}:
        return None
    return Trial(dag, limit_bytes, launch_s)


def draw_stage_plan(draws: random.Random) -> StagePlan:
    layout = draws.choice(LAYOUTS)
    dp = draws.randint(1, min(NUM_DEVICES // layout.num_ranks, MAX_DP))
    return StagePlan.of(layout, draws.sample(range(NUM_DEVICES), dp * layout.num_ranks))


def buffers_of(plan: Plan) -> Iterator[tuple[int, BufferKey]]:
    """(device, what it holds) under a plan."""
    for model_stage, stage_plan in plan.stages:
        for device, rank in Holding.of(stage_plan).ranks:
            yield device, BufferKey(model_stage, stage_plan.layout, rank)


def used_by(plan: Plan) -> Use:
    """Bytes by device."""
    used: Use = collections.Counter()
    for device, key in buffers_of(plan):
        used[device] += buffer_bytes(KINDS[key.model_stage], key)
    return used


def some_timing_succeeds(trial: Trial) -> bool:
    """Whether independent chains can come through at all: some interleaving of whole operations fits in memory."""
    chains = [local_chain(m, trial.current[m], trial.target[m]) for m in trial.current.model_stages]
    seen: set[tuple[int, ...]] = set()
    states = [((0,) * len(chains), used_by(trial.current))]
    while states:
        done, used = states.pop()
        if done in seen:
            continue
        seen.add(done)
        if done == tuple(map(len, chains)):
            return True
        for place, chain in enumerate(chains):
            if done[place] < len(chain):
                taken, freed = memory_of(chain[done[place]])
                if all(used[device] + nbytes <= trial.limit_bytes for device, nbytes in taken.items()):
                    after = used.copy()
                    after.update(taken)
                    after.subtract(freed)
                    states.append((tuple(n + (i == place) for i, n in enumerate(done)), after))
    return False


def memory_of(operation: Operation) -> tuple[Use, Use]:
    """Bytes it takes and bytes it frees, by device."""
    stage, ranks = operation.model_stage, operation.source_ranks()
    taken = {d: BufferKey(stage, operation.target_layout, rank) for d, rank in operation.target_ranks().items()}
    freed = {d: BufferKey(stage, operation.source_layout, ranks[d]) for d in operation.releases}
    uses = ({d: buffer_bytes(KINDS[stage], key) for d, key in keys.items()} for keys in (taken, freed))
    first, second = (collections.Counter(use) for use in uses)
    return first, second


class Bench:
    """Worker processes, started once for all trials."""

    def __init__(self) -> None:
        self._movers = CappedMovers(NUM_DEVICES)

    def close(self) -> None:
        self._movers.close()

    def ours(self, trial: Trial) -> Outcome:
        """The global DAG through the executor."""
        self._place(trial)
        begun = time.monotonic()
        movers = LaunchedMovers(self._movers, trial.launch_s)
        try:
            Execution(trial.dag, movers, states=KINDS, epoch=1).run(lambda: None)
        except NereusError as error:
            print(f"our transition failed: {error}", file=sys.stderr)
            return Outcome(False, False, time.monotonic() - begun)
        seconds = time.monotonic() - begun
        return Outcome(self._is_whole(trial) and seconds <= TIMEOUT_S, False, seconds)

    def independent(self, trial: Trial) -> Outcome:
        """Each model-stage on its own."""
        self._place(trial)
        found = IndependentMigration(
            self._movers, trial.current, trial.target, states=KINDS, limit_bytes=trial.limit_bytes, epoch=1,
            launch_s=trial.launch_s, timeout_s=TIMEOUT_S,
        ).run()  # fmt: skip
        whole = found.succeeded and self._is_whole(trial)
        assert whole == found.succeeded, "the baseline ended with wrong state"
        return found

    def _place(self, trial: Trial) -> None:
        """Put every device into the state of the current plan."""
        self._movers.each("start_over", dict.fromkeys(range(NUM_DEVICES), (trial.limit_bytes,)))
        for model_stage, stage_plan in trial.current.stages:
            ranks = dict(Holding.of(stage_plan).ranks)
            arguments = {d: (0, model_stage, KINDS[model_stage], stage_plan.layout, r) for d, r in ranks.items()}
            self._movers.each("allocate", arguments)

    def _is_whole(self, trial: Trial) -> bool:
        wanted: dict[int, tuple[BufferKey, ...]] = dict.fromkeys(range(NUM_DEVICES), ())
        for device, key in buffers_of(trial.target):
            wanted[device] += (key,)
        return all(self._movers.each("holds_exactly", {d: (keys,) for d, keys in wanted.items()}).values())


def measure(bench: Bench, overlap: str, count: int) -> list[Row]:
    """One row a trial; which of the two goes first alternates."""
    rows: list[Row] = []
    for number, trial in enumerate(track(draw_trials(overlap, count), overlap, count, console=Console(stderr=True))):
        runs = [("ours", bench.ours), ("independent", bench.independent)]
        found = {name: run(trial) for name, run in (runs if number % 2 else reversed(runs))}
        rows.append(
            {
                "overlap": overlap,
                "trial": number,
                "current": str(trial.current),
                "target": str(trial.target),
                "limit_bytes": trial.limit_bytes,
                "launch_s": {m.name: seconds for m, seconds in trial.launch_s.items()},
                "mode": trial.dag.mode.value,
                "operations": len(trial.dag.operations),
                "resource_edges": len(trial.dag.resource_edges),
                "crossing_edges": trial.crossing_edges,
                "some_timing_succeeds": some_timing_succeeds(trial),
                **{name: dataclasses.asdict(outcome) for name, outcome in found.items()},
            }
        )
    return rows


def summary(rows: list[Row]) -> Row:
    """What the trials of one overlap came to; seconds are medians of successful trials.

    time_ratio_where_both: the median of ours over the baseline's, trial by trial, where both came through.
    """

    def median(name: str, among: list[Row]) -> float | None:
        seconds = [row[name]["seconds"] for row in among if row[name]["succeeded"]]
        return statistics.median(seconds) if seconds else None

    both = [row for row in rows if row["independent"]["succeeded"] and row["ours"]["succeeded"]]
    ratios = [row["ours"]["seconds"] / row["independent"]["seconds"] for row in both]
    possible = [row for row in rows if row["some_timing_succeeds"]]
    return {
        "trials": len(rows),
        "success_rate": statistics.fmean(row["ours"]["succeeded"] for row in rows),
        "baseline_success_rate": statistics.fmean(row["independent"]["succeeded"] for row in rows),
        "baseline_stuck_rate": statistics.fmean(row["independent"]["stuck"] for row in rows),
        "possible_trials": len(possible),
        "baseline_success_rate_where_possible": (
            statistics.fmean(row["independent"]["succeeded"] for row in possible) if possible else None
        ),
        "time_s": median("ours", rows),
        "baseline_time_s": median("independent", rows),
        "time_where_both_s": median("ours", both),
        "time_ratio_where_both": statistics.median(ratios) if ratios else None,
        "edges_added": statistics.fmean(row["resource_edges"] for row in rows),
        "crossing_edges": statistics.fmean(row["crossing_edges"] for row in rows),
    }


def run(quick: bool) -> Row:
    """Measure, print the table, and return `metrics`, `setup`, `rows` and `command`."""
    count = 4 if quick else 100
    bench = Bench()
    try:
        rows = {overlap: measure(bench, overlap, count) for overlap in OVERLAPS}
    finally:
        bench.close()
    found = {overlap: summary(of) for overlap, of in rows.items()}
    _print(found)
    metrics = {name: {overlap: of[name] for overlap, of in found.items()} for name in found["sm_cs"]}
    setup = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "python": platform.python_version(), "torch": torch.__version__, "devices": NUM_DEVICES,
        "parameters": ACTOR.num_params, "launch_spread_s": LAUNCH_SPREAD_S, "timeout_s": TIMEOUT_S, "seed": SEED,
        "room": "1 to 2 times what the fullest device needs for either plan", "trials": count,
    }  # fmt: skip
    command = "nereus bench coordination" + (" --quick" if quick else "")
    return {"metrics": metrics, "setup": setup, "rows": list(itertools.chain(*rows.values())), "command": command}


def _print(found: Mapping[str, Row]) -> None:
    title = "Transitions that want each other's memory: one global DAG, independent chains"
    caption = "of possible: trials that some timing of the chains ends; ratio: trial by trial, where both came through"
    table = Table(
        "overlap", "ours", "indep.", "of possible", "ours ms", "indep. ms", "ratio", "edges",
        title=title, caption=caption,
    )  # fmt: skip
    for overlap, row in found.items():
        rates = (row["success_rate"], row["baseline_success_rate"], row["baseline_success_rate_where_possible"])
        times, ratio = (row["time_s"], row["baseline_time_s"]), row["time_ratio_where_both"]
        table.add_row(
            overlap, *("-" if rate is None else f"{rate:.0%}" for rate in rates),
            *("-" if seconds is None else f"{1000 * seconds:.0f}" for seconds in times),
            "-" if ratio is None else f"{ratio:.2f}", f"{row['edges_added']:.1f}",
        )  # fmt: skip
    Console(stderr=True).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a form that ends within a minute")
    print(json.dumps(run(quick=parser.parse_args().quick), indent=2))

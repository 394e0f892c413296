"""Times of the engine on this machine against the planner's: two workers, each pinned to a core.

Every stage (generation, inference, training) runs under each plan that two workers admit and several batches; the
calibration sees some of the runs and predicts the others. Nothing goes over Ray: two processes, the project's groups,
one batch.
"""

import collections
import random
import statistics
from typing import Any

import numpy as np
from costmodel_workers import SPEC, Case, Workers

from nereus.cluster import ACCELERATORS, uniform_cluster
from nereus.engine_facts import FP32
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE, Layout, ModelStage, Recompute, StagePlan
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.cost import ON_DEVICE, CostModel, TaskCost, crowding
from nereus.planner.prices.operations import Bill
from nereus.planner.prices.passes import Span
from nereus.workflow import Kind, Task

SAMPLES = 8
CORES = 2

STAGES: dict[str, tuple[ModelStage, Task]] = {
    "generation": (ACTOR_GENERATION, Task("generate", ACTOR_GENERATION, Kind.GENERATE)),
    "inference": (REFERENCE_INFERENCE, Task("reference", REFERENCE_INFERENCE, Kind.LOGPROBS)),
    "training": (ACTOR_TRAINING, Task("actor_update", ACTOR_TRAINING, Kind.UPDATE)),
}

PLANS = (StagePlan.of(Layout(), (0,)),) + tuple(StagePlan.of(layout, (0, 1)) for layout in (
    Layout(), Layout(tp=2), Layout(pp=2),
))  # fmt: skip

LENGTHS = (*((tokens,) * SAMPLES for tokens in (32, 64, 96, 128, 192)), (16, 32, 48, 64, 96, 128, 160, 192))
MICRO_BATCHES = (2, 4)


def cases(quick: bool) -> list[Case]:
    """At least 24 plans and lengths for each stage; generation ends by length, so its lengths are equal."""
    result = []
    for stage in STAGES:
        for plan in PLANS:
            for lengths in LENGTHS[3:4] if quick else LENGTHS:
                if stage == "generation" and len(set(lengths)) > 1:
                    continue
                sizes = (4, SAMPLES) if stage == "generation" else MICRO_BATCHES
                result += [Case(stage, plan, lengths, size) for size in sizes]
    return result


def measure(runs: list[Case], *, repetitions: int) -> dict[Case, list[float]]:
    """Seconds of each case and repetition, on the slower of its ranks; repetitions go round a plan's cases in turn.

    One run of each stage warms up a plan and is not counted.
    """
    seconds: dict[Case, list[float]] = collections.defaultdict(list)
    with Workers(2) as workers:
        for plan in PLANS:
            own = [case for case in runs if case.plan == plan]
            workers.join(next(case for case in own if case.stage == "training"))
            for case in {case.stage: case for case in own}.values():
                workers.seconds(case)
            for _ in range(repetitions):
                for case in own:
                    seconds[case].append(workers.seconds(case))
    return seconds


def predicted(case: Case, calibration: Calibration) -> TaskCost:
    """The planner's price of a case."""
    cluster = uniform_cluster(num_nodes=1, devices_per_node=2, accelerator=ACCELERATORS["cpu"], cores_per_node=CORES)
    model_stage, task = STAGES[case.stage]
    return CostModel(cluster, calibration).stage_seconds(
        model_stage, SPEC, case.plan.layout, dp=case.plan.dp, workload=case.workload, micro_batch=case.micro_batch,
        recompute=Recompute.NONE, precision=FP32, tasks=(task,), accelerator="cpu", span=Span(),
        active_workers_on_node=len(case.plan.devices),
    ).tasks[task.name]  # fmt: skip


def slowed(cost: TaskCost, case: Case) -> Bill:
    """The work of a case, as much larger as the workers that compute at once slow each other down."""
    counts = cost.work.counts + cost.bubble.counts
    return Bill(np.where(ON_DEVICE, counts * crowding(np.array(len(case.plan.devices)), CORES), counts))


def compare(seconds: dict[Case, list[float]], *, seed: int = 0, passes: int = 3) -> dict[str, Any]:
    """Per stage: calibrate on every third case, predict the others; the noise is the spread of repetitions."""
    result: dict[str, Any] = {"mape": {}, "noise": {}, "cases": {}, "rows": []}
    for stage in STAGES:
        own = [case for case in seconds if case.stage == stage]
        chosen = set(random.Random(seed).sample(range(len(own)), max(1, len(own) // 3)))
        calibration = Calibration(forgetting=1.0)
        for index in sorted(chosen) * passes:
            cost, median = predicted(own[index], calibration), statistics.median(seconds[own[index]])
            calibration.observe_total(slowed(cost, own[index]), median, accelerator="cpu")
        errors = []
        for index, case in enumerate(own):
            median = statistics.median(seconds[case])
            price = predicted(case, calibration).seconds
            if index not in chosen:
                errors.append(abs(price / median - 1))
            result["rows"].append(
                {"case": str(case), "measured_s": median, "predicted_s": price, "calibrated_on": index in chosen}
            )
        result["mape"][stage] = statistics.fmean(errors)
        result["cases"][stage] = len(errors)
        spreads = [(max(times) - min(times)) / statistics.median(times) for times in map(seconds.__getitem__, own)]
        result["noise"][stage] = statistics.median(spreads)
    return result

"""Bytes that the engine really holds on this machine against the memory model's, rank by rank.

State is what lies in the worker's shared segments (and the flat gradients); the peak of a run is read from the heap's
counters. Stages run as in `costmodel_machine`: real processes with the project's groups, one to four ranks.
"""

import dataclasses
from typing import Any

from costmodel_machine import STAGES
from costmodel_workers import SPEC, Case, Workers

from nereus.engine_facts import FP32
from nereus.plan import Layout, Recompute, StagePlan
from nereus.planner.prices.footprints import StageMemory, stage_memory

LARGE = dataclasses.replace(SPEC, vocab=16384)
UNEVEN = dataclasses.replace(SPEC, num_layers=5)
NONE, _, FULL = Recompute

ALIKE, RANGE, SPREAD = (300,) * 8, (230, 250, 270, 290, 310, 330, 350, 370), (100, 150, 200, 250, 300, 400, 450, 550)
RUNS = 2
"""The highest of so many peaks counts: readings can miss the moment."""


def _plan(tp: int = 1, pp: int = 1) -> StagePlan:
    return StagePlan.of(Layout(tp, pp), tuple(range(tp * pp)))


def cases(quick: bool) -> list[Case]:
    """Every recomputation under every layout of up to four ranks, and forward-only stages under those of two."""
    if quick:
        return [Case("training", _plan(pp=2), RANGE, 2), Case("inference", _plan(), RANGE, 4)]
    one, tp2, pp2, both = _plan(), _plan(tp=2), _plan(pp=2), _plan(2, 2)
    training = [(plan, how, SPEC) for plan in (one, tp2, pp2) for how in Recompute]
    training += [(one, how, LARGE) for how in (NONE, FULL)] + [(pp2, how, UNEVEN) for how in (NONE, FULL)]
    training += [(both, NONE, SPEC)]
    found = [Case("training", plan, RANGE, 2, spec, how) for plan, how, spec in training]
    found += [Case("training", one, ALIKE, 4), Case("training", one, SPREAD, 4), Case("training", pp2, SPREAD, 1)]
    found += [Case("inference", plan, RANGE, 4, spec) for plan, spec in ((one, LARGE), (tp2, LARGE), (pp2, SPEC))]
    found += [Case("generation", plan, (224,) * 8, 8, SPEC) for plan in (one, tp2, pp2)]
    return sorted(found, key=lambda case: repr(case.place))


def measure(chosen: list[Case]) -> list[dict[str, Any]]:
    """A row a case: state and peak of its fullest rank, measured and predicted, and the error on every rank."""
    rows: list[dict[str, Any]] = []
    place = None
    with Workers(max(len(case.plan.devices) for case in chosen)) as workers:
        for case in chosen:
            if case.place != place:
                state, place = workers.join(case), case.place
                workers.peaks(dataclasses.replace(case, lengths=(8,) * 8))  # what is allocated once
            runs = [workers.peaks(case) for _ in range(RUNS)]
            peak = {device: max(run[device] for run in runs) for device in case.plan.devices}
            rows.append(compared(case, state, peak))
    return rows


def compared(case: Case, state: dict[int, int], peak: dict[int, int]) -> dict[str, Any]:
    """A case's bytes by device beside the model's; state and peak are those of the ranks where each is fullest."""
    predicted = {device: _predicted(case, device) for device in case.plan.devices}
    working = {device: parts.active_bytes - parts.idle_bytes for device, parts in predicted.items()}
    working = {device: size - predicted[device].active["sync_buffers"] for device, size in working.items()}
    fullest = max(case.plan.devices, key=lambda device: state[device] + peak[device])
    expected = max(case.plan.devices, key=lambda device: predicted[device].idle_bytes + working[device])
    return {
        "case": _label(case),
        "stage": case.stage,
        "ranks": len(state),
        "state_bytes": max(state.values()),
        "predicted_state_bytes": max(parts.idle_bytes for parts in predicted.values()),
        "peak_bytes": peak[fullest],
        "predicted_peak_bytes": working[expected],
        "error": working[expected] / peak[fullest] - 1,
        "errors_by_rank": [working[device] / peak[device] - 1 for device in case.plan.devices],
    }


def _label(case: Case) -> str:
    shape = f"{case.spec.num_layers} layers, vocabulary {case.spec.vocab}"
    batch = f"{len(case.lengths)} x {min(case.lengths)}-{max(case.lengths)} tokens by {case.micro_batch}"
    return f"{case.stage} {case.plan.shape}, {shape}, {batch}, recompute {case.recompute}"


def _predicted(case: Case, device: int) -> StageMemory:
    position = case.plan.position(device)
    assert position is not None
    return stage_memory(
        STAGES[case.stage][0], case.spec, case.plan.layout, pp_rank=case.plan.layout.pp_rank(position[1]),
        dp=case.plan.dp, workload=case.workload, micro_batch=case.micro_batch, recompute=case.recompute, precision=FP32,
    )  # fmt: skip

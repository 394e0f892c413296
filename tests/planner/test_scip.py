"""The mixed-integer program of the benchmark against enumeration: a baseline must solve the same problem."""

import dataclasses
import math

import enumeration
import pytest
from instances import random_problem, random_tables

from nereus.planner.candidates import best_settings
from nereus.planner.combine import Placement
from nereus.planner.evaluate import price
from nereus.planner.search import Choice, search

pytest.importorskip("pyscipopt")
planner_scip = pytest.importorskip("planner_scip")


def instances(seeds):
    """Random tables whose cluster has equal nodes."""
    for seed in seeds:
        cluster, line, tables, syncs, sync_price, _ = random_tables(seed)
        if len(line.runs) == 1 and len(set(line.node_sizes)) == 1:
            yield seed, cluster, line, tables, syncs, sync_price


def solve(line, tables, syncs, sync_price):
    return planner_scip.solve(line, tables, syncs=syncs, sync_price=sync_price, limit_s=60.0)


def test_scip_finds_the_optimum_of_arbitrary_tables():
    infeasible = tried = 0
    for seed, cluster, line, tables, syncs, sync_price in instances(range(40)):
        best, _ = enumeration.optimum(
            cluster, tables, syncs=syncs, sync_price=sync_price.matrix, placement="free",
            capacity={device.id: line.capacity_at(place) for place, device in enumerate(line.devices)},
        )  # fmt: skip
        answer = solve(line, {m: best_settings(table) for m, table in tables.items()}, syncs, sync_price)
        assert answer.proved, seed
        seconds = math.inf if answer.seconds is None else answer.seconds
        assert seconds == best or math.isclose(seconds, best, rel_tol=1e-6), seed
        infeasible += best == math.inf
        tried += 1
    assert tried > 15 and 0 < infeasible < tried


@pytest.mark.parametrize("seed", [3, 4, 14, 18, 34, 43, 50])
def test_scip_and_search_agree_on_whole_problems(seed):
    problem = random_problem(seed)
    problem = dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, placement=Placement.FREE))
    choice = search(problem)
    pricing = problem.pricing
    tables = {m: best_settings(pricing.candidates(m, in_turn=False)) for m in problem.workflow.model_stages}
    answer = solve(problem.line, tables, problem.workflow.syncs, pricing.sync_price)
    assert answer.proved
    if isinstance(choice, Choice) and choice.placement is Placement.FREE:
        assert answer.seconds == pytest.approx(choice.step_seconds, rel=1e-6)
        settings = {m: (c.micro_batch, c.recompute) for m, (c, _) in answer.chosen.items()}
        priced = price(problem, answer.plan(problem.line), settings)
        assert priced.feasible
        assert priced.step_seconds == pytest.approx(answer.seconds, rel=1e-6)
    else:
        assert answer.seconds is None


def test_a_row_that_another_replaces_everywhere_is_left_out_and_changes_no_optimum():
    dropped = 0
    for seed, _, line, tables, syncs, sync_price in instances(range(20)):
        kept = {
            m: table.take(~planner_scip.dominated(line, tables, m, syncs, sync_price)) for m, table in tables.items()
        }
        dropped += sum(map(len, tables.values())) - sum(map(len, kept.values()))
        assert all(len(table) for table in kept.values()), seed
    assert dropped > 0


def test_a_block_starts_where_no_device_is_wasted():
    _, line, *_ = random_tables(
        next(seed for seed, _, line, *_ in instances(range(40)) if line.node_sizes[:2] == [4, 4])
    )
    across = next(i for i, region in enumerate(line.regions) if not region.one_node)
    inside = next(i for i, region in enumerate(line.regions) if region.one_node)
    assert planner_scip.offsets(line, (2, 1, inside)) == {0: 2, 1: 2, 2: 2}
    assert set(planner_scip.offsets(line, (2, 3, across))) == {0, 2}, "from 1 a device would stay idle"

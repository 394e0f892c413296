"""The mixed-integer program of the benchmark against enumeration: a baseline must solve the same problem."""

import dataclasses
import math

import enumeration
import numpy as np
import planner as planner_benchmark
import pytest
from instances import random_problem, random_tables

from nereus.cluster import ACCELERATORS, uniform_cluster
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, Layout, Recompute
from nereus.planner.evaluate import price
from nereus.planner.placement import Placement
from nereus.planner.search.optimum import Choice, search
from nereus.planner.space.candidates import Candidate, Candidates, best_settings
from nereus.planner.space.line import Line

pytest.importorskip("pyscipopt")
import planner_scip  # noqa: E402


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


def solve_whole(seed):
    """(problem, what the search finds, what SCIP finds)"""
    problem = random_problem(seed)
    problem = dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, placement=Placement.FREE))
    pricing = problem.pricing
    tables = {m: best_settings(pricing.candidates(m, in_turn=False)) for m in problem.workflow.model_stages}
    return problem, search(problem), solve(problem.line, tables, problem.workflow.syncs, pricing.sync_price)


@pytest.mark.parametrize("seed", [3, 4, 14, 18, 34, 43, 50])
def test_scip_and_search_agree_on_whole_problems(seed):
    problem, choice, answer = solve_whole(seed)
    assert answer.proved
    if isinstance(choice, Choice) and choice.placement is Placement.FREE:
        assert answer.seconds == pytest.approx(choice.step_seconds, rel=1e-6)
        priced = price(problem, answer.plan(problem.line))
        assert priced.feasible
        assert priced.step_seconds == pytest.approx(answer.seconds, rel=1e-6)
    else:
        assert answer.seconds is None


def test_the_comparison_refuses_optima_that_contradict_each_other():
    problem, choice, answer = solve_whole(18)
    assert planner_benchmark.agreement(problem, choice, answer)["difference"] == pytest.approx(0, abs=1e-6)
    for factor, claim in ((0.99, "faster plan than SCIP's optimum"), (1.01, "faster plan than the search's bound")):
        other = dataclasses.replace(choice, wave_seconds=tuple(factor * s for s in choice.wave_seconds))
        with pytest.raises(AssertionError, match=claim):
            planner_benchmark.agreement(problem, other, answer)
    with pytest.raises(AssertionError, match="nothing fits"):
        planner_benchmark.agreement(problem, choice, dataclasses.replace(answer, seconds=None))
    with pytest.raises(AssertionError, match="takes another time"):
        planner_benchmark.agreement(problem, choice, dataclasses.replace(answer, seconds=1.01 * answer.seconds))


class PriceByTarget:
    """A second for each device of a target's tensor-parallel group."""

    def matrix(self, source, sources, targets):
        return np.ones((len(sources), 1)) * targets.tp


def row(tp, dp, waves, *, memory=10):
    return Candidate(Layout(tp, 1), dp, 1, Recompute.NONE, waves, memory, memory, memory, memory, tp)


@pytest.mark.parametrize(("saving", "needless"), [(0.5, False), (1.5, True)])
def test_a_row_is_left_out_only_where_what_replaces_it_makes_up_for_its_synchronization(saving, needless):
    """The second row synchronizes a second longer, in a wave that only it runs in."""
    line = Line(uniform_cluster(num_nodes=1, devices_per_node=4, accelerator=ACCELERATORS["h100"]))
    tables = {
        ACTOR_GENERATION: Candidates.of(
            ACTOR_GENERATION, [row(1, 4, (5.0, 0.0)), row(2, 2, (5.0 - saving, 0.0))], num_waves=2
        ),
        ACTOR_TRAINING: Candidates.of(ACTOR_TRAINING, [row(1, 2, (0.0, 1.0)), row(2, 1, (0.0, 0.5))], num_waves=2),
    }
    syncs = [(ACTOR_TRAINING, ACTOR_GENERATION)]
    found = planner_scip.dominated(line, tables, ACTOR_GENERATION, syncs, PriceByTarget())
    assert found.tolist() == [False, False], "groups of two do not fit wherever single devices do"
    tables[ACTOR_GENERATION] = dataclasses.replace(
        tables[ACTOR_GENERATION], grain=np.array([2, 2]), tp=np.array([1, 2]), pp=np.array([2, 1]), dp=np.array([2, 2])
    )
    found = planner_scip.dominated(line, tables, ACTOR_GENERATION, syncs, PriceByTarget())
    assert found.tolist() == [needless, False]
    found = planner_scip.dominated(line, tables, ACTOR_TRAINING, syncs, PriceByTarget())
    assert not found.any(), "generation may use the parameters of either"


def test_a_block_starts_where_no_device_is_wasted():
    _, line, *_ = random_tables(
        next(seed for seed, _, line, *_ in instances(range(40)) if line.node_sizes[:2] == [4, 4])
    )
    across = next(i for i, region in enumerate(line.regions) if not region.one_node)
    inside = next(i for i, region in enumerate(line.regions) if region.one_node)
    assert planner_scip.offsets(line, (2, 1, inside)) == {0: 2, 1: 2, 2: 2}
    assert set(planner_scip.offsets(line, (2, 3, across))) == {0, 2}, "from 1 a device would stay idle"

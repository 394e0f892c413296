"""The search against enumeration that shares none of its code, and against the price of its own answers."""

import math
import subprocess
import sys

import enumeration
import numpy as np
import pytest
from instances import random_problem, random_tables

from nereus.plan import ACTOR_TRAINING, CRITIC_INFERENCE, REFERENCE_INFERENCE
from nereus.planner.evaluate import price
from nereus.planner.prices.syncs import Options
from nereus.planner.search.bounds import Bounds
from nereus.planner.search.branch_and_bound import Combiner
from nereus.planner.search.optimum import Choice, optimum, search
from nereus.planner.search.refusal import Refusal
from nereus.planner.space.candidates import Candidates


def capacities(line):
    return {device.id: line.capacity_at(place) for place, device in enumerate(line.devices)}


def combine_and_enumerate(seed, *, overlapped=False):
    cluster, line, tables, syncs, sync_price, placement = random_tables(seed)
    rule = dict(placement=placement, overlapped=overlapped and placement != "colocated")
    found = Combiner(line, tables, syncs=syncs, sync_price=sync_price, **rule).solve()
    best, _ = enumeration.optimum(
        cluster, tables, syncs=syncs, sync_price=sync_price.matrix, capacity=capacities(line), **rule
    )
    return (found.step_seconds if found else math.inf), best


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_optimum_of_arbitrary_tables_is_found(first):
    for seed in range(first, first + 10):
        found, best = combine_and_enumerate(seed)
        assert found == best or math.isclose(found, best, rel_tol=1e-9), seed


@pytest.mark.parametrize("first", range(40, 80, 10))
def test_the_optimum_is_found_where_generation_overlaps_the_rest(first):
    for seed in range(first, first + 10):
        found, best = combine_and_enumerate(seed, overlapped=True)
        assert found == best or math.isclose(found, best, rel_tol=1e-9), seed


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_the_optimum_of_many_more_tables_is_found(first, overlapped):
    for seed in range(first, first + 50):
        found, best = combine_and_enumerate(seed, overlapped=overlapped)
        assert found == best or math.isclose(found, best, rel_tol=1e-9), seed


@pytest.mark.parametrize("seed", [1029, 1033])
def test_blocks_that_fit_only_behind_a_gap_and_on_slower_devices_are_found(seed):
    found, best = combine_and_enumerate(seed)
    assert best < math.inf
    assert math.isclose(found, best, rel_tol=1e-9)


def enumerated(problem, placement):
    """The optimum of a whole problem: every candidate the pricing makes, unpruned, thinned only at random."""
    in_turn = placement == "colocated"
    pricing = problem.pricing
    tables = {m: pricing.candidates(m, in_turn=in_turn) for m in problem.workflow.model_stages}
    rng = np.random.default_rng(0)
    kept = {}
    for m, table in tables.items():
        rows = rng.permutation(len(table))[: 14 if len(tables) < 4 else 4]
        kept[m] = table.take(np.sort(rows))
    best, _ = enumeration.optimum(
        problem.cluster, kept, syncs=problem.workflow.syncs, sync_price=pricing.sync_price.matrix,
        capacity=capacities(problem.line), placement=placement,
    )  # fmt: skip
    return best, kept


def test_no_plan_of_a_whole_problem_undercuts_the_choice():
    for seed in range(16):
        problem = random_problem(seed)
        placement = problem.limits.placement
        best, kept = enumerated(problem, placement)
        found, _ = optimum(problem, placement)
        seconds = found.step_seconds if found else math.inf
        assert seconds <= best * (1 + 1e-9), seed
        on_kept = Combiner(
            problem.line, kept, syncs=problem.workflow.syncs, sync_price=problem.pricing.sync_price,
            placement=placement,
        ).solve()  # fmt: skip
        assert math.isclose(on_kept.step_seconds if on_kept else math.inf, best, rel_tol=1e-9), seed


def test_a_choice_costs_what_its_plan_costs_and_fits():
    chosen = 0
    for seed in range(40):
        problem = random_problem(seed)
        choice = search(problem)
        if not isinstance(choice, Choice):
            continue
        chosen += 1
        assert choice.plan.is_complete
        priced = price(problem, choice.plan, in_turn=choice.placement == "colocated")
        assert priced.feasible, seed
        assert priced.step_seconds <= choice.step_seconds * (1 + 1e-9), seed
        if len(problem.cluster.nodes) == 1:
            assert math.isclose(priced.step_seconds, choice.step_seconds, rel_tol=1e-9), seed
    assert chosen > 20


def test_concurrent_model_stages_take_disjoint_contiguous_blocks():
    for seed in range(40):
        problem = random_problem(seed)
        choice = search(problem)
        if not isinstance(choice, Choice) or choice.placement == "colocated":
            continue
        for m, stage_plan in choice.plan.stages:
            devices = stage_plan.devices
            assert list(devices) == list(range(devices[0], devices[0] + len(devices)))
            for other, other_plan in choice.plan.stages:
                if other != m and other.stage is m.stage:
                    assert not set(devices) & set(other_plan.devices)


def test_the_choice_stays_where_the_current_plan_is():
    for seed in range(15):
        problem = random_problem(seed)
        choice = search(problem)
        if isinstance(choice, Choice):
            assert search(problem, current=choice.plan).plan == choice.plan


def test_what_a_budget_leaves_open_bounds_what_is_missed():
    for seed in range(40):
        _, line, tables, syncs, sync_price, placement = random_tables(seed)
        arguments = dict(syncs=syncs, sync_price=sync_price, placement=placement)
        exact = Combiner(line, tables, **arguments).solve()
        hasty = Combiner(line, tables, budget=3, **arguments)
        found = hasty.solve()
        assert (found is None) == (exact is None)
        if found and exact:
            assert min(found.step_seconds, hasty.open_s) <= exact.step_seconds * (1 + 1e-9)


def test_an_empty_table_has_no_combination():
    _, line, tables, syncs, sync_price, placement = random_tables(3)
    name = next(iter(tables))
    tables[name] = Candidates.of(name, [], num_waves=3)
    assert Combiner(line, tables, syncs=syncs, sync_price=sync_price, placement=placement).solve() is None


def test_a_refusal_is_a_value_with_a_limit():
    refusals = [found for found in (search(random_problem(seed)) for seed in range(40)) if isinstance(found, Refusal)]
    assert refusals
    assert {refusal.limit for refusal in refusals} <= {"layout", "devices", "memory"}


def test_planning_imports_no_torch_and_stays_small():
    code = (
        "import re, sys\n"
        "from nereus.planner.api import plan\n"
        "result = plan('llama-3.1-8b', '128x8xh200', batch=256, response=2048)\n"
        "assert result.feasible and 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 * 1024


def test_the_worked_example_of_the_bounds_is_what_they_say():
    def options(*rows, wave=1):
        seconds = np.zeros((len(rows), 3))
        seconds[:, wave] = [taken for _, taken in rows]
        return Options(np.array([devices for devices, _ in rows]), seconds)

    crosser = options((4, 3.0))
    crosser.seconds[:, 2] = 5.0
    bounds = Bounds(
        {
            ACTOR_TRAINING: crosser,
            REFERENCE_INFERENCE: options((6, 2.0), (2, 4.0)),
            CRITIC_INFERENCE: options((8, 2.0), (4, 4.0), (2, 8.0)),
        },
        num_devices=8,
        in_turn=False,
    )
    assert bounds.completions(ACTOR_TRAINING, {}, np.zeros(3))[0].tolist() == [0.0, 5.0, 5.0]
    assert bounds.shared_floor({ACTOR_TRAINING: 0}) == 7.0

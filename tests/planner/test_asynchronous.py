"""Steps in which generation of the next batch runs beside the rest: the longer side counts, and it never costs time."""

import dataclasses
import math

from instances import random_problem

from nereus.plan import ACTOR_GENERATION
from nereus.planner.api import plan, price_choice, problem_for
from nereus.planner.evaluate import generates_apart, price
from nereus.planner.search.optimum import Choice, search


def asynchronous(problem):
    return dataclasses.replace(problem, workflow=dataclasses.replace(problem.workflow, max_staleness=1))


def test_it_is_never_slower_than_one_after_the_other_and_costs_what_its_plan_costs():
    overlapped = 0
    for seed in range(60):
        problem = asynchronous(random_problem(seed))
        choice, in_turn = search(problem), search(random_problem(seed))
        assert isinstance(choice, Choice) == isinstance(in_turn, Choice), seed
        if isinstance(choice, Choice) and isinstance(in_turn, Choice):
            overlapped += choice.overlapped
            assert choice.step_seconds <= in_turn.step_seconds * (1 + 1e-9), seed
            assert math.isclose(price_choice(problem, choice).step_seconds, choice.step_seconds, rel_tol=1e-9), seed
    assert overlapped > 10


def test_generation_has_its_own_devices_and_the_longer_side_counts():
    result = plan("llama-3.1-8b", "8x8xh200", batch=256, prompt=1024, response=4096, max_staleness=1)
    assert result.choice.overlapped and generates_apart(result.plan)
    generation, *rest = result.choice.wave_seconds
    moved = sum(result.choice.sync_seconds.values())
    assert math.isclose(result.choice.step_seconds, max(generation, sum(rest)) + moved, rel_tol=1e-12)
    assert moved > 0, "generation cannot use the trainer's parameters in place"


def test_a_plan_that_shares_the_generating_devices_takes_turns():
    problem = problem_for("llama-3.2-1b", "1x4xh100", algorithm="grpo", batch=64, max_staleness=1)
    choice = search(problem)
    shared = search(problem_for("llama-3.2-1b", "1x4xh100", algorithm="grpo", batch=64))
    assert ACTOR_GENERATION in shared.plan and not generates_apart(shared.plan)
    priced = price(problem, shared.plan)
    assert not priced.overlapped
    assert math.isclose(priced.step_seconds, shared.step_seconds, rel_tol=1e-9)
    assert choice.step_seconds <= shared.step_seconds


def test_one_device_takes_turns_whatever_staleness_is_allowed():
    result = plan("llama-3.2-1b", "1x1xh200", algorithm="grpo", batch=8, max_staleness=3)
    assert result.feasible and not result.choice.overlapped

"""The columns that price all candidates against plain formulas for one, and dominance among settings."""

import dataclasses
import math
import random

import numpy as np
import plain_cost
import plain_memory
import pytest
from instances import random_problem, tiny_spec

from nereus.cluster import ACCELERATORS, Cluster, Device, Link, parse_cluster, uniform_cluster
from nereus.known_models import load_spec
from nereus.plan import ACTOR_TRAINING, REFERENCE_INFERENCE, Layout, Recompute, Stage
from nereus.planner.api import problem_for
from nereus.planner.evaluate import price
from nereus.planner.prices.footprints import setting_memories, stage_memory
from nereus.planner.prices.passes import Span
from nereus.planner.search.optimum import Choice, search
from nereus.planner.space.candidates import RECOMPUTES, Candidate, Candidates, best_settings, packed
from nereus.planner.space.layouts import Space
from nereus.planner.space.line import Line
from nereus.planner.space.regions import spans_nodes, stricter, type_of
from nereus.planner.workload import Lengths

LENGTHS = Lengths(tuple(float(100 + 60 * i) for i in range(40)))


def span_of(line, candidate):
    if line.regions[candidate.region].one_node:
        return Span()
    whole_units = candidate.layout.pp > 1 and candidate.grain == candidate.layout.num_ranks
    inter = Link.INTER_NODE
    return Span(dp_link=inter) if whole_units else Span(pp_link=inter, dp_link=inter)


def check_rows(problem, count, seed=0):
    """Compare some rows of every table, and the same settings priced one by one, with the plain formulas."""
    rng = random.Random(seed)
    for m in problem.workflow.model_stages:
        table = problem.pricing.candidates(m, in_turn=True)
        assert len(table)
        for row in rng.choices(range(len(table)), k=count):
            candidate = table[row]
            setting = dict(
                dp=candidate.dp, workload=problem.workload, micro_batch=candidate.micro_batch,
                recompute=candidate.recompute, precision=problem.precision,
            )  # fmt: skip
            spec, layout = problem.specs[m.role], candidate.layout
            where = dict(
                tasks=problem.workflow.tasks, span=span_of(problem.line, candidate),
                accelerator=problem.line.regions[candidate.region].accelerator,
                active_workers_on_node=min(candidate.num_devices, problem.line.max_node),
            )  # fmt: skip
            cost = plain_cost.stage_seconds(problem.cost, m, spec, layout, **where, **setting)
            assert math.isclose(sum(candidate.wave_seconds), cost.seconds, rel_tol=1e-9), (m, candidate)
            check_bills(problem.cost.stage_seconds(m, spec, layout, **where, **setting), cost)
            memory = plain_memory.stage_memory(m, spec, layout, **setting)
            check_parts(stage_memory(m, spec, layout, **setting), memory)
            # sums of parts, each cut to whole bytes
            assert abs(memory.active_bytes - candidate.active_bytes) <= 8, (m, candidate)
            assert abs(memory.idle_bytes - candidate.idle_bytes) <= 8, (m, candidate)
            if m is not ACTOR_TRAINING and m.stage != "training":
                shared = plain_memory.stage_memory(m, spec, layout, shares_weights=True, **setting)
                check_parts(stage_memory(m, spec, layout, shares_weights=True, **setting), shared)
                assert abs(shared.active_bytes - candidate.shared_active_bytes) <= 8
                assert shared.idle_bytes == candidate.shared_idle_bytes


@pytest.mark.parametrize("seed", range(6))
def test_the_memory_of_many_settings_at_once_is_that_of_each_alone(seed):
    problem = random_problem(seed)
    for m in problem.workflow.model_stages:
        spec, recomputes = problem.specs[m.role], RECOMPUTES if m.stage is Stage.TRAINING else (Recompute.NONE,)
        tried = tuple(
            (size, recompute) for recompute in recomputes for size in (1, 2, 3, 8, problem.workload.num_samples)
        )
        for tp, pp in problem.limits.space.layouts(spec, problem.line):
            for shares in (False, True):
                where = dict(dp=2, workload=problem.workload, precision=problem.precision, shares_weights=shares)
                at_once = setting_memories(m, spec, Layout(tp, pp), tried, **where)
                assert at_once == tuple(
                    stage_memory(m, spec, Layout(tp, pp), micro_batch=size, recompute=recompute, **where)
                    for size, recompute in tried
                )


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 9, 10, 11])
def test_a_plan_without_settings_has_the_price_of_the_plan_that_says_those_chosen(seed):
    problem = random_problem(seed)
    choice = search(problem)
    assert isinstance(choice, Choice)
    found = price(problem, choice.plan.placed)
    again = price(problem, found.plan)
    assert again.plan == found.plan and again.device_bytes == found.device_bytes
    assert again.step_seconds == found.step_seconds and again.sync_seconds == found.sync_seconds
    for m, priced in found.stages.items():
        assert again.stages[m].memory == priced.memory
        assert again.stages[m].cost.per_task == priced.cost.per_task
        check_bills(again.stages[m].cost, priced.cost)


def check_bills(found, expected):
    """The operations of every task, not only their seconds: calibration learns from them."""
    assert found.tasks.keys() == expected.tasks.keys()
    for name, task in expected.tasks.items():
        for part in ("work", "bubble"):
            counts, plain = getattr(found.tasks[name], part).counts, getattr(task, part).counts
            np.testing.assert_allclose(counts, plain, rtol=1e-9, atol=1e-9, err_msg=f"{part} of {name}")


def check_parts(found, expected):
    for ours, plain in ((found.active, expected.active), (found.idle, expected.idle)):
        assert ours.keys() == plain.keys()
        assert all(abs(ours[part] - size) <= 2 for part, size in plain.items()), (ours, plain)


def test_tables_equal_the_models_on_a_large_cluster():
    problem = problem_for(
        "llama-3.1-8b", "8x8xh200", algorithm="ppo", batch=96, prompt=700, response=LENGTHS, mini_batches=4,
        reward="llama-3.2-1b",
    )  # fmt: skip
    check_rows(problem, 40)


def test_tables_equal_the_models_with_heads_that_are_no_power_of_two():
    problem = problem_for("qwen2.5-7b", "3x7xa100", algorithm="ppo", batch=50, prompt=100, response=LENGTHS, n=2)
    check_rows(problem, 40)


def test_tables_equal_the_models_where_sequences_may_outgrow_those_counted():
    problem = problem_for("qwen2.5-7b", "2x8xa100", algorithm="grpo", batch=16, prompt=100, response=LENGTHS, n=4)
    workload = dataclasses.replace(problem.workload, max_tokens=9000)
    check_rows(dataclasses.replace(problem, workload=workload), 40)


def test_tables_equal_the_models_on_processor_workers_that_share_cores():
    cluster = uniform_cluster(num_nodes=1, devices_per_node=8, accelerator=ACCELERATORS["cpu"], cores_per_node=2)
    problem = problem_for(
        tiny_spec(), cluster, algorithm="grpo", batch=8, prompt=20, response=30, n=4, dtype="float32",
        placement="colocated",
    )  # fmt: skip
    check_rows(problem, 40)


def test_synchronization_tables_equal_the_cost_model():
    problem = problem_for("llama-3.2-3b", "2x8xh100", algorithm="grpo", batch=64, prompt=100, response=500)
    (source, target), *_ = problem.workflow.syncs
    sources, targets = (problem.pricing.candidates(m, in_turn=False) for m in (source, target))
    prices = problem.pricing.sync_price.matrix(source, sources, targets)
    for row in range(0, len(sources), max(1, len(sources) // 5)):
        at, seconds = sources[row], prices[row]
        for i in range(0, len(targets), max(1, len(targets) // 7)):
            expected = plain_cost.sync_seconds(
                problem.cost, problem.specs[source.role], (at.layout, at.dp), (targets[i].layout, targets[i].dp),
                same_node=False, precision=problem.precision,
            )  # fmt: skip
            assert math.isclose(seconds[i], expected, rel_tol=1e-9)
            one = problem.cost.sync_seconds(
                problem.specs[source.role], (at.layout, at.dp), (targets[i].layout, targets[i].dp),
                same_node=False, precision=problem.precision,
            )  # fmt: skip
            assert math.isclose(one, expected, rel_tol=1e-9)


def test_no_layout_is_tried_that_heads_or_nodes_forbid():
    spec = load_spec("qwen2.5-7b")
    layouts = Space().layouts(spec, Line(parse_cluster("1x8xa100")))
    assert {tp for tp, _ in layouts} == {1, 2, 4, 7}
    assert max(pp for _, pp in layouts) == 8
    small = Space().layouts(spec, Line(parse_cluster("4x4xa100")))
    assert {tp for tp, _ in small} == {1, 2, 4}


def test_the_paper_space_has_powers_of_two_that_divide_the_batch():
    space = Space(paper=True)
    assert {tp for tp, _ in space.layouts(load_spec("qwen2.5-7b"), Line(parse_cluster("1x8xa100")))} == {1, 2, 4}
    assert space.replicas([24], 16) == [1, 2, 3, 4, 6, 8, 12]
    assert space.micro_batches(Stage.TRAINING, 12) == [1, 2, 4, 12]


@pytest.mark.parametrize("total", [1, 2, 7, 64, 97])
def test_replicas_are_the_counts_that_lower_the_largest_share(total):
    expected = [d for d in range(1, total + 1) if d == 1 or -(-total // d) < -(-total // (d - 1))]
    assert Space().replicas([total], total) == expected
    assert expected[-1] == total


def random_settings(rng, count):
    rows = [
        Candidate(
            Layout(rng.choice([1, 2]), 1), rng.choice([1, 2]), 1 << rng.randint(0, 5), rng.choice(RECOMPUTES),
            (0.0, float(rng.randint(1, 6)), float(rng.randint(1, 6))), rng.randint(5, 12), rng.randint(1, 4),
            rng.randint(5, 9), rng.randint(0, 1), 1, rng.randint(0, 1),
        )
        for _ in range(count)
    ]  # fmt: skip
    return Candidates.of(ACTOR_TRAINING, rows, num_waves=3)


def dominates(a, b):
    same = (a.layout, a.dp, a.grain, a.region) == (b.layout, b.dp, b.grain, b.region)
    no_worse = all(x <= y for x, y in zip(a.wave_seconds, b.wave_seconds, strict=True))
    numbers = ("active_bytes", "idle_bytes", "shared_active_bytes", "shared_idle_bytes")
    return same and no_worse and all(getattr(a, name) <= getattr(b, name) for name in numbers)


def test_only_dominated_settings_are_dropped():
    for seed in range(60):
        table = random_settings(random.Random(seed), 30)
        kept = best_settings(table)
        left = [kept[i] for i in range(len(kept))]
        assert len(left) < len(table) or seed
        for i in range(len(table)):
            assert any(dominates(candidate, table[i]) for candidate in left)


def test_recomputation_never_makes_a_candidate_faster():
    problem = problem_for("llama-3.2-1b", "1x4xh100", algorithm="grpo", batch=16, prompt=100, response=500)
    table = problem.pricing.candidates(ACTOR_TRAINING, in_turn=False)
    seconds = {}
    for row in range(len(table)):
        c = table[row]
        seconds[c.layout, c.dp, c.micro_batch, c.region, c.grain, c.recompute] = sum(c.wave_seconds)
    for (*setting, recompute), value in seconds.items():
        bare = seconds.get((*setting, Recompute.NONE))
        assert bare is None or bare <= value or recompute is Recompute.NONE


def test_a_block_over_types_is_priced_at_the_slowest():
    devices = [
        Device(i, f"n{i // 2}", "h200" if i < 2 else "a100", ACCELERATORS["a100"].memory_bytes) for i in range(4)
    ]
    cluster = Cluster(tuple(devices), (ACCELERATORS["h200"], ACCELERATORS["a100"]))
    problem = problem_for(tiny_spec(), cluster, algorithm="grpo", batch=8, prompt=100, response=100)
    table = problem.pricing.candidates(REFERENCE_INFERENCE, in_turn=False)
    by_type = {}
    for region in np.unique(table.region).tolist():
        alone = (table.region == region) & (table.num_devices == 1)
        if alone.any():
            by_type[problem.line.regions[region].accelerator] = table.seconds[alone].sum(axis=1).min()
    assert by_type["h200"] < by_type["a100"]


def test_all_problems_of_the_generator_price_alike():
    for seed in range(6):
        problem = random_problem(seed)
        if all(len(problem.pricing.candidates(m, in_turn=True)) for m in problem.workflow.model_stages):
            check_rows(problem, 6, seed)


def test_regions_are_numbered_by_type_and_by_whether_they_span_nodes():
    devices = [Device(i, f"n{i // 2}", ("b200", "h200", "a100")[i // 4], 1 << 40) for i in range(12)]
    cluster = Cluster(tuple(devices), tuple(ACCELERATORS[name] for name in ("b200", "h200", "a100")))
    regions = Line(cluster).regions
    numbers = np.arange(len(regions))
    names = [region.accelerator for region in regions]
    assert [names.index(name) // 2 for name in names] == type_of(numbers).tolist()
    assert [not region.one_node for region in regions] == spans_nodes(numbers).astype(bool).tolist()
    assert regions[stricter(4, 5)].one_node and stricter(4, 5) == stricter(5, 4)


def test_a_key_refuses_what_is_wider_than_its_bits():
    fits, wide = np.array([4095, 0]), np.array([4096, 0])
    assert len(set(packed((fits, 12), (fits, 12)).tolist())) == 2
    with pytest.raises(AssertionError, match="4096 does not fit 12 bits"):
        packed((wide, 12), (fits, 12))
    with pytest.raises(AssertionError, match="64 bits"):
        packed((fits, 32), (fits, 32))

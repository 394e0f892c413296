import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algorithms.buffer import shares
from nereus.cluster import ACCELERATORS, Link, parse_cluster, uniform_cluster
from nereus.engine_facts import BF16, FP32, Op, causal_pairs
from nereus.known_models import MODELS
from nereus.model import Head
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    Layout,
    Recompute,
    Role,
)
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.cost import BUBBLE, CostModel
from nereus.planner.prices.footprints import stage_memory
from nereus.planner.prices.operations import Shape, Tokens, decode_step, layer_backward, layer_forward
from nereus.planner.prices.passes import Span, pipeline_basis, pipeline_pass
from nereus.planner.workload import Lengths, Workload, segments
from nereus.workflow import step_workflow

LLAMA = MODELS["llama-3.1-8b"]
SHAPE = Shape.of(LLAMA)
TASKS = step_workflow("ppo", Role).tasks
EVEN = Workload(batch=64, prompt_tokens=512, response=Lengths.constant(1024))
H200 = CostModel(parse_cluster("8x8xh200"), Calibration())


def cost(model_stage=ACTOR_TRAINING, spec=LLAMA, *, tp=1, pp=1, model=H200, **changes):
    settings = {
        "dp": 1,
        "workload": EVEN,
        "micro_batch": 4,
        "recompute": Recompute.NONE,
        "precision": BF16,
        "tasks": TASKS,
        "accelerator": model.cluster.accelerators[0].name,
        "span": Span(),
    }
    return model.stage_seconds(model_stage, spec, Layout(tp, pp), **(settings | changes))


def work_of(bill, op):
    return sum(work for (found, _), work, _ in bill if found is op)


def test_a_layer_multiplies_each_token_with_each_weight_once():
    tokens = Tokens.of(3, 100, loss_length=0)
    bill = layer_forward(SHAPE, tokens, tp=1, value_bytes=2, tp_link=Link.INTRA_NODE)
    weights = sum(param.numel for param in LLAMA.params if param.layer == 0 and len(param.shape) == 2)
    assert work_of(bill, Op.GEMM) == 2 * 300 * weights
    assert work_of(bill, Op.ATTENTION) == 2 * 2 * 3 * (100 * 100 / 2) * LLAMA.num_heads * LLAMA.head_dim
    assert work_of(bill, Op.ALL_REDUCE) == 0


def test_backward_multiplies_twice_and_sends_as_often():
    tokens = Tokens.of(3, 100, loss_length=0)
    forward = layer_forward(SHAPE, tokens, tp=4, value_bytes=2, tp_link=Link.INTRA_NODE)
    backward = layer_backward(forward)
    assert work_of(backward, Op.GEMM) == 2 * work_of(forward, Op.GEMM)
    assert work_of(backward, Op.ALL_REDUCE) == work_of(forward, Op.ALL_REDUCE)
    assert work_of(forward, Op.ALL_REDUCE) == 2 * 2 * 3 / 4 * 300 * LLAMA.hidden * 2


@given(length=st.integers(0, 300), window=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_causal_pairs_are_those_counted_one_by_one(length, window):
    counted = sum(min(position, window) for position in range(1, length + 1))
    assert abs(causal_pairs(length, window) - counted) <= length / 2 + 1
    assert causal_pairs(length) == length * length / 2


def test_counts_from_the_basis_equal_counts_of_the_pass_itself():
    rng = random.Random(0)
    for recompute in (None, *Recompute):
        layout, span = Layout(rng.choice((1, 2, 4)), rng.choice((1, 2, 4))), Span(pp_link=Link.INTER_NODE)
        tokens = Tokens(rng.uniform(1, 9e3), rng.uniform(1, 9e6), rng.uniform(1, 9e3))
        direct = pipeline_pass(SHAPE, layout, 2, span, recompute, tokens).counts
        empty, count, pairs, loss = pipeline_basis(SHAPE, layout, 2, span, recompute)
        assert empty + tokens.count * count + tokens.pairs * pairs + tokens.loss * loss == pytest.approx(direct)


def test_a_stage_runs_its_own_tasks_only_and_their_sum_is_its_time():
    both = cost()
    assert set(both.per_task) == {"old_logprobs", "actor_update"}
    assert both.seconds == pytest.approx(sum(both.per_task.values()))
    assert both.seconds == pytest.approx(sum(seconds for _, seconds in both.operations.values()))
    assert set(cost(REFERENCE_INFERENCE).per_task) == {"reference"}


def test_old_log_probabilities_are_a_forward_pass_of_training():
    forward, update = cost().per_task["old_logprobs"], cost().per_task["actor_update"]
    assert 2.5 * forward < update < 4.5 * forward


def test_full_recomputation_costs_another_forward_pass():
    plain, selective, full = (cost(recompute=r).per_task["actor_update"] for r in Recompute)
    assert plain < selective < full < 1.5 * plain


def test_a_pipeline_waits_less_with_more_micro_batches():
    bubbles = [
        cost(pp=4, micro_batch=size).operations[BUBBLE][1] / cost(pp=4, micro_batch=size).seconds for size in (1, 4, 16)
    ]
    assert bubbles[0] < bubbles[1] < bubbles[2]
    update = cost(pp=4, micro_batch=16, tasks=tuple(t for t in TASKS if t.name == "actor_update"))
    passes = sum(s for name, (_, s) in update.operations.items() if name != BUBBLE)
    assert update.operations[BUBBLE][1] == pytest.approx(passes * 3 / 4, rel=0.05), "4 micro-batches, 4 stages"
    assert BUBBLE not in cost(pp=1).operations


def test_more_replicas_take_less_time_and_reduce_gradients():
    times = [cost(dp=dp, micro_batch=1).seconds for dp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert "all_reduce@inter_node" in cost(dp=2, span=Span(dp_link=Link.INTER_NODE)).operations
    assert "all_reduce@intra_node" not in cost(dp=1).operations


def test_shares_that_differ_by_one_sample_are_priced_by_the_largest():
    thirds = dataclasses.replace(EVEN, batch=64)
    assert cost(dp=3, workload=thirds, micro_batch=1).seconds == pytest.approx(
        cost(dp=3, workload=dataclasses.replace(EVEN, batch=66), micro_batch=1).seconds
    )


def test_mini_batches_that_do_not_divide_are_priced_by_the_largest_in_seconds_and_bytes():
    odd = dataclasses.replace(EVEN, batch=65, mini_batches=4)
    even = dataclasses.replace(EVEN, batch=68, mini_batches=4)
    assert odd.mini_batch_samples == max(len(share) for share in shares(odd.num_samples, 4)) == 17
    priced = [cost(workload=work, micro_batch=1).per_task["actor_update"] for work in (odd, even)]
    assert priced[0] == pytest.approx(priced[1])
    held = [
        stage_memory(
            ACTOR_TRAINING, LLAMA, Layout(1, 1), dp=1, workload=work, micro_batch=17, recompute=Recompute.NONE,
            precision=BF16,
        )
        for work in (odd, even)
    ]  # fmt: skip
    assert held[0] == held[1]


def test_the_slowest_replica_of_random_lengths_is_priced():
    spread = dataclasses.replace(EVEN, response=Lengths((24.0, 2024.0)))
    assert spread.response.mean == EVEN.response.mean
    one = [cost(workload=w, dp=1).per_task["old_logprobs"] for w in (EVEN, spread)]
    many = [cost(workload=w, dp=8).per_task["old_logprobs"] for w in (EVEN, spread)]
    assert one[0] < one[1] < 1.1 * one[0], "the same tokens, more attention"
    assert many[1] / many[0] > 1.1


def test_a_scalar_head_saves_the_logits():
    critic = LLAMA.with_head(Head.SCORE)
    values = cost(CRITIC_INFERENCE, critic).per_task["values"]
    assert values < 0.99 * cost(REFERENCE_INFERENCE).per_task["reference"]
    assert set(cost(CRITIC_TRAINING, critic).per_task) == {"critic_update"}


def test_epochs_repeat_the_update_and_mini_batches_repeat_its_end():
    update = cost(workload=EVEN).per_task["actor_update"]
    assert cost(workload=dataclasses.replace(EVEN, epochs=2)).per_task["actor_update"] == pytest.approx(2 * update)
    halves = cost(workload=dataclasses.replace(EVEN, mini_batches=2)).per_task["actor_update"]
    assert update < halves < 1.1 * update


def simulated_decode_seconds(lengths, *, slots, model=H200, accelerator="h200"):
    """Token by token: a batch of `slots`, refilled from a queue, priced step by step with its real context."""
    queue, active, seconds = list(lengths), [], 0.0
    lines = model.calibration.lines(accelerator)
    while queue or active:
        while queue and len(active) < slots:
            active.append([queue.pop(0), 0])
        context = 512 + sum(done for _, done in active) / len(active)
        bill = decode_step(
            SHAPE, batch=len(active), context=context, tp=1, value_bytes=2, tp_link=Link.INTRA_NODE, compute_bound=False
        )
        bill.add(Op.LAUNCH, 0, 1)
        seconds += float((bill.counts * lines).sum())
        for sequence in active:
            sequence[1] += 1
        active = [sequence for sequence in active if sequence[1] < sequence[0]]
    return seconds


@pytest.mark.parametrize("slots", [32, 8])
def test_generation_follows_the_lengths_like_a_simulation_token_by_token(slots):
    rng = random.Random(0)
    values = tuple(sorted(round(rng.lognormvariate(5, 0.8)) + 1 for _ in range(32)))
    workload = Workload(batch=32, prompt_tokens=512, response=Lengths(tuple(map(float, values))))
    tokenless = Workload(batch=32, prompt_tokens=512, response=Lengths.constant(1e-6))
    priced = cost(ACTOR_GENERATION, workload=workload, micro_batch=slots).seconds
    prefill = cost(ACTOR_GENERATION, workload=tokenless, micro_batch=slots).seconds
    simulated = []
    for seed in range(5):
        shuffled = list(values)
        random.Random(seed).shuffle(shuffled)
        simulated.append(simulated_decode_seconds(shuffled, slots=slots))
    assert priced - prefill == pytest.approx(sum(simulated) / 5, rel=0.15)


def test_one_long_response_costs_more_than_its_tokens():
    even = Workload(batch=64, prompt_tokens=512, response=Lengths.constant(500))
    tail = Workload(batch=64, prompt_tokens=512, response=Lengths(tuple([400.0] * 63 + [6800.0])))
    assert tail.response.mean == 500
    times = [cost(ACTOR_GENERATION, workload=w, micro_batch=64).seconds for w in (even, tail)]
    assert times[1] > 5 * times[0]


def test_stages_of_a_pipeline_decode_their_lanes_at_once():
    one, two = (cost(ACTOR_GENERATION, pp=pp, micro_batch=64).operations for pp in (1, 2))
    assert two["attention_decode"][0] == pytest.approx(one["attention_decode"][0] / 2)
    assert two["decode_gemm"][0] == pytest.approx(one["decode_gemm"][0]), "each lane reads the stage's weights"


def test_fewer_slots_decode_in_more_steps():
    times = [cost(ACTOR_GENERATION, micro_batch=slots).seconds for slots in (64, 16, 4)]
    assert times == sorted(times)
    assert times[2] > 5 * times[0]


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(1, 5000), min_size=1, max_size=90))
def test_segments_hold_every_token_once(values):
    ordered = tuple(map(float, sorted(values)))
    pieces = segments(ordered)
    assert pieces[0][0] == 0 and pieces[-1][1] == ordered[-1]
    assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
    assert sum((end - start) * alive for start, end, alive in pieces) == pytest.approx(sum(ordered) / len(ordered))


def test_workers_that_share_cores_compute_slower_but_send_as_fast():
    cluster = uniform_cluster(num_nodes=1, devices_per_node=4, accelerator=ACCELERATORS["cpu"], cores_per_node=2)
    model = CostModel(cluster, Calibration())
    tiny = dataclasses.replace(
        LLAMA, num_layers=2, hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn=128, vocab=512
    )
    alone, crowded = (
        cost(spec=tiny, model=model, tp=2, precision=FP32, active_workers_on_node=workers).operations
        for workers in (2, 4)
    )
    assert crowded["gemm"][1] == pytest.approx(2 * alone["gemm"][1])
    assert crowded["all_reduce@intra_node"] == alone["all_reduce@intra_node"]


def test_synchronization_is_a_cost_of_a_pair_of_layouts():
    def seconds(source, target, same_node=True):
        return H200.sync_seconds(LLAMA, source, target, same_node=same_node, precision=BF16)

    one, four = Layout(1, 1), Layout(4, 1)
    assert seconds((four, 1), (four, 1)) < seconds((one, 1), (one, 1))
    assert seconds((four, 1), (one, 4)) > seconds((four, 1), (four, 1))
    assert seconds((four, 2), (one, 4)) < seconds((four, 1), (one, 4)) * 1.01
    assert seconds((four, 1), (one, 1), same_node=False) > seconds((four, 1), (one, 1))


def test_measured_efficiency_changes_the_price():
    calibration = Calibration()
    model = CostModel(parse_cluster("1x8xh200"), calibration)
    before = cost(model=model).seconds
    calibration.observe(Op.GEMM, 1e15, 1, 1e15 / (989e12 * 0.3), accelerator="h200")
    assert cost(model=model).seconds > 1.2 * before

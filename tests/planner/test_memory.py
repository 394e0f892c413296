import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.comm.groups import Group
from nereus.engine_facts import BF16, BUCKET_BYTES, BUCKETS_STAGED, FP32
from nereus.engines.cache import KvCache
from nereus.engines.transformer import StageModel
from nereus.errors import InputError
from nereus.known_models import MODELS
from nereus.model import Head, ModelSpec
from nereus.moving.executor import Execution
from nereus.plan import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Layout,
    Recompute,
)
from nereus.planner.prices.footprints import stage_memory
from nereus.planner.prices.memory import layer_bytes_per_token, state_numel
from nereus.planner.workload import Lengths, Workload
from nereus.shards.boxes import flat_numel
from nereus.shards.kv_blocks import BLOCK_TOKENS, block_bytes, blocks_of, cache_heads, most_blocks
from nereus.shards.state import RankState, StateKind, zeros_on

TINY = ModelSpec(
    family="qwen3", num_layers=5, hidden=64, num_heads=12, num_kv_heads=4, head_dim=16, ffn=100, vocab=515, qk_norm=True
)
BIG = MODELS["qwen2.5-7b"]
ONE = Layout()
PLAIN = Workload(batch=64, prompt_tokens=100, response=Lengths.constant(400))


def memory(model_stage=ACTOR_TRAINING, spec=BIG, layout=ONE, **changes):
    settings = {"dp": 1, "workload": PLAIN, "micro_batch": 1, "recompute": Recompute.NONE, "precision": BF16}
    return stage_memory(model_stage, spec, layout, **(settings | changes))


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from(TINY.valid_tp),
    pp=st.integers(1, 5),
    tied=st.booleans(),
    bias=st.booleans(),
    head=st.sampled_from(list(Head)),
    vocab=st.integers(3, 700),
)
def test_state_equals_the_largest_flat_buffer_of_a_pipeline_stage(tp, pp, tied, bias, head, vocab):
    spec = dataclasses.replace(TINY, tied=tied, qkv_bias=bias, vocab=vocab).with_head(head)
    layout = Layout(tp, pp)
    for pp_rank in range(pp):
        ranks = [layout.rank(tp_rank=tp_rank, pp_rank=pp_rank) for tp_rank in range(tp)]
        assert state_numel(spec, layout, pp_rank) == max(flat_numel(spec, layout, rank) for rank in ranks)


def test_mixed_precision_training_keeps_sixteen_bytes_of_state_and_gradient_per_parameter():
    parts = memory().active
    params = state_numel(BIG, Layout(), 0)
    assert parts["weights"] == 2 * params
    assert parts["gradients"] == parts["masters"] == 4 * params
    assert parts["moments"] == 8 * params
    assert "masters" not in memory(precision=FP32).active


def test_only_state_stays_while_other_model_stages_run():
    kept = memory()
    assert set(kept.idle) <= {"weights", "gradients", "masters", "moments"}
    assert kept.idle_bytes < kept.active_bytes
    assert set(memory(REFERENCE_INFERENCE).idle) == {"weights"}


def test_the_planner_counts_as_many_staged_bytes_as_transport_may_stage():
    large = memory(REFERENCE_INFERENCE).active["sync_buffers"]
    assert large == BUCKETS_STAGED * BUCKET_BYTES
    tiny = memory(REFERENCE_INFERENCE, TINY, precision=FP32).active
    assert tiny["sync_buffers"] == 2 * tiny["weights"] < large, "a buffer that goes out and one that comes in"
    assert inspect.signature(Execution).parameters["bucket_bytes"].default == BUCKET_BYTES


def test_weights_shared_with_training_are_counted_there():
    shared = memory(ACTOR_GENERATION, shares_weights=True)
    assert "weights" not in shared.active
    assert shared.idle_bytes == 0
    assert memory(ACTOR_TRAINING, shares_weights=True).active["weights"] == memory().active["weights"]


def test_recomputation_trades_activations_for_time():
    kept = [memory(recompute=recompute).active["activations"] for recompute in Recompute]
    assert kept[0] > kept[1] > kept[2]


def test_a_layer_keeps_these_tensors():
    hidden, attention, ffn = 3584, (28 + 4) * 128, 18944
    kept = [layer_bytes_per_token(BIG, 1, recompute, 2) / 2 for recompute in Recompute]
    assert kept == [
        4 * hidden + 3 * attention + 4 * ffn,  # both norms' inputs and outputs
        2 * hidden + 3 * attention + 2 * ffn,  # their inputs, gate and up
        hidden,
    ]


def test_the_fullest_rank_of_a_pipeline_is_the_fullest_of_its_stages():
    layout = Layout(tp=2, pp=3)
    settings = {"dp": 1, "workload": PLAIN, "micro_batch": 4, "recompute": Recompute.FULL, "precision": BF16}
    ranks = [stage_memory(ACTOR_TRAINING, BIG, layout, pp_rank=rank, **settings) for rank in range(3)]
    assert memory(layout=layout, **settings) == max(ranks, key=lambda rank: rank.active_bytes)
    assert len({rank.active_bytes for rank in ranks}) == 3


def test_a_short_micro_batch_peaks_where_the_embedding_has_its_gradient():
    short = Workload(batch=8, prompt_tokens=1, response=Lengths.constant(1))
    first = stage_memory(
        ACTOR_TRAINING, BIG, Layout(pp=2), pp_rank=0, dp=1, workload=short, micro_batch=1, recompute=Recompute.FULL,
        precision=BF16,
    )  # fmt: skip
    kept = 2 * 14 * BIG.hidden * 2
    assert first.active["workspace"] == BIG.vocab * BIG.hidden * 2 + 2 * BIG.hidden * 2 - kept


def test_gradients_on_their_way_back_count_on_all_stages_but_the_first():
    critic = BIG.with_head(Head.SCORE)
    sent = []
    for batch in (1, 2, 3, 8):
        workload = Workload(batch=batch, prompt_tokens=100, response=Lengths.constant(3900))
        last = stage_memory(
            CRITIC_TRAINING, critic, Layout(pp=2), pp_rank=1, dp=1, workload=workload, micro_batch=1,
            recompute=Recompute.NONE, precision=BF16,
        )  # fmt: skip
        sent.append(last.active["workspace"])
    message = 4000 * BIG.hidden * 2
    assert [size - sent[0] for size in sent] == [0, message, 2 * message, 2 * message]


@settings(max_examples=20, deadline=None)
@given(tp=st.sampled_from(TINY.valid_tp), kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_stored_heads_are_those_of_the_engine_s_cache(tp, kv_heads):
    spec = dataclasses.replace(TINY, num_kv_heads=kv_heads)
    stored = []
    for rank in range(tp):
        state = RankState.allocate(
            spec, Layout(tp), rank, dtypes={StateKind.PARAM: torch.float32}, allocator=zeros_on(torch.device("cpu"))
        )
        stored.append(KvCache(StageModel(state, tp=Group.single())).num_heads)
    assert cache_heads(spec, tp) == max(stored)


def test_small_models_decode_from_a_copy_of_all_but_the_embedding():
    parts = memory(ACTOR_GENERATION, TINY, precision=FP32).active
    assert parts["packed_weights"] == parts["weights"] - TINY.vocab * TINY.hidden * 4
    tied = memory(ACTOR_GENERATION, dataclasses.replace(TINY, tied=True), precision=FP32).active
    assert tied["packed_weights"] == tied["weights"], "the embedding is the head"
    assert "packed_weights" not in memory(ACTOR_GENERATION, TINY, precision=BF16).active
    assert "packed_weights" not in memory(ACTOR_GENERATION, BIG, precision=FP32).active


def test_earlier_pipeline_stages_keep_more_micro_batches():
    critic = BIG.with_head(Head.SCORE)
    many = memory(CRITIC_TRAINING, critic, Layout(pp=4), recompute=Recompute.FULL)
    single = memory(CRITIC_TRAINING, critic, Layout(pp=4), dp=64, recompute=Recompute.FULL)
    per_token = (BIG.num_layers // 4 + 1) * BIG.hidden * 2
    assert many.active["activations"] == 4 * 500 * per_token
    assert single.active["activations"] == 500 * per_token


def test_the_cache_holds_the_longest_sequences_not_the_mean():
    even = Workload(batch=8, prompt_tokens=100, response=Lengths.constant(1000))
    uneven = Workload(batch=8, prompt_tokens=100, response=Lengths((100, 100, 100, 100, 100, 100, 100, 7300)))
    assert uneven.response.mean == even.response.mean
    caches = [memory(ACTOR_GENERATION, workload=w, micro_batch=4).active["kv_cache"] for w in (even, uneven)]
    once_more = BIG.head_dim  # of one layer, while the cache grows
    per_token = BIG.num_kv_heads * (BIG.num_layers * 2 * BIG.head_dim + once_more + 1) * 2
    assert [blocks_of(1100), blocks_of(7400)] == [35, 232]
    assert caches == [4 * 35 * BLOCK_TOKENS * per_token, 4 * 232 * BLOCK_TOKENS * per_token]


def test_the_cache_has_room_for_one_sequence_at_the_cap_whatever_lengths_are_counted():
    short = Workload(batch=8, prompt_tokens=100, response=Lengths.constant(156), max_tokens=8192)
    one, many = (memory(ACTOR_GENERATION, workload=short, micro_batch=n).active["kv_cache"] for n in (1, 64))
    assert one == many == blocks_of(8192) * block_bytes(BIG, ONE, 2)
    long = dataclasses.replace(short, batch=64, response=Lengths.constant(4000))
    counted = memory(ACTOR_GENERATION, workload=long, micro_batch=64).active["kv_cache"]
    assert counted == 64 * blocks_of(4100) * block_bytes(BIG, ONE, 2)


@pytest.mark.parametrize("layout", [ONE, Layout(2), Layout(7), Layout(pp=3), Layout(4, 2)], ids=str)
@pytest.mark.parametrize("sequences", [1, 64])
def test_the_engine_takes_as_many_blocks_as_the_planner_counted(layout, sequences):
    seen = Workload(batch=64, prompt_tokens=100, response=Lengths.constant(700), max_tokens=8192)
    counted = memory(ACTOR_GENERATION, layout=layout, workload=seen, micro_batch=sequences).active["kv_cache"]
    taken = most_blocks(BIG, layout, 2, sequences=sequences, longest=8192, cache_bytes=counted)
    assert taken == max(sequences * blocks_of(800), blocks_of(8192))
    with pytest.raises(InputError, match=f"cache_bytes is 1,000; one sequence of 8192 tokens .* of {layout}"):
        most_blocks(BIG, layout, 2, sequences=sequences, longest=8192, cache_bytes=1000)


def test_every_rank_of_a_pipeline_counts_the_same_cache():
    settings = {"dp": 1, "workload": PLAIN, "micro_batch": 4, "recompute": Recompute.NONE, "precision": BF16}
    caches = {
        stage_memory(ACTOR_GENERATION, BIG, Layout(pp=3), pp_rank=rank, **settings).active["kv_cache"]
        for rank in range(3)
    }
    assert len(caches) == 1, "the plan gives all ranks one number"


def test_replicated_kv_heads_stop_the_cache_from_shrinking():
    sizes = [memory(ACTOR_GENERATION, layout=Layout(tp), micro_batch=4).active["kv_cache"] for tp in (1, 2, 4, 7, 14)]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
    assert sizes[4] == 2 * sizes[2], "query heads of a rank cross two groups"
    assert sizes[3] == 4 * sizes[2], "of four query heads three share a KV head: each is stored with its own"


def test_one_long_outlier_raises_the_logits_peak_of_a_large_vocabulary():
    lengths = Lengths(tuple([1024.0] * 99 + [9216.0]))
    short = memory(workload=Workload(batch=100, prompt_tokens=0, response=Lengths.constant(1024)))
    outlier = memory(workload=Workload(batch=100, prompt_tokens=0, response=lengths))
    assert outlier.active["logits"] >= 9216 * BIG.vocab * 4
    assert outlier.active["logits"] == pytest.approx(short.active["logits"] * 9)


def test_vocabulary_parallelism_shares_the_logits():
    whole, shared = (memory(layout=Layout(tp)).active["logits"] for tp in (1, 4))
    assert shared == pytest.approx(whole / 4, rel=0.02)  # the hidden states behind them are whole


def test_critic_and_reward_model_have_no_vocabulary_logits():
    critic = BIG.with_head(Head.SCORE)
    assert "logits" not in memory(CRITIC_TRAINING, critic).active
    assert "logits" not in memory(REWARD_INFERENCE, critic).active
    assert "logits" in memory(REFERENCE_INFERENCE).active


def test_inference_keeps_nothing_for_a_backward_pass():
    parts = memory(REFERENCE_INFERENCE).active
    assert "activations" not in parts
    assert set(parts) <= {"weights", "workspace", "logits", "sync_buffers"}
    assert memory(REFERENCE_INFERENCE, recompute=Recompute.FULL).active == parts


def test_tensor_parallelism_keeps_the_replicated_part_of_the_activations():
    whole = layer_bytes_per_token(BIG, 1, Recompute.NONE, 2)
    shared = layer_bytes_per_token(BIG, 4, Recompute.NONE, 2)
    assert whole / 4 < shared < whole


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 5000), min_size=1, max_size=40), count=st.integers(1, 60))
def test_the_longest_samples_are_those_of_a_sorted_list(values, count):
    lengths = Lengths(tuple(map(float, sorted(values))))
    expected = sum(sorted(values, reverse=True)[:count])
    assert lengths.longest_of(count, among=len(values)) == pytest.approx(expected)

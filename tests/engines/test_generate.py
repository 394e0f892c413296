"""Every layout, batch and order generates what one sequence alone, without a cache, generates."""

import dataclasses
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from engine_builders import load_state
from hypothesis import given, settings
from hypothesis import strategies as st
from support import StoreFactory, run_threads
from test_sampling import python_choice

from nereus.comm.groups import Group, build_group
from nereus.engines.generate import CacheUse, Generator
from nereus.engines.rollout import Completion, Request
from nereus.engines.sampling import SamplingParams
from nereus.engines.transformer import PackedAttention, Packing, Rope, StageModel
from nereus.errors import InputError
from nereus.model import Llama3RopeScaling, ModelSpec
from nereus.plan import Layout
from nereus.shards.kv_blocks import BLOCK_TOKENS, block_bytes, blocks_of

CPU = torch.device("cpu")
LLAMA = ModelSpec("llama", 4, 32, 4, 2, 8, 48, 37, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 16))
QWEN2 = ModelSpec("qwen2", 3, 32, 4, 2, 8, 48, 37, qkv_bias=True, tied=True)
QWEN3 = ModelSpec("qwen3", 2, 32, 4, 1, 16, 48, 39, qk_norm=True)
MISTRAL = ModelSpec("mistral", 3, 32, 4, 4, 8, 48, 37, sliding_window=5)
WIDE = ModelSpec("qwen2", 2, 56, 28, 4, 2, 24, 33, qkv_bias=True)
LENGTH = 24
PARAMS = SamplingParams(12, temperature=0.9, stop_ids=(3, 17), seed=11)


def requests_of(count: int, vocab: int) -> list[Request]:
    """Prompts of 1 to 9 tokens, two sequences for each."""
    return [
        Request(i // 2, i % 2, [(7 * (i // 2) + 5 * j + 1) % vocab for j in range(1 + (i // 2) % 9)])
        for i in range(count)
    ]


@functools.cache
def full_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        param.name: torch.randn(param.shape, dtype=torch.float64, generator=draw) * 0.15 + ("norm" in param.name)
        for param in spec.params
    }


def build_model(spec: ModelSpec, layout: Layout, rank: int, tp: Group, dtype: torch.dtype) -> StageModel:
    state = load_state(spec, layout, rank, full_weights(spec), dtype=dtype, trains=False)
    return StageModel(state, tp=tp)


def loaded(model: StageModel, **settings: Any) -> Generator:
    generator = Generator(model, **settings)
    generator.load()
    return generator


def generator_of(spec: ModelSpec, *, max_slots: int = 8, dtype: torch.dtype = torch.float64) -> Generator:
    single = Group.single()
    model = build_model(spec, Layout(1, 1), 0, single, dtype)
    return loaded(model, tp=single, pp=single, max_slots=max_slots, max_length=LENGTH)


@functools.cache
def slow_completions(spec: ModelSpec, params: SamplingParams, count: int) -> tuple[Completion, ...]:
    """One sequence at a time, the whole sequence computed again for every token, noise and choice in plain Python."""
    model = build_model(spec, Layout(1, 1), 0, Group.single(), torch.float64)
    results = []
    for request in requests_of(count, spec.vocab):
        tokens, finished = list(request.tokens), False
        new: list[int] = []
        while len(new) < params.max_new_tokens and not finished:
            packing = Packing.of([len(tokens)], CPU)
            rope = Rope.at(spec, packing.positions, torch.float64, longest=LENGTH)
            hidden = model.body(model.embed(torch.tensor(tokens)), rope, PackedAttention(packing, model))
            logits = model.logits(hidden[-1:])[0].tolist()
            token = python_choice(logits, params, request.place, request.index, position=len(tokens))
            tokens.append(token)
            new.append(token)
            finished = token in params.stop_ids
        results.append(Completion(request.place, request.index, tuple(new), finished))
    return tuple(results)


def on_ranks(layout: Layout, run: Callable[[Group, Group, int], list[Completion]]) -> list[list[Completion]]:
    """`run(tp group, pp group, rank)` on every rank of a unit."""

    def rank_main(rank: int, store: StoreFactory) -> list[Completion]:
        tp_rank, pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)
        timeout = timedelta(seconds=30)
        tp = build_group(store(), f"tp{pp_rank}", rank=tp_rank, size=layout.tp, timeout=timeout)
        pp = build_group(store(), f"pp{tp_rank}", rank=pp_rank, size=layout.pp, timeout=timeout)
        result = run(tp, pp, rank)
        tp.close()
        pp.close()
        return result

    return run_threads(layout.num_ranks, rank_main)


def generated(spec: ModelSpec, layout: Layout, params: SamplingParams, count: int) -> list[list[Completion]]:
    def run(tp: Group, pp: Group, rank: int) -> list[Completion]:
        model = build_model(spec, layout, rank, tp, torch.float64)
        generator = loaded(model, tp=tp, pp=pp, max_slots=5, max_length=LENGTH)
        return generator.generate(requests_of(count, spec.vocab), params)

    return on_ranks(layout, run)


@pytest.mark.parametrize("spec", [LLAMA, QWEN2, QWEN3, MISTRAL, WIDE], ids=lambda spec: spec.family)
def test_three_slots_and_twenty_prompts_give_what_each_prompt_alone_gives(spec: ModelSpec) -> None:
    completions = generator_of(spec, max_slots=3).generate(requests_of(20, spec.vocab), PARAMS)
    assert completions == list(slow_completions(spec, PARAMS, 20))
    assert len({len(completion.tokens) for completion in completions}) > 3


@pytest.mark.parametrize(
    "params",
    [
        dataclasses.replace(PARAMS, greedy=True),
        dataclasses.replace(PARAMS, temperature=0.0),
        dataclasses.replace(PARAMS, top_k=3),
        dataclasses.replace(PARAMS, top_p=0.6),
        dataclasses.replace(PARAMS, top_k=7, top_p=0.8, temperature=1.7),
    ],
    ids=["greedy", "zero-temperature", "top-k", "top-p", "both"],
)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_every_way_of_choosing_agrees_with_the_slow_generator(layout: Layout, params: SamplingParams) -> None:
    for completions in generated(LLAMA, layout, params, 12):
        assert completions == list(slow_completions(LLAMA, params, 12))


@pytest.mark.parametrize(
    ("spec", "tp", "pp"),
    [
        (LLAMA, 2, 2),
        (LLAMA, 4, 1),
        (LLAMA, 1, 4),
        (QWEN2, 2, 2),
        (QWEN2, 4, 1),
        (QWEN3, 4, 2),
        (QWEN3, 2, 1),
        (MISTRAL, 2, 2),
        (MISTRAL, 4, 1),
        (WIDE, 7, 1),
        (WIDE, 4, 2),
    ],
    ids=lambda value: value.family if isinstance(value, ModelSpec) else str(value),
)
def test_every_layout_generates_the_same_tokens_on_every_rank(spec: ModelSpec, tp: int, pp: int) -> None:
    for completions in generated(spec, Layout(tp, pp), PARAMS, 14):
        assert completions == list(slow_completions(spec, PARAMS, 14))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("spec", [LLAMA, QWEN2, QWEN3, MISTRAL], ids=lambda spec: spec.family)
def test_the_full_product_of_layouts_generates_the_same_tokens(spec: ModelSpec, tp: int, pp: int) -> None:
    for params in (PARAMS, dataclasses.replace(PARAMS, top_k=7, top_p=0.8)):
        for completions in generated(spec, Layout(tp, pp), params, 20):
            assert completions == list(slow_completions(spec, params, 20))


@pytest.mark.parametrize("dp", [2, 3, 7])
def test_shares_of_any_dp_generate_the_same_tokens(dp: int) -> None:
    requests, generator = requests_of(20, LLAMA.vocab), generator_of(LLAMA)
    shares = [generator.generate(requests[20 * i // dp : 20 * (i + 1) // dp], PARAMS) for i in range(dp)]
    assert sum(shares, []) == list(slow_completions(LLAMA, PARAMS, 20))


def test_the_order_of_requests_does_not_matter_and_is_kept() -> None:
    requests = requests_of(12, LLAMA.vocab)[::-1]
    completions = generator_of(LLAMA, max_slots=4).generate(requests, PARAMS)
    assert completions == list(slow_completions(LLAMA, PARAMS, 12))[::-1]


def test_a_call_leaves_nothing_behind_for_the_next() -> None:
    generator, requests = generator_of(MISTRAL, max_slots=3), requests_of(10, MISTRAL.vocab)
    first = generator.generate(requests, PARAMS)
    generator.generate(requests[::-1], dataclasses.replace(PARAMS, seed=5, max_new_tokens=3))
    assert generator.generate(requests, PARAMS) == first
    generator.release()
    assert generator.footprint.held_bytes == 0
    generator.load()
    assert generator.generate(requests, PARAMS) == first


def test_stop_tokens_end_a_sequence_and_the_limit_cuts_it() -> None:
    for completion in generator_of(LLAMA).generate(requests_of(20, LLAMA.vocab), PARAMS):
        assert completion.finished == (completion.tokens[-1] in PARAMS.stop_ids)
        assert not set(completion.tokens[:-1]) & set(PARAMS.stop_ids)
        assert completion.finished or len(completion.tokens) == PARAMS.max_new_tokens


def test_seed_place_and_index_each_change_the_tokens() -> None:
    generator = generator_of(LLAMA)
    params = dataclasses.replace(PARAMS, stop_ids=())
    variants = [Request(0, 0, [1, 2]), Request(0, 1, [1, 2]), Request(1, 0, [1, 2])]
    drawn = {completion.tokens for completion in generator.generate(variants, params)}
    drawn |= {generator.generate(variants[:1], dataclasses.replace(params, seed=12))[0].tokens}
    assert len(drawn) == 4


@pytest.mark.parametrize("tokens", [[], [1] * 13])
def test_a_request_that_does_not_fit_is_refused_by_its_place(tokens: list[int]) -> None:
    with pytest.raises(InputError, match="prompt 41 .* at most 24"):
        generator_of(LLAMA).generate([Request(41, 0, tokens)], PARAMS)


def test_no_requests_give_no_completions() -> None:
    assert generator_of(LLAMA).generate([], PARAMS) == []


def tight(spec: ModelSpec, layout: Layout, num_blocks: int) -> int:
    """Bytes of so many cache blocks in float64."""
    return num_blocks * block_bytes(spec, layout, 8)


def long_requests(vocab: int) -> list[Request]:
    """Fourteen prompts of 20 to 33 tokens."""
    return [Request(i, 0, [(7 * i + 5 * j + 1) % vocab for j in range(20 + i)]) for i in range(14)]


LONG = dataclasses.replace(PARAMS, max_new_tokens=60, stop_ids=())


@functools.cache
def unbounded(spec: ModelSpec, params: SamplingParams) -> tuple[Completion, ...]:
    single = Group.single()
    model = build_model(spec, Layout(1, 1), 0, single, torch.float64)
    generator = loaded(model, tp=single, pp=single, max_slots=14, max_length=100)
    completions = generator.generate(long_requests(spec.vocab), params)
    assert generator.use.num_preempted == generator.use.num_held_back == 0
    return tuple(completions)


@pytest.mark.parametrize(
    ("spec", "layout", "num_blocks"),
    [
        (LLAMA, Layout(1, 1), 4),
        (LLAMA, Layout(1, 1), 9),
        (LLAMA, Layout(2, 1), 9),
        (LLAMA, Layout(1, 2), 4),
        (LLAMA, Layout(1, 2), 13),
        (LLAMA, Layout(2, 2), 9),
        (MISTRAL, Layout(1, 1), 9),
        (MISTRAL, Layout(1, 2), 9),
    ],
    ids=lambda value: value.family if isinstance(value, ModelSpec) else str(value),
)
def test_sequences_that_wait_or_are_preempted_get_the_tokens_of_an_unbounded_cache(
    spec: ModelSpec, layout: Layout, num_blocks: int
) -> None:
    bound = tight(spec, layout, num_blocks)
    uses: list[CacheUse] = []

    def run(tp: Group, pp: Group, rank: int) -> list[Completion]:
        model = build_model(spec, layout, rank, tp, torch.float64)
        generator = loaded(model, tp=tp, pp=pp, max_slots=8, max_length=100, cache_bytes=bound)
        completions = generator.generate(long_requests(spec.vocab), LONG)
        assert generator.footprint.held_bytes == 0, "the blocks are given back"
        uses.append(generator.use)
        return completions

    for completions in on_ranks(layout, run):
        assert completions == list(unbounded(spec, LONG))
    assert len({(use.num_preempted, use.num_held_back) for use in uses}) == 1, "ranks decide alike"
    assert all(0 < use.peak_bytes <= bound for use in uses)
    assert uses[0].num_held_back > 0
    assert uses[0].num_preempted > 0


def test_bytes_follow_the_lengths_that_come_not_those_that_may() -> None:
    single = Group.single()
    model = build_model(LLAMA, Layout(1, 1), 0, single, torch.float64)
    generator = loaded(model, tp=single, pp=single, max_slots=8, max_length=4000)
    params = dataclasses.replace(PARAMS, max_new_tokens=3000, stop_ids=tuple(range(0, LLAMA.vocab, 2)))
    completions = generator.generate(requests_of(20, LLAMA.vocab), params)
    longest = max(len(completion.tokens) + 9 for completion in completions)
    assert longest < 2 * BLOCK_TOKENS
    assert 0 < generator.use.peak_bytes <= tight(LLAMA, Layout(1, 1), 8 * 2) < tight(LLAMA, Layout(1, 1), 8 * 125) / 50


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_a_bound_that_holds_no_whole_sequence_is_refused_when_the_generator_is_built(layout: Layout) -> None:
    needed = tight(LLAMA, layout, 5)

    def run(tp: Group, pp: Group, rank: int) -> list[Completion]:
        model = build_model(LLAMA, layout, rank, tp, torch.float64)
        with pytest.raises(InputError, match=f"cache_bytes is {needed - 1:,}; .*150 tokens needs {needed:,}"):
            Generator(model, tp=tp, pp=pp, max_slots=8, max_length=150, cache_bytes=needed - 1)
        Generator(model, tp=tp, pp=pp, max_slots=8, max_length=150, cache_bytes=needed)
        return []

    on_ranks(layout, run)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    new=st.integers(1, 90),
    max_slots=st.integers(1, 6),
    spare=st.integers(0, 12),
)
def test_whatever_the_lengths_and_the_bound_the_same_tokens_come_and_the_bound_holds(
    lengths: list[int], new: int, max_slots: int, spare: int
) -> None:
    single, whole = Group.single(), 160
    model = build_model(MISTRAL, Layout(1, 1), 0, single, torch.float64)
    requests = [Request(i, 0, [(3 * i + j) % MISTRAL.vocab for j in range(n)]) for i, n in enumerate(lengths)]
    params = dataclasses.replace(PARAMS, max_new_tokens=new, stop_ids=(3, 5, 7))
    bound = tight(MISTRAL, Layout(1, 1), blocks_of(whole) + spare)
    free = loaded(model, tp=single, pp=single, max_slots=12, max_length=whole)
    bounded = loaded(model, tp=single, pp=single, max_slots=max_slots, max_length=whole, cache_bytes=bound)
    assert bounded.generate(requests, params) == free.generate(requests, params)
    assert bounded.use.peak_bytes <= bound

"""What every rollout engine promises (`RolloutEngine`), over the native one and the fake."""

import dataclasses

import pytest
import torch
from test_generate import CPU, LLAMA, PARAMS, full_weights, requests_of

from nereus.comm.groups import Group
from nereus.engines.by_name import ENGINES
from nereus.engines.fake_engine import FakeEngine
from nereus.engines.rollout import RolloutEngine
from nereus.engines.transformer import StageModel
from nereus.errors import InputError
from nereus.plan import Layout
from nereus.shards.kv_blocks import block_bytes, blocks_of
from nereus.shards.state import RankState, StateKind, zeros_on

LENGTH = 100
ONE_SEQUENCE = blocks_of(LENGTH) * block_bytes(LLAMA, Layout(), 8)
Kind = type[RolloutEngine]
every_engine = pytest.mark.parametrize("kind", [*ENGINES.values(), FakeEngine])


def model_of() -> StageModel:
    dtypes = {StateKind.PARAM: torch.float64}
    state = RankState.allocate(LLAMA, Layout(), 0, dtypes=dtypes, allocator=zeros_on(CPU))
    for name, weights in full_weights(LLAMA).items():
        state.view(name).copy_(weights)
    return StageModel(state, tp=Group.single())


def engine_of(
    kind: Kind, model: StageModel | None = None, *, max_slots: int = 4, cache_bytes: int | None = None
) -> RolloutEngine:
    single = Group.single()
    engine = kind(
        model or model_of(), tp=single, pp=single, max_slots=max_slots, max_length=LENGTH, cache_bytes=cache_bytes
    )
    engine.load()
    return engine


@every_engine
def test_each_request_gets_one_completion_streamed_or_in_order(kind: Kind) -> None:
    engine, requests = engine_of(kind), requests_of(11, LLAMA.vocab)[::-1]
    completions = engine.generate(requests, PARAMS)
    assert [(c.place, c.index) for c in completions] == [(r.place, r.index) for r in requests]
    streamed = list(engine.stream(requests, PARAMS))
    assert len(streamed) == len(requests)
    assert {(c.place, c.index): c for c in streamed} == {(c.place, c.index): c for c in completions}
    assert engine.generate([], PARAMS) == list(engine.stream([], PARAMS)) == []


@every_engine
def test_a_completion_ends_with_a_stop_token_or_at_the_limit(kind: Kind) -> None:
    ends = set()
    for completion in engine_of(kind).generate(requests_of(40, LLAMA.vocab), PARAMS):
        assert completion.finished == (completion.tokens[-1] in PARAMS.stop_ids)
        assert not set(completion.tokens[:-1]) & set(PARAMS.stop_ids)
        assert completion.finished or len(completion.tokens) == PARAMS.max_new_tokens
        assert all(0 <= token < LLAMA.vocab for token in completion.tokens)
        ends.add(completion.finished)
    assert ends == {True, False}


@every_engine
def test_limits_order_and_company_change_no_completion(kind: Kind) -> None:
    requests, params = requests_of(13, LLAMA.vocab), dataclasses.replace(PARAMS, max_new_tokens=80)
    expected = engine_of(kind).generate(requests, params)
    assert engine_of(kind, max_slots=1).generate(requests, params) == expected
    assert engine_of(kind, cache_bytes=ONE_SEQUENCE).generate(requests, params) == expected
    assert engine_of(kind).generate(requests[::-1], params) == expected[::-1]
    engine = engine_of(kind)
    assert engine.generate(requests[:5], params) + engine.generate(requests[5:], params) == expected


@every_engine
def test_seed_and_weights_change_completions_and_weights_only_by_load(kind: Kind) -> None:
    model, requests = model_of(), requests_of(6, LLAMA.vocab)
    engine = engine_of(kind, model)
    first = engine.generate(requests, PARAMS)
    assert engine.generate(requests, dataclasses.replace(PARAMS, seed=12)) != first
    model.state.flats[StateKind.PARAM].mul_(1.5)
    engine.load()
    changed = engine.generate(requests, PARAMS)
    assert changed != first
    assert engine_of(kind, model).generate(requests, PARAMS) == changed


@every_engine
def test_a_released_engine_holds_nothing_and_generates_the_same_again(kind: Kind) -> None:
    engine, requests = engine_of(kind), requests_of(9, LLAMA.vocab)
    assert engine.footprint.held_bytes == engine.footprint.peak_bytes == 0
    held, first = 0, []
    for completion in engine.stream(requests, PARAMS):
        held = max(held, engine.footprint.held_bytes)
        first.append(completion)
    assert 0 < held <= engine.footprint.peak_bytes
    engine.release()
    assert engine.footprint.held_bytes == 0
    engine.load()
    assert list(engine.stream(requests, PARAMS)) == first


@every_engine
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_cache_never_holds_more_than_it_may(kind: Kind, sequences: int) -> None:
    engine = engine_of(kind, cache_bytes=sequences * ONE_SEQUENCE)
    params = dataclasses.replace(PARAMS, max_new_tokens=90, stop_ids=())
    for _ in engine.stream(requests_of(8, LLAMA.vocab), params):
        assert engine.footprint.held_bytes <= sequences * ONE_SEQUENCE
    assert 0 < engine.footprint.peak_bytes <= sequences * ONE_SEQUENCE


@every_engine
def test_what_cannot_be_is_refused_by_its_numbers(kind: Kind) -> None:
    with pytest.raises(InputError, match=f"cache_bytes is {ONE_SEQUENCE - 1:,}; .* needs {ONE_SEQUENCE:,}"):
        engine_of(kind, cache_bytes=ONE_SEQUENCE - 1)
    request = dataclasses.replace(requests_of(1, LLAMA.vocab)[0], place=41, tokens=[1] * LENGTH)
    with pytest.raises(InputError, match="prompt 41 has 100 tokens .* at most 100"):
        engine_of(kind).generate([request], PARAMS)

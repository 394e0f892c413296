"""Keyed noise is Gumbel noise, depends on its keys alone, and thresholds equal those of a sorted row."""

import math
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import StoreFactory, run_threads

from nereus.comm.groups import Group, build_group
from nereus.engines.sampling import (
    Sampler,
    SamplingParams,
    exponential_noise,
    position_keys,
    restrict,
    sequence_key,
    token_keys,
)
from nereus.errors import InputError

CPU = torch.device("cpu")
WORD = (1 << 64) - 1


def python_noise(seed: int, place: int, index: int, position: int, token: int) -> float:
    """The keyed Gumbel noise in plain Python integers."""

    def mix(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ (x >> 33)) * factor) & WORD
        return x

    key = 0
    for value in (seed, place, index):
        inner = mix((value + 1) * 0x9E3779B97F4A7C15 & WORD)
        key = mix(key ^ inner ^ (inner >> 33))
        key ^= key >> 33
    at = mix((key + (position + 1) * 0x9E3779B97F4A7C15) & WORD)
    of = mix((token * 0x9E3779B97F4A7C15 + 0xFF51AFD7ED558CCD) & WORD)
    uniform = ((mix((at + of) & WORD) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


def python_kept(logits: list[float], params: SamplingParams) -> list[int]:
    """Ids that temperature, top-k and top-p leave, by sorting the row."""
    scaled = [x / params.temperature for x in logits]
    ids = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p == 1:
        return ids
    mass = [math.exp(scaled[i] - scaled[ids[0]]) for i in ids]
    count, before = 0, 0.0
    while count < len(ids) and before < params.top_p * sum(mass):
        before += mass[count]
        count += 1
    return ids[:count]


def python_choice(logits: list[float], params: SamplingParams, place: int, index: int, *, position: int) -> int:
    """The next token, chosen in plain Python from a whole row of logits without ties."""
    if params.is_greedy:
        return max(range(len(logits)), key=lambda i: logits[i])
    return max(
        python_kept(logits, params),
        key=lambda i: logits[i] / params.temperature + python_noise(params.seed, place, index, position, i),
    )


def sampler_of(params: SamplingParams, num_rows: int) -> Sampler:
    return Sampler(params, first_row=0, num_rows=num_rows, tp=Group.single(), device=CPU)


def keys_of(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.tensor([sequence_key(seed, place, 0) for place in range(count)])


def test_noise_equals_the_plain_python_formula() -> None:
    sequences = [(0, 0, 0), (7, 3, 1), (2**40, 10**6, 255)]
    keys = torch.tensor([sequence_key(*sequence) for sequence in sequences])
    positions = torch.tensor([0, 5, 8191])
    noise = -exponential_noise(position_keys(keys, positions), token_keys(100, 50, CPU)).log()
    expected = [
        [python_noise(*sequence, position, 100 + token) for token in range(50)]
        for sequence, position in zip(sequences, positions.tolist(), strict=True)
    ]
    torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_noise_has_the_moments_of_a_gumbel_distribution_and_no_correlation_between_neighbours() -> None:
    keys = position_keys(keys_of(64).repeat_interleave(64), torch.arange(64).repeat(64))
    noise = -exponential_noise(keys, token_keys(0, 256, CPU)).log()  # [sequence * position, token], a million draws
    assert abs(noise.mean().item() - 0.5772156649) < 0.006
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    centred = (noise - noise.mean()).view(64, 64, 256)
    for dim in range(3):
        size = centred.shape[dim]
        product = centred.narrow(dim, 0, size - 1) * centred.narrow(dim, 1, size - 1)
        assert abs(product.mean().item()) < 0.01


@pytest.mark.parametrize("varied", ["place", "position", "seed"])
def test_draws_follow_the_softmax_whichever_key_varies(varied: str) -> None:
    draws, probabilities = 20_000, torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)
    if varied == "seed":
        keys = torch.tensor([sequence_key(seed, 1, 2) for seed in range(draws)])
    else:
        keys = keys_of(draws) if varied == "place" else keys_of(1).expand(draws)
    positions = torch.arange(draws) if varied == "position" else torch.full((draws,), 9)
    logits = (probabilities.log() * 0.7).expand(draws, -1).clone()
    tokens = sampler_of(SamplingParams(1, temperature=0.7), 6)(logits, keys, positions)
    expected = probabilities * draws
    chi_square = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum().item()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded by chance once in 1,000


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40, unique=True),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.013, 0.317, 0.77, 0.953, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_thresholds_keep_what_a_sorted_row_keeps(
    logits: list[float], top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    kept = restrict(torch.tensor([logits], dtype=dtype), top_k=top_k, top_p=top_p, tp=Group.single())[0].isfinite()
    expected = python_kept(logits, SamplingParams(1, top_k=top_k, top_p=top_p))
    assert set(kept.nonzero().squeeze(1).tolist()) == set(expected)


def test_equal_logits_at_the_threshold_are_all_kept() -> None:
    row = torch.tensor([[1.0, 0.0, -0.0, 0.0, -5.0]])
    assert restrict(row, top_k=2, top_p=1.0, tp=Group.single())[0].isfinite().tolist() == [True] * 4 + [False]


def test_equal_scores_give_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sampler_of(SamplingParams(1, greedy=True), 4)(logits, keys_of(1), torch.zeros(1).long()).tolist() == [1]


@pytest.mark.parametrize("vocab", [3, 10, 37])
@pytest.mark.parametrize("params", [SamplingParams(1, greedy=True), SamplingParams(1, top_k=4, top_p=0.9)])
def test_a_cut_vocabulary_gives_the_tokens_of_the_whole_one(vocab: int, params: SamplingParams) -> None:
    logits = torch.randn(50, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    keys, positions = keys_of(50), torch.arange(50)
    whole = sampler_of(params, vocab)(logits.clone(), keys, positions)

    def rank_main(rank: int, store: StoreFactory) -> torch.Tensor:
        tp = build_group(store(), "tp", rank=rank, size=4, timeout=timedelta(seconds=30))
        first, stop = vocab * rank // 4, vocab * (rank + 1) // 4
        sampler = Sampler(params, first_row=first, num_rows=stop - first, tp=tp, device=CPU)
        tokens = sampler(logits[:, first:stop].clone(), keys, positions)
        tp.close()
        return tokens

    for tokens in run_threads(4, rank_main):
        assert tokens.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SamplingParams(0), "max_new_tokens"),
        (lambda: SamplingParams(1, temperature=-1.0), "temperature"),
        (lambda: SamplingParams(1, temperature=math.nan), "temperature"),
        (lambda: SamplingParams(1, top_p=0.0), "top_p"),
        (lambda: SamplingParams(1, top_k=-1), "top_k"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(make: Callable[[], SamplingParams], name: str) -> None:
    with pytest.raises(InputError, match=name):
        make()

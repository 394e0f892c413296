"""KL estimates, score placement, advantage estimation and whitening against loops over samples and tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import partly_masked, ragged_batch, rows_of

from nereus.algorithms.advantages import KL_ESTIMATORS, gae, pad, place_scores, whiten

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("k1", lambda p, q: p - q),
        ("k2", lambda p, q: (p - q) ** 2 / 2),
        ("k3", lambda p, q: math.exp(q - p) - 1 - (q - p)),
    ],
)
def test_each_kl_estimate_is_its_formula(name: str, formula: object) -> None:
    assert callable(formula)
    batch = ragged_batch([40])
    p, q = batch.column("old_logprobs"), batch.column("reference_logprobs")
    expected = torch.tensor([formula(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)], dtype=torch.float64)
    torch.testing.assert_close(KL_ESTIMATORS[name](p, q), expected, rtol=1e-13, atol=1e-13)


def test_k1_and_k3_estimate_the_exact_kl_of_two_distributions() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * KL_ESTIMATORS[name](p.log(), q.log())).sum(), exact)


def test_an_extreme_log_ratio_gives_a_bounded_k3() -> None:
    apart = torch.tensor([-1000.0, -0.1], dtype=torch.float64)
    assert KL_ESTIMATORS["k3"](apart, apart.flip(0)).tolist() == [10.0, 10.0]


@given(LENGTHS)
@settings(deadline=None, max_examples=40)
def test_a_score_lands_on_the_last_token_that_counts(lengths: list[int]) -> None:
    batch = partly_masked(ragged_batch(lengths))
    scores = torch.arange(1.0, len(lengths) + 1, dtype=torch.float64)
    placed = rows_of(place_scores(scores, batch), batch)
    for i, (row, mask) in enumerate(zip(placed, rows_of(batch.response_mask, batch), strict=True)):
        valid = [t for t, counts in enumerate(mask) if counts]
        assert row == [float(i + 1) if valid and t == valid[-1] else 0.0 for t in range(len(row))]


def gae_of_one(
    rewards: list[float], values: list[float], mask: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The definition: a discounted sum over the deltas of the tokens that count, from each of them on."""
    valid = [t for t, counts in enumerate(mask) if counts]
    deltas = [
        rewards[t] + (gamma * values[valid[k + 1]] if k + 1 < len(valid) else 0.0) - values[t]
        for k, t in enumerate(valid)
    ]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(valid):
        advantages[t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


@given(LENGTHS, st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(deadline=None, max_examples=60)
def test_ragged_gae_is_its_definition_sample_by_sample(
    lengths: list[int], gamma: float, lam: float, some_masked: bool
) -> None:
    batch = ragged_batch(lengths)
    batch = partly_masked(batch) if some_masked else batch
    rewards, values = batch.column("advantages"), batch.column("values")
    advantages, returns = gae(rewards, values, batch, gamma=gamma, lam=lam)
    columns = (rewards, values, batch.response_mask, advantages, returns)
    for r, v, m, a, ret in zip(*(rows_of(c, batch) for c in columns), strict=True):
        expected_advantages, expected_returns = gae_of_one(r, v, m, gamma, lam)
        assert a == pytest.approx(expected_advantages, abs=1e-12)
        assert ret == pytest.approx(expected_returns, abs=1e-12)


def test_with_lambda_and_gamma_one_the_return_is_the_sum_of_rewards_to_come() -> None:
    batch = ragged_batch([5])
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    _, returns = gae(rewards, batch.column("values"), batch, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([7.0, 7.0, 6.0, 6.0, 4.0], dtype=torch.float64))


def test_a_masked_sample_with_nan_values_leaves_the_others_alone() -> None:
    batch = ragged_batch([3, 6, 2], fully_masked=(1,))
    alone = batch.select([0, 2])
    rewards = place_scores(batch.column("scores"), batch)
    advantages, returns = gae(rewards, batch.column("values"), batch, gamma=0.9, lam=0.8)
    expected = gae(place_scores(alone.column("scores"), alone), alone.column("values"), alone, gamma=0.9, lam=0.8)
    assert not advantages.isnan().any() and not returns.isnan().any()
    assert torch.equal(advantages[batch.response_mask], expected[0])
    assert torch.equal(returns[batch.response_mask], expected[1])


def test_padding_puts_each_row_at_the_start_of_its_line() -> None:
    padded = pad(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1]))
    assert padded.tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]


def test_whitening_gives_mean_zero_and_variance_one_over_what_counts() -> None:
    batch = partly_masked(ragged_batch([30, 20, 11], fully_masked=(1,)))
    column, mask = batch.column("advantages"), batch.response_mask
    whitened = whiten(column, mask)
    valid = column[mask].tolist()
    mean = sum(valid) / len(valid)
    variance = sum((x - mean) ** 2 for x in valid) / (len(valid) - 1)
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in valid]
    assert whitened[mask].tolist() == pytest.approx(expected, abs=1e-12)
    assert whitened[~mask].abs().max() == 0


def test_whitening_of_nothing_or_of_one_value_is_zero() -> None:
    column = torch.tensor([3.0, 5.0])
    assert whiten(column, torch.tensor([False, False])).tolist() == [0.0, 0.0]
    assert whiten(column, torch.tensor([True, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_inputs_is_kept(dtype: torch.dtype) -> None:
    batch = ragged_batch([4, 2])
    values = batch.column("values").to(dtype)
    rewards = place_scores(batch.column("scores").to(dtype), batch)
    advantages, returns = gae(rewards, values, batch, gamma=0.9, lam=0.9)
    assert {rewards.dtype, advantages.dtype, returns.dtype, whiten(advantages, batch.response_mask).dtype} == {dtype}

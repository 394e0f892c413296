"""Each objective against its formula written as a loop over samples and tokens in plain Python."""

import math
import pickle

import pytest
import torch
from rollout_cases import partly_masked, ragged_batch, rows_of

from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.losses import Aggregation, clipped_policy_terms, token_weights
from nereus.algorithms.objectives import (
    BernoulliRewardObjective,
    LikelihoodObjective,
    PolicyObjective,
    ValueObjective,
)
from nereus.algorithms.types import GlobalCounts, OutputKind, Outputs

AGGREGATIONS = list(Aggregation)


def case() -> RolloutBatch:
    return partly_masked(ragged_batch([5, 1, 9, 4, 7, 2], seed=3, fully_masked=(3,)), seed=1)


def model_column(batch: RolloutBatch, seed: int, scale: float = 0.7, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_response_tokens, generator=generator, dtype=torch.float64) * scale + shift


def aggregate(rows: list[list[float]], aggregation: Aggregation) -> float:
    """rows: the losses of the tokens that count, one list for each sample."""
    rows = [row for row in rows if row]
    if aggregation is Aggregation.TOKEN_MEAN:
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation is Aggregation.SEQUENCE_MEAN:
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows)


def valid_rows(column: torch.Tensor, batch: RolloutBatch) -> list[list[float]]:
    masks = rows_of(batch.response_mask, batch)
    return [
        [x for x, counts in zip(row, mask, strict=True) if counts]
        for row, mask in zip(rows_of(column, batch), masks, strict=True)
    ]


def token_by_token(formula: object, batch: RolloutBatch, *columns: torch.Tensor) -> list[list[float]]:
    assert callable(formula)
    per_sample = zip(*(valid_rows(column, batch) for column in columns), strict=True)
    return [[formula(*values) for values in zip(*rows, strict=True)] for rows in per_sample]


def slow_policy_loss(new: float, old: float, advantage: float) -> float:
    ratio = math.exp(new - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    return min(loss, -advantage * 2.0) if advantage < 0 else loss


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_loss_with_entropy_and_kl_is_its_formula(aggregation: Aggregation) -> None:
    batch = case()
    logprobs, entropy = model_column(batch, 5, shift=-2.4), model_column(batch, 6).abs()
    objective = PolicyObjective(
        counts=batch.counts,
        aggregation=aggregation,
        clip_low=0.2,
        clip_high=0.3,
        clip_ratio_c=2.0,
        entropy_coeff=0.01,
        kl_loss_coef=0.05,
        kl_loss_type="k3",
    )
    loss, metrics = objective(Outputs(logprobs=logprobs, entropy=entropy), batch)
    old, reference = batch.column("old_logprobs"), batch.column("reference_logprobs")
    policy = aggregate(token_by_token(slow_policy_loss, batch, logprobs, old, batch.column("advantages")), aggregation)
    kl = token_by_token(lambda p, q: math.exp(q - p) - (q - p) - 1, batch, logprobs, reference)
    expected_kl = aggregate(kl, aggregation)
    expected_entropy = aggregate(valid_rows(entropy, batch), aggregation)
    assert metrics["actor/pg_loss"].item() == pytest.approx(policy, abs=1e-13)
    assert metrics["actor/kl_loss"].item() == pytest.approx(expected_kl, abs=1e-13)
    assert metrics["actor/entropy"].item() == pytest.approx(expected_entropy, abs=1e-13)
    assert loss.item() == pytest.approx(policy - 0.01 * expected_entropy + 0.05 * expected_kl, abs=1e-13)


def test_policy_metrics_are_means_over_tokens() -> None:
    batch = case()
    logprobs, advantages = model_column(batch, 5, shift=-2.4), batch.column("advantages")
    objective = PolicyObjective(counts=batch.counts, clip_ratio_c=1.5)
    _, metrics = objective(Outputs(logprobs=logprobs), batch)
    ratios = token_by_token(lambda new, old: new - old, batch, logprobs, batch.column("old_logprobs"))
    pairs = [
        (math.exp(d), a)
        for row, of_sample in zip(ratios, valid_rows(advantages, batch), strict=True)
        for d, a in zip(row, of_sample, strict=True)
    ]
    clipped = [(r > 1.2 and a > 0) or (r < 0.8 and a < 0) for r, a in pairs]
    lower = [a < 0 and max(r, 0.8) > 1.5 for r, a in pairs]
    assert any(clipped) and any(lower)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(sum(clipped) / len(pairs))
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(sum(lower) / len(pairs))
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-sum(math.log(r) for r, _ in pairs) / len(pairs))


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    new, old = torch.tensor([0.0, -2000.0]), torch.tensor([-2000.0, 0.0])
    terms = clipped_policy_terms(new, old, torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, clip_ratio_c=3.0)
    torch.testing.assert_close(terms.losses, torch.tensor([3.0, 0.8]))


def slow_value_loss(value: float, old: float, target: float) -> float:
    bounded = min(max(value, old - 0.4), old + 0.4)
    return max((value - target) ** 2, (bounded - target) ** 2) / 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss_is_its_formula(aggregation: Aggregation) -> None:
    batch = case()
    values, old, returns = model_column(batch, 8), batch.column("values"), batch.column("returns")
    objective = ValueObjective(counts=batch.counts, aggregation=aggregation, cliprange_value=0.4)
    loss, metrics = objective(Outputs(values=values), batch)
    expected = aggregate(token_by_token(slow_value_loss, batch, values, old, returns), aggregation)
    plain = token_by_token(lambda v, r: (v - r) ** 2 / 2, batch, values, returns)
    clipped = [
        slow > fast
        for slow_row, fast_row in zip(token_by_token(slow_value_loss, batch, values, old, returns), plain, strict=True)
        for slow, fast in zip(slow_row, fast_row, strict=True)
    ]
    assert any(clipped) and not all(clipped)
    assert loss.item() == pytest.approx(expected, abs=1e-13)
    assert metrics["critic/vf_loss"].item() == loss.item()
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(sum(clipped) / len(clipped))
    assert metrics["critic/vpred_mean"].item() == pytest.approx(
        aggregate(valid_rows(values, batch), Aggregation.TOKEN_MEAN)
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_likelihood_is_the_mean_of_negative_logprobs(aggregation: Aggregation) -> None:
    batch = case()
    logprobs = model_column(batch, 9, shift=-1.0)
    loss, _ = LikelihoodObjective(counts=batch.counts, aggregation=aggregation)(Outputs(logprobs=logprobs), batch)
    assert loss.item() == pytest.approx(-aggregate(valid_rows(logprobs, batch), aggregation), abs=1e-13)


def test_reward_objective_is_the_cross_entropy_of_samples_that_count() -> None:
    batch = ragged_batch([3, 4, 2, 5], fully_masked=(1,)).with_columns(
        scores=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    )
    logits = torch.tensor([0.3, math.nan, -0.7, 1.9], dtype=torch.float64)
    loss, metrics = BernoulliRewardObjective(counts=batch.counts)(Outputs(scores=logits), batch)
    right = [1 / (1 + math.exp(-0.3)), 1 - 1 / (1 + math.exp(0.7)), 1 - 1 / (1 + math.exp(-1.9))]
    assert loss.item() == pytest.approx(-sum(map(math.log, right)) / 3)
    assert metrics["reward/accuracy"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_weights_of_a_batch_sum_to_one_or_to_the_mean_length(aggregation: Aggregation) -> None:
    batch = case()
    total = token_weights(batch, aggregation, batch.counts, dtype=torch.float64).sum().item()
    mean_length = batch.counts.tokens / batch.counts.sequences
    assert total == pytest.approx(mean_length if aggregation is Aggregation.SEQUENCE_SUM else 1.0)


OBJECTIVES = [
    PolicyObjective(counts=GlobalCounts(1, 1), entropy_coeff=0.1, kl_loss_coef=0.1),
    ValueObjective(counts=GlobalCounts(1, 1)),
    LikelihoodObjective(counts=GlobalCounts(1, 1)),
    BernoulliRewardObjective(counts=GlobalCounts(1, 1)),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("lengths", [[4, 6], []])
def test_a_fully_masked_or_empty_batch_gives_zero_loss_zero_gradient_and_all_metrics(
    objective: PolicyObjective, lengths: list[int]
) -> None:
    batch = ragged_batch(lengths, fully_masked=(0, 1))
    assert batch.counts == GlobalCounts(0, 0)
    leaf = torch.zeros(batch.num_response_tokens, dtype=torch.float64, requires_grad=True)
    of_samples = torch.zeros(batch.num_samples, dtype=torch.float64, requires_grad=True)
    loss, metrics = objective(
        Outputs(logprobs=leaf * 2, entropy=leaf * 3, values=leaf * 4, scores=of_samples * 5), batch
    )
    loss.backward()  # type: ignore[no-untyped-call]
    used = of_samples if objective.output is OutputKind.SCORES else leaf
    assert loss.item() == 0 and used.grad is not None and not used.grad.any()
    usual = ragged_batch([2, 3])
    column = torch.zeros(5, dtype=torch.float64)
    _, usual_metrics = objective(Outputs(logprobs=column, entropy=column, values=column, scores=column[:2]), usual)
    assert list(metrics) == list(usual_metrics)
    assert not any(value.requires_grad or value.isnan() for value in metrics.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_travels_to_a_worker(objective: PolicyObjective) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective

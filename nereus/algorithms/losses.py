"""The formulas of the losses, by token, and the weights that make their sums means over the global batch.

All functions are elementwise or act within a sample, on flat response columns; none reduces over the batch, so none
knows how the batch is split. The dtype is that of the inputs.
"""

import dataclasses
import enum

import torch

from nereus.algorithms.advantages import LOG_RATIO_BOUND
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import GlobalCounts

__all__ = [
    "Aggregation",
    "PolicyTerms",
    "ValueTerms",
    "clipped_policy_terms",
    "clipped_value_terms",
    "token_weights",
]


class Aggregation(enum.StrEnum):
    """How losses by token become one number; `actor.loss_agg_mode`."""

    TOKEN_MEAN = "token-mean"
    """Every token that counts weighs the same."""
    SEQUENCE_MEAN = "sequence-mean"
    """Every sequence weighs the same, and within it every token; verl's seq-mean-token-mean."""
    SEQUENCE_SUM = "sequence-sum"
    """The mean over sequences of their sums over tokens; verl's seq-mean-token-sum."""


def token_weights(
    batch: RolloutBatch, aggregation: Aggregation, counts: GlobalCounts, *, dtype: torch.dtype
) -> torch.Tensor:
    """[T]: the weight of each response token, such that sum(weights * losses) over all pieces of the batch is its loss.

    counts: those of the whole (mini-)batch. Masked tokens weigh nothing, fully masked samples therefore nothing too
    and they are not counted as sequences.
    """
    mask = batch.response_mask.to(dtype)
    if aggregation is Aggregation.TOKEN_MEAN:
        return mask / max(counts.tokens, 1)
    if aggregation is Aggregation.SEQUENCE_SUM:
        return mask / max(counts.sequences, 1)
    of_sequence = batch.valid_lengths.clamp(min=1)[batch.sample_of_token]
    return mask / of_sequence / max(counts.sequences, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The clipped policy loss by token, all [T]."""

    losses: torch.Tensor
    log_ratio: torch.Tensor  # log of new over old probability
    clipped: torch.Tensor  # bool: the clipped ratio made the loss
    clipped_lower: torch.Tensor  # bool: the dual clip did


def clipped_policy_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> PolicyTerms:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and at most -clip_ratio_c A where A < 0.

    The surrogate of PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476) and the dual clip
    (arXiv 1912.09729, equation 5). All inputs [T].
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(plain, bounded)
    ceiling = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(ceiling, pessimistic), pessimistic)
    return PolicyTerms(losses, log_ratio, bounded > plain, (pessimistic > ceiling) & (advantages < 0))


@dataclasses.dataclass(frozen=True, slots=True)
class ValueTerms:
    """The clipped value loss by token, all [T]."""

    losses: torch.Tensor
    clipped: torch.Tensor  # bool


def clipped_value_terms(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange_value: float
) -> ValueTerms:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; all inputs [T]."""
    bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    plain_errors, bounded_errors = (values - returns).square(), (bounded - returns).square()
    return ValueTerms(0.5 * torch.maximum(plain_errors, bounded_errors), bounded_errors > plain_errors)

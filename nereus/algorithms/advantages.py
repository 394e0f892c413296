"""From scores to advantages: KL estimates, rewards by token, generalized advantage estimation, whitening.

Everything runs on the driver over the whole batch in global order, so nothing here depends on the plan. Columns are
flat over the response tokens ([T], ragged rows); tokens whose mask is not set get zero and influence nothing, whatever
their values are. The dtype is that of the inputs.
"""

from collections.abc import Callable

import torch

from nereus.algorithms.buffer import RolloutBatch, starts

__all__ = ["KL_ESTIMATORS", "gae", "kl_k1", "kl_k2", "kl_k3", "pad", "place_scores", "whiten"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before they are exponentiated, as in verl."""
K3_BOUND = 10.0
"""The k3 estimate of one token is clamped to this, as in verl."""
WHITEN_EPSILON = 1e-8


def kl_k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / q) of tokens drawn from p: unbiased, of either sign."""
    return logprobs - reference_logprobs


def kl_k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / q)^2 / 2: biased, never negative."""
    return 0.5 * (logprobs - reference_logprobs).square()


def kl_k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """q / p - 1 - log(q / p): unbiased, never negative (Schulman, "Approximating KL divergence", 2020)."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (log_ratio.exp() - log_ratio - 1.0).clamp(-K3_BOUND, K3_BOUND)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimates by token, under Schulman's names (verl's kl, mse and low_var_kl)."""


def pad(column: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T] -> [N, longest], zero behind each row's end."""
    padded = column.new_zeros(lengths.numel(), int(lengths.max()) if lengths.numel() else 0)
    padded[positions(lengths)] = column
    return padded


def positions(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and place in the row of each element of a flat ragged column; both [T]."""
    rows = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    return rows, torch.arange(rows.numel(), device=lengths.device) - starts(lengths)[rows]


def place_scores(scores: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """[N] -> [T]: each sample's score at its last token that counts, zero elsewhere; a fully masked one has none."""
    rows, places = positions(batch.response_lengths)
    last = torch.full_like(batch.response_lengths, -1).scatter_reduce(
        0, rows, torch.where(batch.response_mask, places, -1), reduce="amax"
    )
    return torch.where(places == last[rows], scores[rows], 0)


def gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    batch: RolloutBatch,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by token, both [T] (Schulman et al., arXiv 1506.02438, equation 16).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, R_t = A_t + V_t. Masked tokens are stepped
    over: the next token is the next one that counts. Nothing follows a response, cut off by the limit or not.
    """
    mask = pad(batch.response_mask, batch.response_lengths)  # [N, L]
    rewards = pad(token_rewards, batch.response_lengths)
    estimates = pad(values, batch.response_lengths)
    advantages = torch.zeros_like(estimates)
    next_advantage = estimates.new_zeros(batch.num_samples)
    next_value = estimates.new_zeros(batch.num_samples)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - estimates[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], estimates[:, t], next_value)
        advantages[:, t] = next_advantage
    flat = advantages[positions(batch.response_lengths)]
    return torch.where(batch.response_mask, flat, 0), torch.where(batch.response_mask, flat + values, 0)


def whiten(column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale the masked elements to mean 0 and (unbiased) variance 1; zero elsewhere. Both [T]."""
    valid = column[mask]
    if valid.numel() == 0:
        return torch.zeros_like(column)
    centred = valid - valid.mean()
    variance = centred.square().sum() / max(valid.numel() - 1, 1)
    whitened = torch.zeros_like(column)
    whitened[mask] = centred * torch.rsqrt(variance + WHITEN_EPSILON)
    return whitened

"""The objectives that engines minimize: what each needs from the model, and its part of loss and metrics.

They are values (frozen, picklable) made on the driver for one update and sent to its workers. Masked tokens are dropped
before any formula sees them, so what a masked token holds cannot reach a loss or a gradient.
"""

import dataclasses

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from nereus.algorithms.advantages import KL_ESTIMATORS
from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.losses import (
    Aggregation,
    clipped_policy_terms,
    clipped_value_terms,
    token_weights,
)
from nereus.algorithms.types import GlobalCounts, OutputKind, Outputs

__all__ = ["BernoulliRewardObjective", "LikelihoodObjective", "PolicyObjective", "ValueObjective"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """The actor's loss: clipped policy loss - entropy_coeff x entropy + kl_loss_coef x KL to the reference.

    Reads old_logprobs and advantages, and reference_logprobs where there is a KL term (without one they are
    reported if the batch has them).
    """

    counts: GlobalCounts
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"

    @property
    def output(self) -> OutputKind:
        return OutputKind.LOGPROBS

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coeff != 0

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs is not None
        mask = micro.response_mask
        logprobs = outputs.logprobs[mask]
        weights = token_weights(micro, self.aggregation, self.counts, dtype=logprobs.dtype)[mask]
        terms = clipped_policy_terms(
            logprobs,
            micro.column("old_logprobs")[mask],
            micro.column("advantages")[mask],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_ratio_c=self.clip_ratio_c,
        )
        loss = (weights * terms.losses).sum()
        metrics = {
            "actor/pg_loss": loss,
            "actor/ppo_kl": token_mean(-terms.log_ratio, self.counts),
            "actor/pg_clipfrac": token_mean(terms.clipped.to(loss.dtype), self.counts),
            "actor/pg_clipfrac_lower": token_mean(terms.clipped_lower.to(loss.dtype), self.counts),
        }
        if self.needs_entropy:
            assert outputs.entropy is not None
            metrics["actor/entropy"] = (weights * outputs.entropy[mask]).sum()
            loss = loss - self.entropy_coeff * metrics["actor/entropy"]
        if self.kl_loss_coef != 0 or micro.reference_logprobs is not None:
            kl = KL_ESTIMATORS[self.kl_loss_type](logprobs, micro.column("reference_logprobs")[mask])
            metrics["actor/kl_loss"] = (weights * kl).sum()
            loss = loss + self.kl_loss_coef * metrics["actor/kl_loss"]
        return loss, detached(metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueObjective(Objective):
    """The critic's loss: half the squared error to the returns, clipped around the old values.

    Reads values and returns.
    """

    counts: GlobalCounts
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    cliprange_value: float = 0.5

    @property
    def output(self) -> OutputKind:
        return OutputKind.VALUES

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.values is not None
        mask = micro.response_mask
        values = outputs.values[mask]
        terms = clipped_value_terms(
            values,
            micro.column("values")[mask],
            micro.column("returns")[mask],
            cliprange_value=self.cliprange_value,
        )
        weights = token_weights(micro, self.aggregation, self.counts, dtype=values.dtype)[mask]
        loss = (weights * terms.losses).sum()
        metrics = {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": token_mean(terms.clipped.to(loss.dtype), self.counts),
            "critic/vpred_mean": token_mean(values, self.counts),
        }
        return loss, detached(metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikelihoodObjective(Objective):
    """Supervised warm start: the negative log-likelihood of the response tokens."""

    counts: GlobalCounts
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    @property
    def output(self) -> OutputKind:
        return OutputKind.LOGPROBS

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.logprobs is not None
        mask = micro.response_mask
        weights = token_weights(micro, self.aggregation, self.counts, dtype=outputs.logprobs.dtype)[mask]
        loss = -(weights * outputs.logprobs[mask]).sum()
        return loss, detached({"train/loss": loss})


@dataclasses.dataclass(frozen=True, kw_only=True)
class BernoulliRewardObjective(Objective):
    """A reward model on right and wrong answers: its score is the logit that the answer is right.

    Reads scores: 1 for right, 0 for wrong.
    """

    counts: GlobalCounts

    @property
    def output(self) -> OutputKind:
        return OutputKind.SCORES

    def __call__(self, outputs: Outputs, micro: RolloutBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.scores is not None
        kept = micro.valid_lengths > 0
        logits = outputs.scores[kept]
        labels = micro.column("scores")[kept].to(logits.dtype)
        num_sequences = max(self.counts.sequences, 1)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / num_sequences
        right = ((logits > 0) == (labels > 0.5)).to(logits.dtype)
        return loss, detached({"reward/loss": loss, "reward/accuracy": right.sum() / num_sequences})


def token_mean(column: torch.Tensor, counts: GlobalCounts) -> torch.Tensor:
    """A piece's part of the mean over all tokens that count; the column is already without the others."""
    return column.sum() / max(counts.tokens, 1)


def detached(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in metrics.items()}

"""What a step reports of its batch, under verl's names. Computed on the driver over the whole batch."""

import torch

from nereus.algorithms.buffer import RolloutBatch
from nereus.planner.workload import P95, LengthSummary

__all__ = ["batch_metrics", "explained_variance", "length_metrics", "length_summary"]


def length_summary(batch: RolloutBatch) -> LengthSummary:
    """How long the batch's responses and prompts are, in tokens."""
    responses = batch.response_lengths.to(torch.float64)
    return LengthSummary(
        mean=float(responses.mean()),
        p95=float(responses.quantile(P95)),
        longest=float(responses.max()),
        prompt_mean=float(batch.prompt_lengths.to(torch.float64).mean()),
        shortest=float(responses.min()),
        cut_share=float((~batch.finished).to(torch.float64).mean()),
    )


def length_metrics(batch: RolloutBatch, lengths: LengthSummary) -> dict[str, float]:
    """Lengths of a batch and their summary under verl's names.

    response_length/clip_ratio is the share of responses that the length limit cut off.
    """
    return {
        **spread("prompt_length", batch.prompt_lengths),
        "response_length/mean": lengths.mean,
        "response_length/max": lengths.longest,
        "response_length/min": lengths.shortest,
        "response_length/p95": lengths.p95,
        "response_length/clip_ratio": lengths.cut_share,
    }


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Mean, maximum and minimum of scores, rewards, advantages, returns and values, as far as they are there.

    Scores and rewards are by sample, the others by token that counts.
    """
    metrics: dict[str, float] = {}
    if batch.scores is not None:
        metrics |= spread("critic/score", batch.scores)
    if batch.token_rewards is not None:
        metrics |= spread("critic/rewards", batch.sum_by_sample(batch.token_rewards))
    if batch.counts.tokens == 0:
        return metrics
    mask = batch.response_mask
    for name in ("advantages", "returns", "values"):
        column = getattr(batch, name)
        if column is not None:
            metrics |= spread(f"critic/{name}", column[mask])
    if batch.values is not None and batch.returns is not None:
        metrics["critic/vf_explained_var"] = explained_variance(batch.values[mask], batch.returns[mask])
    return metrics


def spread(name: str, column: torch.Tensor) -> dict[str, float]:
    column = column.to(torch.float64)
    return {
        f"{name}/mean": float(column.mean()),
        f"{name}/max": float(column.max()),
        f"{name}/min": float(column.min()),
    }


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - var(R - V) / (var(R) + 1e-5): 1 for a perfect critic, 0 for a constant one."""
    values, returns = values.to(torch.float64), returns.to(torch.float64)
    unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
    return 1.0 - float(unexplained)

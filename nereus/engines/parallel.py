"""Tensor-parallel pieces with explicit autograd collectives: embedding and log-probabilities over a cut vocabulary.

A group of size 1 costs nothing: every function then skips its collective. The whole row of logits never exists on
one rank under tensor parallelism; maxima, sums and picked entries travel instead.
"""

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nereus.comm.groups import Group


class _CopyToRanks(Function):
    """Identity forward, sum over the group backward: enters a region that each rank computes a part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        ctx.group.all_reduce(grad)
        return grad, None


class _SumOverRanks(Function):
    """Sum over the group forward, identity backward: leaves a region that each rank computed a part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        x = x.contiguous().clone()
        group.all_reduce(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself; its gradient is summed over the group."""
    if group.size == 1:
        return x
    if not x.requires_grad:
        return x
    result: torch.Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of every rank's `x`; its gradient passes through."""
    if group.size == 1:
        return x
    if not x.requires_grad:
        x = x.contiguous()
        group.all_reduce(x)
        return x
    result: torch.Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def embed(tokens: torch.Tensor, weight: torch.Tensor, first_row: int, group: Group) -> torch.Tensor:
    """Embeddings [T, H] of tokens [T]; `weight` [rows, H] holds rows from `first_row` of the cut vocabulary."""
    if group.size == 1:
        return functional.embedding(tokens, weight)
    local = tokens - first_row
    outside = (local < 0) | (local >= weight.shape[0])
    if weight.shape[0] == 0:
        rows = weight.new_zeros(*tokens.shape, weight.shape[1]) + weight.sum() * 0
    else:
        rows = functional.embedding(local.masked_fill(outside, 0), weight)
    return sum_over_ranks(rows.masked_fill(outside.unsqueeze(-1), 0), group)


class _TokenStatistics(Function):
    """Log-probability of each target and entropy of each row from logits cut along the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first_row: int, group: Group, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_local = logits.shape
        top = logits.amax(-1) if num_local else logits.new_full((num_rows,), -torch.inf)
        group.all_reduce(top, op="max")
        shifted = logits - top.unsqueeze(-1)  # [R, V/tp]
        local = targets - first_row
        inside = (local >= 0) & (local < num_local)
        safe = local.masked_fill(~inside, 0).unsqueeze(-1)
        picked = shifted.gather(-1, safe).squeeze(-1) if num_local else top
        picked = torch.where(inside, picked, torch.zeros_like(picked))
        weights = shifted.exp()
        sums = [weights.sum(-1), picked]
        if with_entropy:
            sums.append((weights * shifted).sum(-1))
        packed = torch.stack(sums)
        group.all_reduce(packed)
        total = packed[0]
        mean = packed[2] / total if with_entropy else torch.zeros_like(total)  # E[shifted logit]
        log_total = total.log()
        probabilities = weights.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, safe, inside, shifted if with_entropy else mean, mean)
        ctx.with_entropy = with_entropy
        entropy = log_total - mean if with_entropy else torch.zeros_like(total)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return packed[1] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, safe, inside, shifted, mean = ctx.saved_tensors
        coefficient = grad_logprob
        if ctx.with_entropy:
            factor = shifted.sub_(mean.unsqueeze(-1)).mul_(grad_entropy.unsqueeze(-1))
            grad = probabilities * -(factor + coefficient.unsqueeze(-1))
        else:
            grad = probabilities.mul_(-coefficient.unsqueeze(-1))
        if grad.shape[-1]:
            grad.scatter_add_(-1, safe, (coefficient * inside).unsqueeze(-1))
        return grad, None, None, None, None


def token_statistics(
    logits: torch.Tensor, targets: torch.Tensor, *, first_row: int, group: Group, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities [R], entropies [R]) from local logits [R, V/tp] and targets [R].

    Entropies are zeros without `with_entropy`. Differentiable in the logits; each rank gets the gradient of its part.
    """
    logprobs, entropy = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        logits, targets, first_row, group, with_entropy
    )
    return logprobs, entropy

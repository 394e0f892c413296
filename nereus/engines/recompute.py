"""Norms and linear layers that compute again in the backward pass what is cheap to make, instead of keeping it.

What comes before a layer's large products (a norm, the gated activation) costs one pass over memory to make, and its
results are the larger part of what autograd would keep. Nothing here knows models or parallelism: what `make` does, its
collectives included, is done again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

Tensors = tuple[torch.Tensor | None, ...]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class _RmsNorm(Function):
    """`functional.rms_norm` that keeps its input alone, not the normalized one beside it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        narrow = x.dtype == torch.bfloat16
        wide, factors = (x.float(), weight.float()) if narrow else (x, weight)
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(ctx.eps).rsqrt_()
        normalized = wide * scale
        products = grad * normalized
        shares = (products @ factors).unsqueeze(-1)
        grad_x = torch.addcmul(grad * factors, normalized, shares, value=-1 / x.shape[-1]).mul_(scale)
        return grad_x.to(x.dtype), products.flatten(0, -2).sum(0).to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over its root mean square, times weight [H]; keeps x alone for the backward (CUDA's kernel does)."""
    if x.device.type != "cpu" or not x.requires_grad:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    result: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _LinearAfter(Function):
    """`linear(make(*inputs), weight, bias)`; keeps the inputs of `make`, not what it makes."""

    @staticmethod
    def forward(
        ctx: Any,
        linear: Linear,
        make: Callable[..., torch.Tensor],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.make, ctx.has_bias = make, bias is not None
        ctx.save_for_backward(weight, *inputs)
        return linear(make(*inputs), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weight, *kept = ctx.saved_tensors
        inputs = [None if x is None else x.detach().requires_grad_() for x in kept]
        with torch.enable_grad():
            made = ctx.make(*inputs)
        grads = iter(torch.autograd.grad(made, [x for x in inputs if x is not None], grad @ weight))
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return None, None, grad.t() @ made, grad_bias, *(None if x is None else next(grads) for x in inputs)


def linear_after(
    linear: Linear,
    make: Callable[..., torch.Tensor],
    inputs: Tensors,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear(make(*inputs), weight, bias)` [T, out] for weight [out, in], which keeps only `inputs` for the backward.

    make: differentiable in every input it is given; gives the same again for the same inputs.
    """
    result: torch.Tensor = _LinearAfter.apply(  # type: ignore[no-untyped-call]
        linear, make, weight, bias, *inputs
    )
    return result

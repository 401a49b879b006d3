"""Interactions of a sample's embeddings as functions of autograd: FM and dot interactions, concat norms.

Kernels are those of the package's `fused`, by name: one forward, one backward, and `reduce` for the gradients of
vectors and small matrices, which come as partial sums. None stands for a tensor that the layer does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.dispatch.runtime import joined_dtype, output_dtype, reduced


def fm_interaction(
    fused: Any, forward: str, backward: str, passes: bool, x: Tensor, rank: Tensor, compress: Tensor | None = None
) -> Any:
    """All pairs of a sample's embeddings x (B, n, d) at low rank: x @ (x^T @ rank), (B, n, r), with rank (n, r).

    compress (c, n) makes weighted sums, too: compress @ x, (B, c, d). `passes`: x itself is the last result, for the
    sum that adds it.
    """
    dtype = output_dtype(x, rank, *_given(compress))
    return FmInteractionFunction.apply(fused, forward, backward, passes, dtype, x, rank, compress)  # type: ignore[no-untyped-call]


class FmInteractionFunction(torch.autograd.Function):
    """See `fm_interaction`. Without *args: in their presence Dynamo may take `ctx` for superfluous."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: Any,
        forward: str,
        backward: str,
        passes: bool,
        dtype: torch.dtype,
        x: Tensor,
        rank: Tensor,
        compress: Tensor | None,
    ) -> Any:
        ctx.fused, ctx.kernel, ctx.x_dtype = fused, backward, x.dtype
        samples, weights = x.to(dtype), [rank, *_given(compress)]
        ctx.save_for_backward(samples, *weights)
        made = getattr(fused, forward)(samples, *[weight.to(dtype) for weight in weights])
        results = (made,) if compress is None else tuple(made)
        results = (*results, x.view_as(x)) if passes else results
        return results if len(results) > 1 else results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        samples, *weights = ctx.saved_tensors
        made, passed = grads[: len(weights)], grads[len(weights) :]
        read = [weight.to(samples.dtype) for weight in weights]
        dx, *sums = getattr(ctx.fused, ctx.kernel)(*made, samples, *read, *passed)
        dweights = reduced(ctx.fused.reduce, sums, [weight.dtype for weight in weights])
        views = [grad.view(weight.shape) for grad, weight in zip(dweights, weights, strict=True)]
        return *[None] * 5, dx.to(ctx.x_dtype), *views, *[None] * (2 - len(weights))


def concat_norm(
    fused: Any,
    forward: str,
    backward: str,
    parts: Sequence[Tensor],
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The norm of parts (B, n_i, d) one after another, plus the residual: (B, n, d), n the sum of all rows."""
    dtype = joined_dtype(*parts, *_given(residual))
    out: Tensor = ConcatNormFunction.apply(fused, forward, backward, dtype, residual, weight, bias, *parts)  # type: ignore[no-untyped-call]
    return out


class ConcatNormFunction(torch.autograd.Function):
    """See `concat_norm`."""

    @staticmethod
    def forward(ctx: Any, fused: Any, forward: str, backward: str, dtype: torch.dtype, *tensors: Any) -> Any:
        residual, weight, bias, *parts = tensors
        ctx.fused, ctx.kernel, ctx.parts = fused, backward, len(parts)
        out, *statistics = getattr(fused, forward)(*parts, *_given(residual, weight, bias), dtype)
        ctx.save_for_backward(residual, weight, bias, *parts, *statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        residual, weight, bias, *others = ctx.saved_tensors
        parts, statistics = others[: ctx.parts], others[ctx.parts :]
        vectors = _given(weight, bias)
        made = getattr(ctx.fused, ctx.kernel)(grad, *parts, *_given(residual, weight), *statistics)
        dx, *sums = made if vectors else [made]
        totals = iter(reduced(ctx.fused.reduce, sums, [vector.dtype for vector in vectors]) if vectors else ())
        dparts = [dx] if ctx.parts == 1 else dx.split([part.shape[1] for part in parts], 1)
        return (
            *[None] * 4,
            None if residual is None else dx.to(residual.dtype),
            None if weight is None else next(totals),
            None if bias is None else next(totals),
            *[dpart.to(part.dtype) for dpart, part in zip(dparts, parts, strict=True)],
        )


def dot_interaction(fused: Any, forward: str, backward: str, x: Tensor) -> Tensor:
    """The products of all pairs of a sample's embeddings, x @ x^T: x (B, n, d) -> (B, n, n)."""
    y: Tensor = DotInteractionFunction.apply(fused, forward, backward, output_dtype(x), x)  # type: ignore[no-untyped-call]
    return y


class DotInteractionFunction(torch.autograd.Function):
    """See `dot_interaction`."""

    @staticmethod
    def forward(ctx: Any, fused: Any, forward: str, backward: str, dtype: torch.dtype, x: Tensor) -> Any:
        ctx.fused, ctx.kernel, ctx.x_dtype = fused, backward, x.dtype
        samples = x.to(dtype)
        ctx.save_for_backward(samples)
        return getattr(fused, forward)(samples)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (samples,) = ctx.saved_tensors
        dx = getattr(ctx.fused, ctx.kernel)(grad, samples)
        return *[None] * 4, dx.to(ctx.x_dtype)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]

"""What a generated kernels.py looks like: quantizers, one autograd function a recipe, linears."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.dispatch import Weight, linear, scaled_mm

STAMP = "0" * 64


def e4m3_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x (R, C) as e4m3, with float32 scales (R, 1)."""
    amax = x.abs().amax(dim=1, keepdim=True).float() if x.shape[1] else x.new_zeros((x.shape[0], 1)).float()
    scale = torch.clamp(amax, min=1e-12) / 448.0
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).contiguous(), scale


class LinearE4m3Rowwise(torch.autograd.Function):
    """y = x @ weight.T with all three GEMMs in e4m3, rowwise."""

    @staticmethod
    def product(x, weight, scale, out_dtype, counter_id):
        xq, xs = e4m3_rowwise(x)
        return scaled_mm(xq, xs, weight, scale, "rowwise", "rowwise", out_dtype, False, counter_id)

    @staticmethod
    def forward(ctx, x, weight, out_dtype, counter_id):
        ctx.save_for_backward(x, weight)
        ctx.counter_id = counter_id
        return LinearE4m3Rowwise.product(x, *e4m3_rowwise(weight), out_dtype, counter_id)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dq, ds = e4m3_rowwise(dy)
            wq, ws = e4m3_rowwise(weight.t())
            dx = scaled_mm(dq, ds, wq, ws, "rowwise", "rowwise", x.dtype, False, ctx.counter_id + 1)
        if ctx.needs_input_grad[1]:
            dq, ds = e4m3_rowwise(dy.t())
            xq, xs = e4m3_rowwise(x.t())
            dw = scaled_mm(dq, ds, xq, xs, "rowwise", "rowwise", weight.dtype, False, ctx.counter_id + 2)
        return dx, dw, None, None


def linear_e4m3_rowwise(x: Tensor, weight: Weight, bias: Tensor | None, counter_id: int) -> Tensor:
    """F.linear: x (..., K) -> (..., N)."""
    return linear(LinearE4m3Rowwise, x, weight, bias, counter_id)

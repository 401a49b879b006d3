"""The FP8 arithmetic of ranker.yaml: quantisers, linears, regions.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

A quantiser works along the last dimension of a matrix and returns FP8 values and float32 scales; a value stands for
`value * scale`. `dispatch.scaled_mm(a, scale_a, b, scale_b, ...)` is `(a * scale_a) @ (b * scale_b).T`, so each GEMM
quantises both of its operands along the dimension that it sums over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka import dispatch

STAMP = "e73321f904d70582b4355e13a43043e39200611ee0d27e7874bc613412e5b63f"

E4M3_MAX = 448.0  # largest finite value
AMAX_FLOOR = 2.0**-100  # keeps the scale of a zero block positive


def e4m3_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, C) in e4m3, one scale a row: FP8 values (R, C), scales (R, 1)."""
    x = x.float()
    magnitude = x.abs().nan_to_num(0.0, 0.0, 0.0)  # non-finite values have no say in the scale
    amax = magnitude.amax(dim=1, keepdim=True)
    scale = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    quotient = x / scale
    values = torch.where(x.isfinite(), quotient.clamp(-E4M3_MAX, E4M3_MAX), torch.nan)
    return values.to(torch.float8_e4m3fn).contiguous(), scale


class LinearE4m3Rowwise(torch.autograd.Function):
    """y = x @ weight.T for x (M, K) and weight (N, K): fprop, dgrad, wgrad in e4m3 rowwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, tick: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tick = tick
        x_fp8, x_scale = e4m3_rowwise(x)
        weight_fp8, weight_scale = e4m3_rowwise(weight)
        return dispatch.scaled_mm(x_fp8, x_scale, weight_fp8, weight_scale, "rowwise", "rowwise", dtype, False, tick)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dy_fp8, dy_scale = e4m3_rowwise(dy)
            weight_fp8, weight_scale = e4m3_rowwise(weight.t())
            dx = dispatch.scaled_mm(
                dy_fp8, dy_scale, weight_fp8, weight_scale, "rowwise", "rowwise", x.dtype, False, ctx.tick + 1
            )
        if ctx.needs_input_grad[1]:
            dy_fp8, dy_scale = e4m3_rowwise(dy.t())
            x_fp8, x_scale = e4m3_rowwise(x.t())
            dw = dispatch.scaled_mm(
                dy_fp8, dy_scale, x_fp8, x_scale, "rowwise", "rowwise", weight.dtype, False, ctx.tick + 2
            )
        return dx, dw, None, None


def linear_e4m3_rowwise(x: Tensor, weight: Tensor, bias: Tensor, tick: int) -> Tensor:
    """torch.nn.functional.linear: x (..., K), weight (N, K), bias (N,) -> (..., N). GEMMs count under `tick`."""
    if x.numel() == 0:
        return torch.nn.functional.linear(x, weight, bias)
    dtype = dispatch.output_dtype(x)
    rows = x.reshape(-1, x.shape[-1])
    y = LinearE4m3Rowwise.apply(rows, weight, dtype, tick)
    y = y + bias.to(dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_e4m3_rowwise_frozen(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, tick: int) -> Tensor:
    """The same for a weight (N, K) that was quantised once, and its scales. It gives no gradients."""
    dtype = dispatch.output_dtype(x)
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    x_fp8, x_scale = e4m3_rowwise(x.reshape(-1, x.shape[-1]))
    y = dispatch.scaled_mm(x_fp8, x_scale, weight, scale, "rowwise", "rowwise", dtype, False, tick)
    y = y + bias.to(dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def layer_norm_linear_layer_norm_silu(
    flatten: Tensor,
    fmb_norm_weight: Tensor,
    fmb_norm_bias: Tensor,
    fmb_0_weight: Tensor,
    fmb_0_bias: Tensor,
    fmb_1_weight: Tensor,
    fmb_1_bias: Tensor,
    tick: int,
) -> Tensor:
    """layer_norm -> linear e4m3 rowwise -> layer_norm -> silu."""
    fmb_norm = torch.nn.functional.layer_norm(flatten, (128,), weight=fmb_norm_weight, bias=fmb_norm_bias, eps=1e-05)
    fmb_0 = linear_e4m3_rowwise(fmb_norm, fmb_0_weight, fmb_0_bias, tick)
    fmb_1 = torch.nn.functional.layer_norm(fmb_0, (256,), weight=fmb_1_weight, bias=fmb_1_bias, eps=1e-05)
    return torch.nn.functional.silu(fmb_1, inplace=False)


def linear_layer_norm_silu(
    fmb_2: Tensor, fmb_3_weight: Tensor, fmb_3_bias: Tensor, fmb_4_weight: Tensor, fmb_4_bias: Tensor, tick: int
) -> Tensor:
    """linear e4m3 rowwise -> layer_norm -> silu."""
    fmb_3 = linear_e4m3_rowwise(fmb_2, fmb_3_weight, fmb_3_bias, tick)
    fmb_4 = torch.nn.functional.layer_norm(fmb_3, (256,), weight=fmb_4_weight, bias=fmb_4_bias, eps=1e-05)
    return torch.nn.functional.silu(fmb_4, inplace=False)


def layer_norm_linear_layer_norm_silu_frozen(
    flatten: Tensor,
    fmb_norm_weight: Tensor,
    fmb_norm_bias: Tensor,
    fmb_0_bias: Tensor,
    fmb_1_weight: Tensor,
    fmb_1_bias: Tensor,
    weight: Tensor,
    scale: Tensor,
    tick: int,
) -> Tensor:
    """layer_norm -> linear e4m3 rowwise frozen -> layer_norm -> silu."""
    fmb_norm = torch.nn.functional.layer_norm(flatten, (128,), weight=fmb_norm_weight, bias=fmb_norm_bias, eps=1e-05)
    fmb_0 = linear_e4m3_rowwise_frozen(fmb_norm, weight, scale, fmb_0_bias, tick)
    fmb_1 = torch.nn.functional.layer_norm(fmb_0, (256,), weight=fmb_1_weight, bias=fmb_1_bias, eps=1e-05)
    return torch.nn.functional.silu(fmb_1, inplace=False)


def linear_layer_norm_silu_frozen(
    fmb_2: Tensor,
    fmb_3_bias: Tensor,
    fmb_4_weight: Tensor,
    fmb_4_bias: Tensor,
    weight: Tensor,
    scale: Tensor,
    tick: int,
) -> Tensor:
    """linear e4m3 rowwise frozen -> layer_norm -> silu."""
    fmb_3 = linear_e4m3_rowwise_frozen(fmb_2, weight, scale, fmb_3_bias, tick)
    fmb_4 = torch.nn.functional.layer_norm(fmb_3, (256,), weight=fmb_4_weight, bias=fmb_4_bias, eps=1e-05)
    return torch.nn.functional.silu(fmb_4, inplace=False)

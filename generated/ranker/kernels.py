"""The FP8 arithmetic of ranker.yaml: quantizers, linears, chains, interactions.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

A quantizer works along the last dimension of a matrix and returns FP8 values and float32 scales; a value stands for
`value * scale`. `dispatch.scaled_mm(a, scale_a, b, scale_b, ...)` is `(a * scale_a) @ (b * scale_b).T`, so each GEMM
quantizes both of its operands along the dimension that it sums over.

A chain is a run of linears, with the norms and activations around them, as one function. Its kernels (`fused`)
normalise, activate and quantize a row in one pass, forward and backward, so that what lies between two GEMMs is read
and written once. A GEMM that sums over the rows takes its FP8 operands transposed, requantized to one scale, the
largest. Gradients of vectors come as partial sums, which `fused.reduce` adds up.

Interactions, the small products of a sample's embeddings and norms of what is concatenated, have kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka import dispatch
from loka.dispatch import Quantized

from . import fused

STAMP = "0fb8ed56d5f0c545d2c7db5a6707be6609881a1714ebb24102e2492e97414faa"

# Scalings of both operands of a GEMM.
ROWWISE = ("rowwise", "rowwise")
TENSORWISE = ("tensorwise", "tensorwise")


def e4m3_rowwise_pow2(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, C) in e4m3, one scale a row: FP8 values (R, C), scales (R, 1)."""
    x = x.float()
    magnitude = x.abs().nan_to_num(0.0, 0.0, 0.0)  # non-finite values are ignored
    amax = magnitude.amax(dim=1, keepdim=True)
    scale = amax.clamp(min=2.0**-100) / 448.0  # the floor keeps the scale of a zero block positive
    scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # up to a power of two
    quotient = x / scale
    values = torch.where(x.isfinite(), quotient.clamp(-448.0, 448.0), torch.nan)
    return values.to(torch.float8_e4m3fn).contiguous(), scale


class EmbedDense0Function(torch.autograd.Function):
    """embed.dense.0: linear -> layer_norm -> silu.

    GEMMs: fprop, dgrad, wgrad in the model's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        h = x.to(dtype)
        y = torch.nn.functional.linear(h, weight.to(dtype))
        out, mean, rstd = fused.add_layer_norm_silu(y, bias, norm_weight, norm_bias, dtype)
        ctx.save_for_backward(h, weight, y, bias, norm_weight, norm_bias, mean, rstd)
        ctx.dtypes = (x.dtype,)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, y, bias, norm_weight, norm_bias, mean, rstd = dispatch.saved_tensors(ctx)
        (x_dtype,) = ctx.dtypes
        dx = dweight = None
        dy, norm_weight_sums, norm_bias_sums, bias_sums = fused.add_layer_norm_silu_backward(
            grad, y, bias, norm_weight, norm_bias, mean, rstd
        )
        del grad
        if ctx.needs_input_grad[1]:
            dweight = (dy.t() @ h).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight.to(dy.dtype)).to(x_dtype)
        dbias, dnorm_weight, dnorm_bias = dispatch.reduced(
            fused.reduce,
            [bias_sums, norm_weight_sums, norm_bias_sums],
            [bias.dtype, norm_weight.dtype, norm_bias.dtype],
        )
        return dx, dweight, dbias, dnorm_weight, dnorm_bias, None


def embed_dense_0(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> Tensor:
    """linear -> layer_norm -> silu: x (..., 13), weight (64, 13) -> (..., 64)."""
    if dispatch.is_empty(x):
        y = torch.nn.functional.linear(x, weight, bias)
        y = torch.nn.functional.layer_norm(y, (64,), norm_weight, norm_bias, 1e-05)
        return torch.nn.functional.silu(y)
    dtype = dispatch.output_dtype(x, weight)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = EmbedDense0Function.apply(rows, weight, bias, norm_weight, norm_bias, dtype)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], 64)


class LayersFmbFunction(torch.autograd.Function):
    """layers.0.fmb, layers.1.fmb, layers.2.fmb: layer_norm -> linear -> layer_norm -> silu -> linear -> layer_norm ->
    silu -> linear.

    GEMMs: fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3 rowwise with power-of-two scales by a
    transposed copy; wgrad in transposed copies, tensorwise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        pre_norm_weight: Tensor,
        pre_norm_bias: Tensor,
        weight_0: Tensor,
        bias_0: Tensor,
        norm_weight_0: Tensor,
        norm_bias_0: Tensor,
        weight_1: Tensor,
        bias_1: Tensor,
        norm_weight_1: Tensor,
        norm_bias_1: Tensor,
        weight_2: Tensor,
        bias_2: Tensor,
        dtype: torch.dtype,
        counter_id_0: int,
        counter_id_1: int,
        counter_id_2: int,
    ) -> Tensor:
        weight_fp8_0, weight_fp8_1, weight_fp8_2 = Quantized.each(
            fused.quantize_weights([weight_0, weight_1, weight_2])
        )
        x_fp8_0, pre_mean, pre_rstd = Quantized.first(fused.layer_norm_e4m3(x, pre_norm_weight, pre_norm_bias))
        y_0 = dispatch.scaled_mm(
            x_fp8_0.data, x_fp8_0.scale, weight_fp8_0.data, weight_fp8_0.scale, *ROWWISE, dtype, False, counter_id_0
        )
        x_fp8_1, mean_0, rstd_0 = Quantized.first(
            fused.add_layer_norm_silu_e4m3(y_0, bias_0, norm_weight_0, norm_bias_0)
        )
        y_1 = dispatch.scaled_mm(
            x_fp8_1.data, x_fp8_1.scale, weight_fp8_1.data, weight_fp8_1.scale, *ROWWISE, dtype, False, counter_id_1
        )
        x_fp8_2, mean_1, rstd_1 = Quantized.first(
            fused.add_layer_norm_silu_e4m3(y_1, bias_1, norm_weight_1, norm_bias_1)
        )
        y_2 = dispatch.scaled_mm(
            x_fp8_2.data,
            x_fp8_2.scale,
            weight_fp8_2.data,
            weight_fp8_2.scale,
            *ROWWISE,
            dtype,
            False,
            counter_id_2,
            bias_2.to(dtype),
        )
        dispatch.save_for_backward(
            ctx,
            (x, pre_norm_weight, pre_norm_bias, pre_mean, pre_rstd),
            (x_fp8_0, weight_fp8_0, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0),
            (x_fp8_1, weight_fp8_1, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1),
            (x_fp8_2, weight_fp8_2, bias_2),
            unchanged=(weight_0, weight_1, weight_2),
        )
        ctx.dtypes = (dtype, weight_0.dtype, weight_1.dtype, weight_2.dtype)
        ctx.counter_ids = (counter_id_0, counter_id_1, counter_id_2)
        return y_2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            (x, pre_norm_weight, pre_norm_bias, pre_mean, pre_rstd),
            (x_fp8_0, weight_fp8_0, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0),
            (x_fp8_1, weight_fp8_1, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1),
            (x_fp8_2, weight_fp8_2, bias_2),
        ) = dispatch.saved(ctx)
        dtype, weight_dtype_0, weight_dtype_1, weight_dtype_2 = ctx.dtypes
        counter_id_0, counter_id_1, counter_id_2 = ctx.counter_ids
        dweight_0 = dweight_1 = dweight_2 = None
        # Linear 2.
        dy_fp8, bias_2_sums = Quantized.first(fused.add_backward_e4m3(grad))
        del grad
        dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
            [*dy_fp8, *x_fp8_2, *weight_fp8_2]
        )
        grad = dispatch.scaled_mm(
            dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, dtype, False, counter_id_2 + 1
        )
        if ctx.needs_input_grad[11]:
            dweight_2 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_2, False, counter_id_2 + 2
            )
        del x_fp8_2, weight_fp8_2, dy_fp8, weight_fp8_t, dy_fp8_t, x_fp8_t
        # Linear 1.
        dy_fp8, norm_weight_1_sums, norm_bias_1_sums, bias_1_sums = Quantized.first(
            fused.add_layer_norm_silu_backward_e4m3(grad, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1)
        )
        del grad
        dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
            [*dy_fp8, *x_fp8_1, *weight_fp8_1]
        )
        grad = dispatch.scaled_mm(
            dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, dtype, False, counter_id_1 + 1
        )
        if ctx.needs_input_grad[7]:
            dweight_1 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_1, False, counter_id_1 + 2
            )
        del x_fp8_1, weight_fp8_1, y_1, dy_fp8, weight_fp8_t, dy_fp8_t, x_fp8_t
        # Linear 0.
        dy_fp8, norm_weight_0_sums, norm_bias_0_sums, bias_0_sums = Quantized.first(
            fused.add_layer_norm_silu_backward_e4m3(grad, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0)
        )
        del grad
        dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
            [*dy_fp8, *x_fp8_0, *weight_fp8_0]
        )
        grad = dispatch.scaled_mm(
            dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, dtype, False, counter_id_0 + 1
        )
        if ctx.needs_input_grad[3]:
            dweight_0 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_0, False, counter_id_0 + 2
            )
        dbias_2, dbias_1, dnorm_weight_1, dnorm_bias_1, dbias_0, dnorm_weight_0 = dispatch.reduced(
            fused.reduce,
            [bias_2_sums, bias_1_sums, norm_weight_1_sums, norm_bias_1_sums, bias_0_sums, norm_weight_0_sums],
            [bias_2.dtype, bias_1.dtype, norm_weight_1.dtype, norm_bias_1.dtype, bias_0.dtype, norm_weight_0.dtype],
        )
        del bias_2_sums, bias_1_sums, norm_weight_1_sums, norm_bias_1_sums, bias_0_sums, norm_weight_0_sums
        dx, pre_norm_weight_sums, pre_norm_bias_sums = fused.layer_norm_backward(
            grad, x, pre_norm_weight, pre_mean, pre_rstd
        )
        dx = dx.to(x.dtype)
        dnorm_bias_0, dpre_norm_weight, dpre_norm_bias = dispatch.reduced(
            fused.reduce,
            [norm_bias_0_sums, pre_norm_weight_sums, pre_norm_bias_sums],
            [norm_bias_0.dtype, pre_norm_weight.dtype, pre_norm_bias.dtype],
        )
        return (
            *(dx, dpre_norm_weight, dpre_norm_bias),
            *(dweight_0, dbias_0, dnorm_weight_0, dnorm_bias_0),
            *(dweight_1, dbias_1, dnorm_weight_1, dnorm_bias_1),
            *(dweight_2, dbias_2),
            *(None, None, None, None),
        )


def layers_fmb(
    x: Tensor,
    pre_norm_weight: Tensor,
    pre_norm_bias: Tensor,
    weight_0: Tensor,
    bias_0: Tensor,
    norm_weight_0: Tensor,
    norm_bias_0: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    counter_id_0: int,
    counter_id_1: int,
    counter_id_2: int,
) -> Tensor:
    """layer_norm -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear: x (..., 128), weight_0
    (256, 128), weight_1 (256, 256), weight_2 (256, 256) -> (..., 256). GEMMs count under their counter ids."""
    if dispatch.is_empty(x):
        y = torch.nn.functional.layer_norm(x, (128,), pre_norm_weight, pre_norm_bias, 1e-05)
        y = torch.nn.functional.linear(y, weight_0, bias_0)
        y = torch.nn.functional.layer_norm(y, (256,), norm_weight_0, norm_bias_0, 1e-05)
        y = torch.nn.functional.silu(y)
        y = torch.nn.functional.linear(y, weight_1, bias_1)
        y = torch.nn.functional.layer_norm(y, (256,), norm_weight_1, norm_bias_1, 1e-05)
        y = torch.nn.functional.silu(y)
        return torch.nn.functional.linear(y, weight_2, bias_2)
    dtype = dispatch.output_dtype(x, weight_0, weight_1, weight_2)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = LayersFmbFunction.apply(
        *(rows, pre_norm_weight, pre_norm_bias),
        *(weight_0, bias_0, norm_weight_0, norm_bias_0),
        *(weight_1, bias_1, norm_weight_1, norm_bias_1),
        *(weight_2, bias_2),
        dtype,
        *(counter_id_0, counter_id_1, counter_id_2),
    )
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], 256)


class HeadMlpFunction(torch.autograd.Function):
    """head.mlp: linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu.

    GEMMs: fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3 rowwise with power-of-two scales by a
    transposed copy; wgrad in transposed copies, tensorwise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_0: Tensor,
        bias_0: Tensor,
        norm_weight_0: Tensor,
        norm_bias_0: Tensor,
        weight_1: Tensor,
        bias_1: Tensor,
        norm_weight_1: Tensor,
        norm_bias_1: Tensor,
        weight_2: Tensor,
        bias_2: Tensor,
        norm_weight_2: Tensor,
        norm_bias_2: Tensor,
        dtype: torch.dtype,
        counter_id_0: int,
        counter_id_1: int,
        counter_id_2: int,
    ) -> Tensor:
        weight_fp8_0, weight_fp8_1, weight_fp8_2 = Quantized.each(
            fused.quantize_weights([weight_0, weight_1, weight_2])
        )
        x_fp8_0 = Quantized(*fused.quantize_e4m3(x))
        y_0 = dispatch.scaled_mm(
            x_fp8_0.data, x_fp8_0.scale, weight_fp8_0.data, weight_fp8_0.scale, *ROWWISE, dtype, False, counter_id_0
        )
        x_fp8_1, mean_0, rstd_0 = Quantized.first(
            fused.add_layer_norm_silu_e4m3(y_0, bias_0, norm_weight_0, norm_bias_0)
        )
        y_1 = dispatch.scaled_mm(
            x_fp8_1.data, x_fp8_1.scale, weight_fp8_1.data, weight_fp8_1.scale, *ROWWISE, dtype, False, counter_id_1
        )
        x_fp8_2, mean_1, rstd_1 = Quantized.first(
            fused.add_layer_norm_silu_e4m3(y_1, bias_1, norm_weight_1, norm_bias_1)
        )
        y_2 = dispatch.scaled_mm(
            x_fp8_2.data, x_fp8_2.scale, weight_fp8_2.data, weight_fp8_2.scale, *ROWWISE, dtype, False, counter_id_2
        )
        out, mean_2, rstd_2 = fused.add_layer_norm_silu(y_2, bias_2, norm_weight_2, norm_bias_2, dtype)
        dispatch.save_for_backward(
            ctx,
            (x_fp8_0, weight_fp8_0, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0),
            (x_fp8_1, weight_fp8_1, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1),
            (x_fp8_2, weight_fp8_2, y_2, bias_2, norm_weight_2, norm_bias_2, mean_2, rstd_2),
            unchanged=(weight_0, weight_1, weight_2),
        )
        ctx.dtypes = (dtype, x.dtype, weight_0.dtype, weight_1.dtype, weight_2.dtype)
        ctx.counter_ids = (counter_id_0, counter_id_1, counter_id_2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            (x_fp8_0, weight_fp8_0, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0),
            (x_fp8_1, weight_fp8_1, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1),
            (x_fp8_2, weight_fp8_2, y_2, bias_2, norm_weight_2, norm_bias_2, mean_2, rstd_2),
        ) = dispatch.saved(ctx)
        dtype, x_dtype, weight_dtype_0, weight_dtype_1, weight_dtype_2 = ctx.dtypes
        counter_id_0, counter_id_1, counter_id_2 = ctx.counter_ids
        dx = dweight_0 = dweight_1 = dweight_2 = None
        # Linear 2.
        dy_fp8, norm_weight_2_sums, norm_bias_2_sums, bias_2_sums = Quantized.first(
            fused.add_layer_norm_silu_backward_e4m3(grad, y_2, bias_2, norm_weight_2, norm_bias_2, mean_2, rstd_2)
        )
        del grad
        dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
            [*dy_fp8, *x_fp8_2, *weight_fp8_2]
        )
        grad = dispatch.scaled_mm(
            dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, dtype, False, counter_id_2 + 1
        )
        if ctx.needs_input_grad[9]:
            dweight_2 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_2, False, counter_id_2 + 2
            )
        del x_fp8_2, weight_fp8_2, y_2, dy_fp8, weight_fp8_t, dy_fp8_t, x_fp8_t
        # Linear 1.
        dy_fp8, norm_weight_1_sums, norm_bias_1_sums, bias_1_sums = Quantized.first(
            fused.add_layer_norm_silu_backward_e4m3(grad, y_1, bias_1, norm_weight_1, norm_bias_1, mean_1, rstd_1)
        )
        del grad
        dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
            [*dy_fp8, *x_fp8_1, *weight_fp8_1]
        )
        grad = dispatch.scaled_mm(
            dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, dtype, False, counter_id_1 + 1
        )
        if ctx.needs_input_grad[5]:
            dweight_1 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_1, False, counter_id_1 + 2
            )
        del x_fp8_1, weight_fp8_1, y_1, dy_fp8, weight_fp8_t, dy_fp8_t, x_fp8_t
        dbias_2, dnorm_weight_2, dnorm_bias_2, dbias_1, dnorm_weight_1, dnorm_bias_1 = dispatch.reduced(
            fused.reduce,
            [bias_2_sums, norm_weight_2_sums, norm_bias_2_sums, bias_1_sums, norm_weight_1_sums, norm_bias_1_sums],
            [
                bias_2.dtype,
                norm_weight_2.dtype,
                norm_bias_2.dtype,
                bias_1.dtype,
                norm_weight_1.dtype,
                norm_bias_1.dtype,
            ],
        )
        del bias_2_sums, norm_weight_2_sums, norm_bias_2_sums, bias_1_sums, norm_weight_1_sums, norm_bias_1_sums
        # Linear 0.
        dy_fp8, norm_weight_0_sums, norm_bias_0_sums, bias_0_sums = Quantized.first(
            fused.add_layer_norm_silu_backward_e4m3(grad, y_0, bias_0, norm_weight_0, norm_bias_0, mean_0, rstd_0)
        )
        del grad
        if ctx.needs_input_grad[0]:
            dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t, weight_fp8_t, weight_scale_t = fused.requantize_transpose(
                [*dy_fp8, *x_fp8_0, *weight_fp8_0]
            )
            dx = dispatch.scaled_mm(
                dy_fp8.data, dy_fp8.scale, weight_fp8_t, weight_scale_t, *ROWWISE, x_dtype, False, counter_id_0 + 1
            )
        else:
            dy_fp8_t, dy_scale_t, x_fp8_t, x_scale_t = fused.requantize_transpose([*dy_fp8, *x_fp8_0])
        if ctx.needs_input_grad[1]:
            dweight_0 = dispatch.scaled_mm(
                dy_fp8_t, dy_scale_t[:1], x_fp8_t, x_scale_t[:1], *TENSORWISE, weight_dtype_0, False, counter_id_0 + 2
            )
        dbias_0, dnorm_weight_0, dnorm_bias_0 = dispatch.reduced(
            fused.reduce,
            [bias_0_sums, norm_weight_0_sums, norm_bias_0_sums],
            [bias_0.dtype, norm_weight_0.dtype, norm_bias_0.dtype],
        )
        return (
            dx,
            *(dweight_0, dbias_0, dnorm_weight_0, dnorm_bias_0),
            *(dweight_1, dbias_1, dnorm_weight_1, dnorm_bias_1),
            *(dweight_2, dbias_2, dnorm_weight_2, dnorm_bias_2),
            *(None, None, None, None),
        )


def head_mlp(
    x: Tensor,
    weight_0: Tensor,
    bias_0: Tensor,
    norm_weight_0: Tensor,
    norm_bias_0: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    counter_id_0: int,
    counter_id_1: int,
    counter_id_2: int,
) -> Tensor:
    """linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu: x (..., 512),
    weight_0 (256, 512), weight_1 (256, 256), weight_2 (256, 256) -> (..., 256). GEMMs count under their counter ids."""
    if dispatch.is_empty(x):
        y = torch.nn.functional.linear(x, weight_0, bias_0)
        y = torch.nn.functional.layer_norm(y, (256,), norm_weight_0, norm_bias_0, 1e-05)
        y = torch.nn.functional.silu(y)
        y = torch.nn.functional.linear(y, weight_1, bias_1)
        y = torch.nn.functional.layer_norm(y, (256,), norm_weight_1, norm_bias_1, 1e-05)
        y = torch.nn.functional.silu(y)
        y = torch.nn.functional.linear(y, weight_2, bias_2)
        y = torch.nn.functional.layer_norm(y, (256,), norm_weight_2, norm_bias_2, 1e-05)
        return torch.nn.functional.silu(y)
    dtype = dispatch.output_dtype(x, weight_0, weight_1, weight_2)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = HeadMlpFunction.apply(
        rows,
        *(weight_0, bias_0, norm_weight_0, norm_bias_0),
        *(weight_1, bias_1, norm_weight_1, norm_bias_1),
        *(weight_2, bias_2, norm_weight_2, norm_bias_2),
        dtype,
        *(counter_id_0, counter_id_1, counter_id_2),
    )
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], 256)


def embed_dense_0_frozen(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> Tensor:
    """linear -> layer_norm -> silu: x (..., 13), weight (64, 13) -> (..., 64). It gives no gradients."""
    dtype = dispatch.output_dtype(x)
    if dispatch.is_empty(x):
        return dispatch.without_elements(x, 13, 64, dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    h = rows.to(dtype)
    y = torch.nn.functional.linear(h, weight.to(dtype))
    out = fused.add_layer_norm_silu_inference(y, bias, norm_weight, norm_bias, dtype)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], 64)


def layers_fmb_frozen(
    x: Tensor,
    pre_norm_weight: Tensor,
    pre_norm_bias: Tensor,
    weight_0: Tensor,
    scale_0: Tensor,
    bias_0: Tensor,
    norm_weight_0: Tensor,
    norm_bias_0: Tensor,
    weight_1: Tensor,
    scale_1: Tensor,
    bias_1: Tensor,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    weight_2: Tensor,
    scale_2: Tensor,
    bias_2: Tensor,
    counter_id_0: int,
    counter_id_1: int,
    counter_id_2: int,
) -> Tensor:
    """layer_norm -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear: x (..., 128), weight_0
    (256, 128), weight_1 (256, 256), weight_2 (256, 256) -> (..., 256). It gives no gradients."""
    dtype = dispatch.output_dtype(x)
    if dispatch.is_empty(x):
        return dispatch.without_elements(x, 128, 256, dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    x_fp8_0, x_scale_0, _ = fused.layer_norm_e4m3_inference(rows, pre_norm_weight, pre_norm_bias)
    y_0 = dispatch.scaled_mm(x_fp8_0, x_scale_0, weight_0, scale_0, *ROWWISE, dtype, False, counter_id_0)
    x_fp8_1, x_scale_1, _ = fused.add_layer_norm_silu_e4m3_inference(y_0, bias_0, norm_weight_0, norm_bias_0)
    y_1 = dispatch.scaled_mm(x_fp8_1, x_scale_1, weight_1, scale_1, *ROWWISE, dtype, False, counter_id_1)
    x_fp8_2, x_scale_2, _ = fused.add_layer_norm_silu_e4m3_inference(y_1, bias_1, norm_weight_1, norm_bias_1)
    y_2 = dispatch.scaled_mm(
        x_fp8_2, x_scale_2, weight_2, scale_2, *ROWWISE, dtype, False, counter_id_2, bias_2.to(dtype)
    )
    return y_2 if x.dim() == 2 else y_2.reshape(*x.shape[:-1], 256)


def head_mlp_frozen(
    x: Tensor,
    weight_0: Tensor,
    scale_0: Tensor,
    bias_0: Tensor,
    norm_weight_0: Tensor,
    norm_bias_0: Tensor,
    weight_1: Tensor,
    scale_1: Tensor,
    bias_1: Tensor,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    weight_2: Tensor,
    scale_2: Tensor,
    bias_2: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    counter_id_0: int,
    counter_id_1: int,
    counter_id_2: int,
) -> Tensor:
    """linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu: x (..., 512),
    weight_0 (256, 512), weight_1 (256, 256), weight_2 (256, 256) -> (..., 256). It gives no gradients."""
    dtype = dispatch.output_dtype(x)
    if dispatch.is_empty(x):
        return dispatch.without_elements(x, 512, 256, dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    x_fp8_0, x_scale_0, _ = fused.quantize_e4m3(rows)
    y_0 = dispatch.scaled_mm(x_fp8_0, x_scale_0, weight_0, scale_0, *ROWWISE, dtype, False, counter_id_0)
    x_fp8_1, x_scale_1, _ = fused.add_layer_norm_silu_e4m3_inference(y_0, bias_0, norm_weight_0, norm_bias_0)
    y_1 = dispatch.scaled_mm(x_fp8_1, x_scale_1, weight_1, scale_1, *ROWWISE, dtype, False, counter_id_1)
    x_fp8_2, x_scale_2, _ = fused.add_layer_norm_silu_e4m3_inference(y_1, bias_1, norm_weight_1, norm_bias_1)
    y_2 = dispatch.scaled_mm(x_fp8_2, x_scale_2, weight_2, scale_2, *ROWWISE, dtype, False, counter_id_2)
    out = fused.add_layer_norm_silu_inference(y_2, bias_2, norm_weight_2, norm_bias_2, dtype)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], 256)


class LayersFmInteractionFunction(torch.autograd.Function):
    """All pairs of a sample's embeddings at low rank, and weighted sums of them; x itself for the sum that adds it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rank: Tensor, compress: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        samples = x.to(dtype)
        products, compressed = fused.fm_interaction_16x32_to_8_8(samples, rank.to(dtype), compress.to(dtype))
        ctx.save_for_backward(samples, rank, compress)
        return products, compressed, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dproducts: Tensor, dcompressed: Tensor, passed: Tensor) -> tuple[Tensor | None, ...]:
        samples, rank, compress = ctx.saved_tensors
        dx, drank_sums, dcompress_sums = fused.fm_interaction_backward_16x32_to_8_8_passed(
            dproducts, dcompressed, samples, rank.to(samples.dtype), compress.to(samples.dtype), passed
        )
        drank, dcompress = dispatch.reduced(fused.reduce, [drank_sums, dcompress_sums], [rank.dtype, compress.dtype])
        return dx, drank.view(rank.shape), dcompress.view(compress.shape), None


def layers_fm_interaction(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, 16, 32) -> x @ (x^T @ rank) (B, 16, 8), compress @ x (B, 8, 32), and x itself for the sum that adds it."""
    y: Any = LayersFmInteractionFunction.apply(x, rank, compress, dispatch.output_dtype(x, rank, compress))
    return y


class LayersConcatNormFunction(torch.autograd.Function):
    """The layer_norm of 2 parts one after another plus the residual."""

    @staticmethod
    def forward(
        ctx: Any, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out, mean, rstd = fused.concat_norm_2_residual_layer_norm_32(part_0, part_1, residual, weight, bias, dtype)
        ctx.save_for_backward(part_0, part_1, residual, weight, bias, mean, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part_0, part_1, residual, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight_sums, dbias_sums = fused.concat_norm_2_residual_layer_norm_backward_32(
            grad, part_0, part_1, residual, weight, mean, rstd
        )
        dweight, dbias = dispatch.reduced(fused.reduce, [dweight_sums, dbias_sums], [weight.dtype, bias.dtype])
        dpart_0, dpart_1 = dx.split((part_0.shape[1], part_1.shape[1]), 1)
        return dpart_0.to(part_0.dtype), dpart_1.to(part_1.dtype), dx.to(residual.dtype), dweight, dbias, None


def layers_concat_norm(part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """part_0 (B, n_0, 32), part_1 (B, n_1, 32); residual and result (B, n, 32), n the sum of all rows."""
    y: Any = LayersConcatNormFunction.apply(
        part_0, part_1, residual, weight, bias, dispatch.joined_dtype(part_0, part_1, residual)
    )
    return y

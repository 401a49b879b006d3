"""The FP8 arithmetic of ranker.yaml: quantizers, linears, chains, interactions.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

A quantizer works along the last dimension of a matrix and returns FP8 values and float32 scales; a value stands for
`value * scale`. `dispatch.scaled_mm(a, scale_a, b, scale_b, ...)` is `(a * scale_a) @ (b * scale_b).T`, so each GEMM
quantizes both of its operands along the dimension that it sums over.

A chain is a run of linears, with the norms and activations around them, as one function: `run` loops over its stages,
and `loka.kernels.chain_values` says what their names stand for. A stage is called as what it holds, its GEMMs in FP8 or
native, that is in the model's dtype, and what it makes where that is the next linear's input. Kernels (of `fused`, by
name) normalise, activate and quantize a row in one pass, forward and backward, so that what lies between two GEMMs is
read and written once. A GEMM that sums over the rows takes its FP8 operands transposed, requantized to one scale, the
largest. Gradients of vectors come as partial sums, which `fused.reduce` adds up.

Interactions, the small products of a sample's embeddings and norms of what is concatenated, have kernels of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka import dispatch
from loka.dispatch.chain import CounterIds, Tensors, run
from loka.kernels.chain_values import Chain, Launch, ScaledGemm, Stage, StageGemms, constant

from . import fused

STAMP = "f060d11152abcbc565314b2b5c4dcf8721e3e74c1f0d00a6ef03fd467a4d3f0d"


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


NATIVE_LINEAR_LAYER_NORM_SILU = Stage(
    parameters="weight bias norm_weight norm_bias",
    forward=Launch("add_layer_norm_silu", "y bias norm_weight norm_bias dtype", "out mean rstd"),
    inference=Launch("add_layer_norm_silu_inference", "y bias norm_weight norm_bias dtype", "out"),
    backward=Launch(
        "add_layer_norm_silu_backward",
        "grad y bias norm_weight norm_bias mean rstd",
        "dy norm_weight_sums norm_bias_sums bias_sums",
    ),
)
FP8_GEMMS = StageGemms(
    fprop=ScaledGemm("scaled_mm", ("rowwise", "rowwise")),
    dgrad=ScaledGemm("scaled_mm", ("rowwise", "rowwise")),
    wgrad=ScaledGemm("scaled_mm", ("tensorwise", "tensorwise"), first_scale=(True, True)),
    saved="x_fp8 x_scale x_scale_max weight_fp8 weight_scale weight_scale_max",
)
FP8_LINEAR_LAYER_NORM_SILU_TO_FP8 = Stage(
    parameters="weight bias norm_weight norm_bias",
    gemms=FP8_GEMMS,
    forward=Launch("add_layer_norm_silu_e4m3", "y bias norm_weight norm_bias", "x_fp8 x_scale x_scale_max mean rstd"),
    inference=Launch("add_layer_norm_silu_e4m3_inference", "y bias norm_weight norm_bias", "x_fp8 x_scale x_scale_max"),
    backward=Launch(
        "add_layer_norm_silu_backward_e4m3",
        "grad y bias norm_weight norm_bias mean rstd",
        "dy_fp8 dy_scale dy_scale_max norm_weight_sums norm_bias_sums bias_sums",
    ),
)
FP8_LINEAR = Stage(
    parameters="weight bias",
    gemms=FP8_GEMMS,
    backward=Launch("add_backward_e4m3", "grad", "dy_fp8 dy_scale dy_scale_max bias_sums"),
    bias_in_gemm=True,
)
FP8_LINEAR_LAYER_NORM_SILU = Stage(
    parameters="weight bias norm_weight norm_bias",
    gemms=FP8_GEMMS,
    forward=Launch("add_layer_norm_silu", "y bias norm_weight norm_bias dtype", "out mean rstd"),
    inference=Launch("add_layer_norm_silu_inference", "y bias norm_weight norm_bias dtype", "out"),
    backward=Launch(
        "add_layer_norm_silu_backward_e4m3",
        "grad y bias norm_weight norm_bias mean rstd",
        "dy_fp8 dy_scale dy_scale_max norm_weight_sums norm_bias_sums bias_sums",
    ),
)
EMBED_DENSE_0 = constant(Chain(k=13, n=256, stages=(NATIVE_LINEAR_LAYER_NORM_SILU,)))
LAYERS_FMB_0 = constant(
    Chain(
        k=256,
        n=2048,
        stages=(NATIVE_LINEAR_LAYER_NORM_SILU,),
        head=Stage(
            parameters="norm_weight norm_bias",
            forward=Launch("layer_norm", "x norm_weight norm_bias dtype", "x_plain mean rstd"),
            inference=Launch("layer_norm_inference", "x norm_weight norm_bias dtype", "x_plain"),
            backward=Launch(
                "layer_norm_backward", "grad x norm_weight mean rstd", "dx norm_weight_sums norm_bias_sums"
            ),
        ),
    ),
)
LAYERS_FMB_3_TO_6 = constant(
    Chain(
        k=2048,
        n=1024,
        stages=(FP8_LINEAR_LAYER_NORM_SILU_TO_FP8, FP8_LINEAR),
        head=Stage(forward=Launch("quantize_e4m3", "x", "x_fp8 x_scale x_scale_max")),
        weights=((0, 1),),
    ),
)
HEAD_MLP = constant(
    Chain(
        k=2048,
        n=2048,
        stages=(FP8_LINEAR_LAYER_NORM_SILU_TO_FP8, FP8_LINEAR_LAYER_NORM_SILU_TO_FP8, FP8_LINEAR_LAYER_NORM_SILU),
        head=Stage(forward=Launch("quantize_e4m3", "x", "x_fp8 x_scale x_scale_max")),
        weights=((0, 1, 2),),
    ),
)


def embed_dense_0(x: Tensor, linear: Tensors) -> Tensor:
    """embed.dense.0: linear -> layer_norm -> silu.

    x (..., 13), weight (256, 13) -> (..., 256).
    """
    return run(EMBED_DENSE_0, fused, (x,), (), (linear,))


def layers_fmb_0(x: Tensor, norm: Tensors, linear: Tensors) -> Tensor:
    """layers.0.fmb.0, layers.1.fmb.0, layers.2.fmb.0: layer_norm -> linear -> layer_norm -> silu.

    x (..., 256), weight (2048, 256) -> (..., 2048).
    """
    return run(LAYERS_FMB_0, fused, (x,), norm, (linear,))


def layers_fmb_3_to_6(x: Tensor, linear_0: Tensors, linear_1: Tensors, counter_ids: CounterIds) -> Tensor:
    """layers.0.fmb, layers.1.fmb, layers.2.fmb: linear -> layer_norm -> silu -> linear.

    x (..., 2048), weight_0 (2048, 2048), weight_1 (1024, 2048) -> (..., 1024).
    """
    return run(LAYERS_FMB_3_TO_6, fused, (x,), (), (linear_0, linear_1), counter_ids)


def head_mlp(x: Tensor, linear_0: Tensors, linear_1: Tensors, linear_2: Tensors, counter_ids: CounterIds) -> Tensor:
    """head.mlp: linear -> layer_norm -> silu -> linear -> layer_norm -> silu -> linear -> layer_norm -> silu.

    x (..., 2048), weight_0 (2048, 2048), weight_1 (2048, 2048), weight_2 (2048, 2048) -> (..., 2048).
    """
    return run(HEAD_MLP, fused, (x,), (), (linear_0, linear_1, linear_2), counter_ids)


def layers_fm_interaction(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, 16, 128) -> x @ (x^T @ rank) (B, 16, 16), compress @ x (B, 8, 128), and x itself for the sum that adds
    it."""
    return dispatch.fm_interaction(
        fused, "fm_interaction_16x128_to_16_8", "fm_interaction_backward_16x128_to_16_8_passed", True, x, rank, compress
    )


def layers_concat_norm(part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """part_0 (B, n_0, 128), part_1 (B, n_1, 128); residual and result (B, n, 128), n the sum of all rows."""
    return dispatch.concat_norm(
        fused,
        "concat_norm_2_residual_layer_norm_128",
        "concat_norm_2_residual_layer_norm_backward_128",
        (part_0, part_1),
        residual,
        weight,
        bias,
    )

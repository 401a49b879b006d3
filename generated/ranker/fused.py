"""Operators of ranker.yaml: Triton kernels on a GPU, their reference on the CPU, their shapes for the compiler.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

In shapes, M is free and P is the number of programs that a kernel is launched with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.interaction import concat_norm_reference, fm_reference
from loka.kernels.fused.norm import norm_reference

STAMP = "2d24789dc8cbb91ac1388ff7d169ef8479e79e0c7d80da25b0c0992f91ff9a65"


def _add_backward_e4m3_256_reference(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 256)
    backward = norm_reference.norm_backward(grad)
    values, scale, scale_max = norm_reference.quantise_rows(backward.x)
    return values, scale, scale_max, backward.add


def _add_backward_e4m3_256_shapes(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 256)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    return values, scale, scale_max, dadd


# Gradient of addition -> e4m3 with one power-of-two scale a row.
# grad (M, 256) -> values (M, 256), scale (M, 1), scale_max (P,), dadd (P, 256).
add_backward_e4m3_256 = operators.operator(
    "add_backward_e4m3_256_764f3227",
    operators.deferred(__package__, "add_backward_e4m3_256"),
    _add_backward_e4m3_256_reference,
    _add_backward_e4m3_256_shapes,
)


def _add_backward_e4m3_32_reference(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 32)
    backward = norm_reference.norm_backward(grad)
    values, scale, scale_max = norm_reference.quantise_rows(backward.x)
    return values, scale, scale_max, backward.add


def _add_backward_e4m3_32_shapes(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 32)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=128, per_multiprocessor=8)
    values = grad.new_empty((m, 32), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dadd = grad.new_empty((programs, 32), dtype=torch.float32)
    return values, scale, scale_max, dadd


# Gradient of addition -> e4m3 with one power-of-two scale a row.
# grad (M, 32) -> values (M, 32), scale (M, 1), scale_max (P,), dadd (P, 32).
add_backward_e4m3_32 = operators.operator(
    "add_backward_e4m3_32_df988311",
    operators.deferred(__package__, "add_backward_e4m3_32"),
    _add_backward_e4m3_32_reference,
    _add_backward_e4m3_32_shapes,
)


def _add_layer_norm_silu_256_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype), forward.mean, forward.rstd


def _add_layer_norm_silu_256_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    m = x.shape[0]
    out = x.new_empty((m, 256), dtype=x.dtype if dtype is None else dtype)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return out, mean, rstd


# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x (M, 256), add (256,), weight (256,), bias (256,) -> out (M, 256), mean (M,), rstd (M,).
add_layer_norm_silu_256 = operators.operator(
    "add_layer_norm_silu_256_b10c6b40",
    operators.deferred(__package__, "add_layer_norm_silu_256"),
    _add_layer_norm_silu_256_reference,
    _add_layer_norm_silu_256_shapes,
)


def _add_layer_norm_silu_256_inference_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    operators.check_rows(x, 256)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype)


def _add_layer_norm_silu_256_inference_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    operators.check_rows(x, 256)
    m = x.shape[0]
    out = x.new_empty((m, 256), dtype=x.dtype if dtype is None else dtype)
    return out


# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x (M, 256), add (256,), weight (256,), bias (256,) -> out (M, 256).
add_layer_norm_silu_256_inference = operators.operator(
    "add_layer_norm_silu_256_inference_07809411",
    operators.deferred(__package__, "add_layer_norm_silu_256_inference"),
    _add_layer_norm_silu_256_inference_reference,
    _add_layer_norm_silu_256_inference_shapes,
)


def _add_layer_norm_silu_64_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 64)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype), forward.mean, forward.rstd


def _add_layer_norm_silu_64_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 64)
    m = x.shape[0]
    out = x.new_empty((m, 64), dtype=x.dtype if dtype is None else dtype)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return out, mean, rstd


# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x (M, 64), add (64,), weight (64,), bias (64,) -> out (M, 64), mean (M,), rstd (M,).
add_layer_norm_silu_64 = operators.operator(
    "add_layer_norm_silu_64_63fd0dad",
    operators.deferred(__package__, "add_layer_norm_silu_64"),
    _add_layer_norm_silu_64_reference,
    _add_layer_norm_silu_64_shapes,
)


def _add_layer_norm_silu_64_inference_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    operators.check_rows(x, 64)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype)


def _add_layer_norm_silu_64_inference_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    operators.check_rows(x, 64)
    m = x.shape[0]
    out = x.new_empty((m, 64), dtype=x.dtype if dtype is None else dtype)
    return out


# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x (M, 64), add (64,), weight (64,), bias (64,) -> out (M, 64).
add_layer_norm_silu_64_inference = operators.operator(
    "add_layer_norm_silu_64_inference_d5ab3123",
    operators.deferred(__package__, "add_layer_norm_silu_64_inference"),
    _add_layer_norm_silu_64_inference_reference,
    _add_layer_norm_silu_64_inference_shapes,
)


def _add_layer_norm_silu_backward_64_reference(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 64)
    operators.check_rows(x, 64)
    backward = norm_reference.norm_backward(
        grad, x=x, add=add, weight=weight, bias=bias, mean=mean, rstd=rstd, norm="layer_norm", activation="silu"
    )
    return backward.x.to(grad.dtype), backward.weight, backward.bias, backward.add


def _add_layer_norm_silu_backward_64_shapes(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 64)
    operators.check_rows(x, 64)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=64, per_multiprocessor=8)
    dx = grad.new_empty((m, 64))
    dweight = grad.new_empty((programs, 64), dtype=torch.float32)
    dbias = grad.new_empty((programs, 64), dtype=torch.float32)
    dadd = grad.new_empty((programs, 64), dtype=torch.float32)
    return dx, dweight, dbias, dadd


# Gradient of addition, LayerNorm, SiLU.
# grad (M, 64), x (M, 64), add (64,), weight (64,), bias (64,), mean (M,), rstd (M,) -> dx (M, 64), dweight (P, 64),
# dbias (P, 64), dadd (P, 64).
add_layer_norm_silu_backward_64 = operators.operator(
    "add_layer_norm_silu_backward_64_0e839bd1",
    operators.deferred(__package__, "add_layer_norm_silu_backward_64"),
    _add_layer_norm_silu_backward_64_reference,
    _add_layer_norm_silu_backward_64_shapes,
)


def _add_layer_norm_silu_backward_e4m3_256_reference(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 256)
    operators.check_rows(x, 256)
    backward = norm_reference.norm_backward(
        grad, x=x, add=add, weight=weight, bias=bias, mean=mean, rstd=rstd, norm="layer_norm", activation="silu"
    )
    values, scale, scale_max = norm_reference.quantise_rows(backward.x)
    return values, scale, scale_max, backward.weight, backward.bias, backward.add


def _add_layer_norm_silu_backward_e4m3_256_shapes(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 256)
    operators.check_rows(x, 256)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dweight = grad.new_empty((programs, 256), dtype=torch.float32)
    dbias = grad.new_empty((programs, 256), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    return values, scale, scale_max, dweight, dbias, dadd


# Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row.
# grad (M, 256), x (M, 256), add (256,), weight (256,), bias (256,), mean (M,), rstd (M,) -> values (M, 256), scale
# (M, 1), scale_max (P,), dweight (P, 256), dbias (P, 256), dadd (P, 256).
add_layer_norm_silu_backward_e4m3_256 = operators.operator(
    "add_layer_norm_silu_backward_e4m3_256_cad5b80e",
    operators.deferred(__package__, "add_layer_norm_silu_backward_e4m3_256"),
    _add_layer_norm_silu_backward_e4m3_256_reference,
    _add_layer_norm_silu_backward_e4m3_256_shapes,
)


def _add_layer_norm_silu_e4m3_256_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max, forward.mean, forward.rstd


def _add_layer_norm_silu_e4m3_256_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return values, scale, scale_max, mean, rstd


# Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.
# x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,), mean (M,), rstd
# (M,).
add_layer_norm_silu_e4m3_256 = operators.operator(
    "add_layer_norm_silu_e4m3_256_a432f2c4",
    operators.deferred(__package__, "add_layer_norm_silu_e4m3_256"),
    _add_layer_norm_silu_e4m3_256_reference,
    _add_layer_norm_silu_e4m3_256_shapes,
)


def _add_layer_norm_silu_e4m3_256_inference_reference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max


def _add_layer_norm_silu_e4m3_256_inference_shapes(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 256)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


# Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.
# x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,).
add_layer_norm_silu_e4m3_256_inference = operators.operator(
    "add_layer_norm_silu_e4m3_256_inference_93841a65",
    operators.deferred(__package__, "add_layer_norm_silu_e4m3_256_inference"),
    _add_layer_norm_silu_e4m3_256_inference_reference,
    _add_layer_norm_silu_e4m3_256_inference_shapes,
)


def _concat_norm_2_residual_layer_norm_32_reference(
    part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_joined(part_0, part_1, width=32)
    forward = concat_norm_reference.concat_norm_forward(
        (part_0, part_1), residual=residual, weight=weight, bias=bias, norm="layer_norm", eps=1e-05
    )
    out = forward.y.reshape((part_0.shape[0], part_0.shape[1] + part_1.shape[1], 32)).to(dtype)
    return out, forward.mean, forward.rstd


def _concat_norm_2_residual_layer_norm_32_shapes(
    part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    m = shape[0] * shape[1]
    out = part_0.new_empty(shape, dtype=dtype)
    mean = part_0.new_empty((m,), dtype=torch.float32)
    rstd = part_0.new_empty((m,), dtype=torch.float32)
    return out, mean, rstd


# 2 parts concatenated, a residual added -> LayerNorm (eps 1e-05).
# part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), bias (32,) -> out (B, n, 32), mean (B *
# n,), rstd (B * n,).
concat_norm_2_residual_layer_norm_32 = operators.operator(
    "concat_norm_2_residual_layer_norm_32_2ea365f6",
    operators.deferred(__package__, "concat_norm_2_residual_layer_norm_32"),
    _concat_norm_2_residual_layer_norm_32_reference,
    _concat_norm_2_residual_layer_norm_32_shapes,
)


def _concat_norm_2_residual_layer_norm_backward_32_reference(
    grad: Tensor, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_joined(part_0, part_1, width=32)
    backward = concat_norm_reference.concat_norm_backward(
        grad, (part_0, part_1), residual=residual, weight=weight, mean=mean, rstd=rstd, norm="layer_norm"
    )
    dx = backward.x.reshape(grad.shape).to(torch.promote_types(part_0.dtype, residual.dtype))
    return dx, backward.weight, backward.bias


def _concat_norm_2_residual_layer_norm_backward_32_shapes(
    grad: Tensor, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    m = shape[0] * shape[1]
    programs = operators.programs_for(m, part_0.device, rows=64, per_multiprocessor=16)
    dx = part_0.new_empty(shape, dtype=torch.promote_types(part_0.dtype, residual.dtype))
    dweight = part_0.new_empty((programs, 32), dtype=torch.float32)
    dbias = part_0.new_empty((programs, 32), dtype=torch.float32)
    return dx, dweight, dbias


# Gradient of 2 parts concatenated, a residual added -> LayerNorm.
# grad (B, n, 32), part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), mean (B * n,), rstd (B
# * n,) -> dx (B, n, 32), dweight (P, 32), dbias (P, 32).
concat_norm_2_residual_layer_norm_backward_32 = operators.operator(
    "concat_norm_2_residual_layer_norm_backward_32_0b17db91",
    operators.deferred(__package__, "concat_norm_2_residual_layer_norm_backward_32"),
    _concat_norm_2_residual_layer_norm_backward_32_reference,
    _concat_norm_2_residual_layer_norm_backward_32_shapes,
)


def _fm_interaction_16x32_to_8_8_reference(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    operators.check_sample(x, 16, 32)
    return fm_reference.fm_forward(x, rank, compress)


def _fm_interaction_16x32_to_8_8_shapes(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    operators.check_sample(x, 16, 32)
    products = x.new_empty((x.shape[0], 16, 8))
    compressed = x.new_empty((x.shape[0], 8, 32))
    return products, compressed


# Pairwise products at rank 8 and 8 weighted sums.
# x (B, 16, 32), rank (16, 8), compress (8, 16) -> products (B, 16, 8), compressed (B, 8, 32).
fm_interaction_16x32_to_8_8 = operators.operator(
    "fm_interaction_16x32_to_8_8_08896e3f",
    operators.deferred(__package__, "fm_interaction_16x32_to_8_8"),
    _fm_interaction_16x32_to_8_8_reference,
    _fm_interaction_16x32_to_8_8_shapes,
)


def _fm_interaction_backward_16x32_to_8_8_passed_reference(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_sample(x, 16, 32)
    return fm_reference.fm_backward(dproducts, dcompressed, x, rank, compress, passed)


def _fm_interaction_backward_16x32_to_8_8_passed_shapes(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_sample(x, 16, 32)
    programs = operators.programs(x, rows=1, per_multiprocessor=2) if x.dtype.itemsize == 2 else 1
    dx = x.new_empty((x.shape[0], 16, 32), dtype=passed.dtype)
    drank = x.new_empty((programs, 128), dtype=torch.float32)
    dcompress = x.new_empty((programs, 128), dtype=torch.float32)
    return dx, drank, dcompress


# Gradients of pairwise products at rank 8 and 8 weighted sums.
# dproducts (B, 16, 8), dcompressed (B, 8, 32), x (B, 16, 32), rank (16, 8), compress (8, 16), passed (B, 16, 32) ->
# dx (B, 16, 32), drank (P, 16 * 8), dcompress (P, 8 * 16).
fm_interaction_backward_16x32_to_8_8_passed = operators.operator(
    "fm_interaction_backward_16x32_to_8_8_passed_2257f9f3",
    operators.deferred(__package__, "fm_interaction_backward_16x32_to_8_8_passed"),
    _fm_interaction_backward_16x32_to_8_8_passed_reference,
    _fm_interaction_backward_16x32_to_8_8_passed_shapes,
)


def _layer_norm_backward_128_reference(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 128)
    operators.check_rows(x, 128)
    backward = norm_reference.norm_backward(grad, x=x, weight=weight, mean=mean, rstd=rstd, norm="layer_norm")
    return backward.x.to(grad.dtype), backward.weight, backward.bias


def _layer_norm_backward_128_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(grad, 128)
    operators.check_rows(x, 128)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=32, per_multiprocessor=8)
    dx = grad.new_empty((m, 128))
    dweight = grad.new_empty((programs, 128), dtype=torch.float32)
    dbias = grad.new_empty((programs, 128), dtype=torch.float32)
    return dx, dweight, dbias


# Gradient of LayerNorm.
# grad (M, 128), x (M, 128), weight (128,), mean (M,), rstd (M,) -> dx (M, 128), dweight (P, 128), dbias (P, 128).
layer_norm_backward_128 = operators.operator(
    "layer_norm_backward_128_ed09c8fe",
    operators.deferred(__package__, "layer_norm_backward_128"),
    _layer_norm_backward_128_reference,
    _layer_norm_backward_128_shapes,
)


def _layer_norm_e4m3_128_reference(
    x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(x, 128)
    forward = norm_reference.norm_forward(x, weight=weight, bias=bias, norm="layer_norm", eps=1e-05)
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max, forward.mean, forward.rstd


def _layer_norm_e4m3_128_shapes(
    x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(x, 128)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return values, scale, scale_max, mean, rstd


# LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.
# x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,), mean (M,), rstd (M,).
layer_norm_e4m3_128 = operators.operator(
    "layer_norm_e4m3_128_895b88a9",
    operators.deferred(__package__, "layer_norm_e4m3_128"),
    _layer_norm_e4m3_128_reference,
    _layer_norm_e4m3_128_shapes,
)


def _layer_norm_e4m3_128_inference_reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 128)
    forward = norm_reference.norm_forward(x, weight=weight, bias=bias, norm="layer_norm", eps=1e-05)
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max


def _layer_norm_e4m3_128_inference_shapes(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 128)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


# LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.
# x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,).
layer_norm_e4m3_128_inference = operators.operator(
    "layer_norm_e4m3_128_inference_75b22a64",
    operators.deferred(__package__, "layer_norm_e4m3_128_inference"),
    _layer_norm_e4m3_128_inference_reference,
    _layer_norm_e4m3_128_inference_shapes,
)


def _quantise_e4m3_512_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 512)
    forward = norm_reference.norm_forward(x)
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max


def _quantise_e4m3_512_shapes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 512)
    m = x.shape[0]
    programs = operators.programs(x, rows=1, per_multiprocessor=32)
    values = x.new_empty((m, 512), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


# To e4m3 with one power-of-two scale a row.
# x (M, 512) -> values (M, 512), scale (M, 1), scale_max (P,).
quantise_e4m3_512 = operators.operator(
    "quantise_e4m3_512_6ec7e002",
    operators.deferred(__package__, "quantise_e4m3_512"),
    _quantise_e4m3_512_reference,
    _quantise_e4m3_512_shapes,
)


def _quantise_e4m3_64_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 64)
    forward = norm_reference.norm_forward(x)
    values, scale, scale_max = norm_reference.quantise_rows(forward.y)
    return values, scale, scale_max


def _quantise_e4m3_64_shapes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operators.check_rows(x, 64)
    m = x.shape[0]
    programs = operators.programs(x, rows=16, per_multiprocessor=16)
    values = x.new_empty((m, 64), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


# To e4m3 with one power-of-two scale a row.
# x (M, 64) -> values (M, 64), scale (M, 1), scale_max (P,).
quantise_e4m3_64 = operators.operator(
    "quantise_e4m3_64_1ee58e5d",
    operators.deferred(__package__, "quantise_e4m3_64"),
    _quantise_e4m3_64_reference,
    _quantise_e4m3_64_shapes,
)


def _quantise_weights_128_256_256_reference(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(weight_0, 128)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    values_0, scale_0, scale_max_0 = norm_reference.quantise_rows(weight_0)
    values_1, scale_1, scale_max_1 = norm_reference.quantise_rows(weight_1)
    values_2, scale_2, scale_max_2 = norm_reference.quantise_rows(weight_2)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


def _quantise_weights_128_256_256_shapes(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(weight_0, 128)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    m_0 = weight_0.shape[0]
    programs_0 = operators.programs(weight_0, rows=8, per_multiprocessor=32)
    values_0 = weight_0.new_empty((m_0, 128), dtype=torch.float8_e4m3fn)
    scale_0 = weight_0.new_empty((m_0, 1), dtype=torch.float32)
    scale_max_0 = weight_0.new_empty((programs_0,), dtype=torch.float32)
    m_1 = weight_1.shape[0]
    programs_1 = operators.programs(weight_1, rows=4, per_multiprocessor=32)
    values_1 = weight_1.new_empty((m_1, 256), dtype=torch.float8_e4m3fn)
    scale_1 = weight_1.new_empty((m_1, 1), dtype=torch.float32)
    scale_max_1 = weight_1.new_empty((programs_1,), dtype=torch.float32)
    m_2 = weight_2.shape[0]
    programs_2 = operators.programs(weight_2, rows=4, per_multiprocessor=32)
    values_2 = weight_2.new_empty((m_2, 256), dtype=torch.float8_e4m3fn)
    scale_2 = weight_2.new_empty((m_2, 1), dtype=torch.float32)
    scale_max_2 = weight_2.new_empty((programs_2,), dtype=torch.float32)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


# 3 weights to e4m3 with one power-of-two scale a row.
# weight_0 (M_0, 128), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 128), scale_0 (M_0, 1), scale_max_0
# (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
# scale_max_2 (P_2,).
quantise_weights_128_256_256 = operators.operator(
    "quantise_weights_128_256_256_9e277a2f",
    operators.deferred(__package__, "quantise_weights_128_256_256"),
    _quantise_weights_128_256_256_reference,
    _quantise_weights_128_256_256_shapes,
)


def _quantise_weights_512_256_256_reference(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(weight_0, 512)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    values_0, scale_0, scale_max_0 = norm_reference.quantise_rows(weight_0)
    values_1, scale_1, scale_max_1 = norm_reference.quantise_rows(weight_1)
    values_2, scale_2, scale_max_2 = norm_reference.quantise_rows(weight_2)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


def _quantise_weights_512_256_256_shapes(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operators.check_rows(weight_0, 512)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    m_0 = weight_0.shape[0]
    programs_0 = operators.programs(weight_0, rows=2, per_multiprocessor=32)
    values_0 = weight_0.new_empty((m_0, 512), dtype=torch.float8_e4m3fn)
    scale_0 = weight_0.new_empty((m_0, 1), dtype=torch.float32)
    scale_max_0 = weight_0.new_empty((programs_0,), dtype=torch.float32)
    m_1 = weight_1.shape[0]
    programs_1 = operators.programs(weight_1, rows=4, per_multiprocessor=32)
    values_1 = weight_1.new_empty((m_1, 256), dtype=torch.float8_e4m3fn)
    scale_1 = weight_1.new_empty((m_1, 1), dtype=torch.float32)
    scale_max_1 = weight_1.new_empty((programs_1,), dtype=torch.float32)
    m_2 = weight_2.shape[0]
    programs_2 = operators.programs(weight_2, rows=4, per_multiprocessor=32)
    values_2 = weight_2.new_empty((m_2, 256), dtype=torch.float8_e4m3fn)
    scale_2 = weight_2.new_empty((m_2, 1), dtype=torch.float32)
    scale_max_2 = weight_2.new_empty((programs_2,), dtype=torch.float32)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


# 3 weights to e4m3 with one power-of-two scale a row.
# weight_0 (M_0, 512), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 512), scale_0 (M_0, 1), scale_max_0
# (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
# scale_max_2 (P_2,).
quantise_weights_512_256_256 = operators.operator(
    "quantise_weights_512_256_256_dc2cecfc",
    operators.deferred(__package__, "quantise_weights_512_256_256"),
    _quantise_weights_512_256_256_reference,
    _quantise_weights_512_256_256_shapes,
)


def _reduce_1_reference(partial: Tensor, dtype: torch.dtype) -> Tensor:
    total = norm_reference.reduce(partial, dtype)
    return total


def _reduce_1_shapes(partial: Tensor, dtype: torch.dtype) -> Tensor:
    total = partial.new_empty((partial.shape[1],), dtype=dtype)
    return total


# Column sums of a matrix.
# partial (P, N), dtype of total -> total (N,).
reduce_1 = operators.operator(
    "reduce_1_c75c5cd3", operators.deferred(__package__, "reduce_1"), _reduce_1_reference, _reduce_1_shapes
)


def _reduce_2_reference(
    partial_0: Tensor, dtype_0: torch.dtype, partial_1: Tensor, dtype_1: torch.dtype
) -> tuple[Tensor, Tensor]:
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    return total_0, total_1


def _reduce_2_shapes(
    partial_0: Tensor, dtype_0: torch.dtype, partial_1: Tensor, dtype_1: torch.dtype
) -> tuple[Tensor, Tensor]:
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    return total_0, total_1


# Column sums of 2 matrices.
# partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1 -> total_0 (N_0,), total_1
# (N_1,).
reduce_2 = operators.operator(
    "reduce_2_de768a6b", operators.deferred(__package__, "reduce_2"), _reduce_2_reference, _reduce_2_shapes
)


def _reduce_3_reference(
    partial_0: Tensor,
    dtype_0: torch.dtype,
    partial_1: Tensor,
    dtype_1: torch.dtype,
    partial_2: Tensor,
    dtype_2: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    total_2 = norm_reference.reduce(partial_2, dtype_2)
    return total_0, total_1, total_2


def _reduce_3_shapes(
    partial_0: Tensor,
    dtype_0: torch.dtype,
    partial_1: Tensor,
    dtype_1: torch.dtype,
    partial_2: Tensor,
    dtype_2: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    total_2 = partial_2.new_empty((partial_2.shape[1],), dtype=dtype_2)
    return total_0, total_1, total_2


# Column sums of 3 matrices.
# partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1, partial_2 (P_2, N_2), dtype_2 of
# total_2 -> total_0 (N_0,), total_1 (N_1,), total_2 (N_2,).
reduce_3 = operators.operator(
    "reduce_3_9f735e6a", operators.deferred(__package__, "reduce_3"), _reduce_3_reference, _reduce_3_shapes
)


def _reduce_6_reference(
    partial_0: Tensor,
    dtype_0: torch.dtype,
    partial_1: Tensor,
    dtype_1: torch.dtype,
    partial_2: Tensor,
    dtype_2: torch.dtype,
    partial_3: Tensor,
    dtype_3: torch.dtype,
    partial_4: Tensor,
    dtype_4: torch.dtype,
    partial_5: Tensor,
    dtype_5: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    total_2 = norm_reference.reduce(partial_2, dtype_2)
    total_3 = norm_reference.reduce(partial_3, dtype_3)
    total_4 = norm_reference.reduce(partial_4, dtype_4)
    total_5 = norm_reference.reduce(partial_5, dtype_5)
    return total_0, total_1, total_2, total_3, total_4, total_5


def _reduce_6_shapes(
    partial_0: Tensor,
    dtype_0: torch.dtype,
    partial_1: Tensor,
    dtype_1: torch.dtype,
    partial_2: Tensor,
    dtype_2: torch.dtype,
    partial_3: Tensor,
    dtype_3: torch.dtype,
    partial_4: Tensor,
    dtype_4: torch.dtype,
    partial_5: Tensor,
    dtype_5: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    total_2 = partial_2.new_empty((partial_2.shape[1],), dtype=dtype_2)
    total_3 = partial_3.new_empty((partial_3.shape[1],), dtype=dtype_3)
    total_4 = partial_4.new_empty((partial_4.shape[1],), dtype=dtype_4)
    total_5 = partial_5.new_empty((partial_5.shape[1],), dtype=dtype_5)
    return total_0, total_1, total_2, total_3, total_4, total_5


# Column sums of 6 matrices.
# partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1, partial_2 (P_2, N_2), dtype_2 of
# total_2, partial_3 (P_3, N_3), dtype_3 of total_3, partial_4 (P_4, N_4), dtype_4 of total_4, partial_5 (P_5, N_5),
# dtype_5 of total_5 -> total_0 (N_0,), total_1 (N_1,), total_2 (N_2,), total_3 (N_3,), total_4 (N_4,), total_5
# (N_5,).
reduce_6 = operators.operator(
    "reduce_6_b94159b9", operators.deferred(__package__, "reduce_6"), _reduce_6_reference, _reduce_6_shapes
)


def _requantize_transpose_2_reference(
    values_0: Tensor, scale_0: Tensor, scale_max_0: Tensor, values_1: Tensor, scale_1: Tensor, scale_max_1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    transposed_0, scale_t_0 = norm_reference.requantize_transpose(values_0, scale_0)
    transposed_1, scale_t_1 = norm_reference.requantize_transpose(values_1, scale_1)
    return transposed_0, scale_t_0, transposed_1, scale_t_1


def _requantize_transpose_2_shapes(
    values_0: Tensor, scale_0: Tensor, scale_max_0: Tensor, values_1: Tensor, scale_1: Tensor, scale_max_1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m_0, n_0 = values_0.shape
    transposed_0 = values_0.new_empty((n_0, m_0))
    scale_t_0 = values_0.new_empty((n_0, 1), dtype=torch.float32)
    m_1, n_1 = values_1.shape
    transposed_1 = values_1.new_empty((n_1, m_1))
    scale_t_1 = values_1.new_empty((n_1, 1), dtype=torch.float32)
    return transposed_0, scale_t_0, transposed_1, scale_t_1


# Transposed copies of 2 e4m3 matrices.
# values_0 (R_0, C_0) e4m3, scale_0 (R_0, 1), scale_max_0 (P_0,), values_1 (R_1, C_1) e4m3, scale_1 (R_1, 1),
# scale_max_1 (P_1,) -> transposed_0 (C_0, R_0), scale_t_0 (C_0, 1), transposed_1 (C_1, R_1), scale_t_1 (C_1, 1).
requantize_transpose_2 = operators.operator(
    "requantize_transpose_2_df99b1bb",
    operators.deferred(__package__, "requantize_transpose_2"),
    _requantize_transpose_2_reference,
    _requantize_transpose_2_shapes,
)


def _requantize_transpose_3_reference(
    values_0: Tensor,
    scale_0: Tensor,
    scale_max_0: Tensor,
    values_1: Tensor,
    scale_1: Tensor,
    scale_max_1: Tensor,
    values_2: Tensor,
    scale_2: Tensor,
    scale_max_2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    transposed_0, scale_t_0 = norm_reference.requantize_transpose(values_0, scale_0)
    transposed_1, scale_t_1 = norm_reference.requantize_transpose(values_1, scale_1)
    transposed_2, scale_t_2 = norm_reference.requantize_transpose(values_2, scale_2)
    return transposed_0, scale_t_0, transposed_1, scale_t_1, transposed_2, scale_t_2


def _requantize_transpose_3_shapes(
    values_0: Tensor,
    scale_0: Tensor,
    scale_max_0: Tensor,
    values_1: Tensor,
    scale_1: Tensor,
    scale_max_1: Tensor,
    values_2: Tensor,
    scale_2: Tensor,
    scale_max_2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    m_0, n_0 = values_0.shape
    transposed_0 = values_0.new_empty((n_0, m_0))
    scale_t_0 = values_0.new_empty((n_0, 1), dtype=torch.float32)
    m_1, n_1 = values_1.shape
    transposed_1 = values_1.new_empty((n_1, m_1))
    scale_t_1 = values_1.new_empty((n_1, 1), dtype=torch.float32)
    m_2, n_2 = values_2.shape
    transposed_2 = values_2.new_empty((n_2, m_2))
    scale_t_2 = values_2.new_empty((n_2, 1), dtype=torch.float32)
    return transposed_0, scale_t_0, transposed_1, scale_t_1, transposed_2, scale_t_2


# Transposed copies of 3 e4m3 matrices.
# values_0 (R_0, C_0) e4m3, scale_0 (R_0, 1), scale_max_0 (P_0,), values_1 (R_1, C_1) e4m3, scale_1 (R_1, 1),
# scale_max_1 (P_1,), values_2 (R_2, C_2) e4m3, scale_2 (R_2, 1), scale_max_2 (P_2,) -> transposed_0 (C_0, R_0),
# scale_t_0 (C_0, 1), transposed_1 (C_1, R_1), scale_t_1 (C_1, 1), transposed_2 (C_2, R_2), scale_t_2 (C_2, 1).
requantize_transpose_3 = operators.operator(
    "requantize_transpose_3_cb359ed3",
    operators.deferred(__package__, "requantize_transpose_3"),
    _requantize_transpose_3_reference,
    _requantize_transpose_3_shapes,
)

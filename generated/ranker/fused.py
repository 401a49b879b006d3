"""Operators of ranker.yaml: kernels in Triton on a GPU, the functions below on the CPU.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

`_NAME_outputs` checks an operator's arguments and allocates its results, which `triton_kernels.NAME` fills on a GPU. It
tells the compiler their shapes, too. In shapes, M is free, W is one of several widths, and P is the number of programs
that a kernel is launched with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.interaction import concat_norm_reference, fm_reference
from loka.kernels.fused.norm import norm_reference

STAMP = "97758d9c0d919a04f032cb0c0e26f778d0e43e6f2dbd07c455d2fd0ea80d89f3"


def _add_backward_e4m3_outputs(grad: Tensor) -> tuple[Tensor, ...]:
    operators.check_rows(grad, 256)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    return values, scale, scale_max, dadd


@operators.kernel(__package__, "03e5c89a", _add_backward_e4m3_outputs)
def add_backward_e4m3(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition -> e4m3 with one power-of-two scale a row.

    grad (M, 256) -> values (M, 256), scale (M, 1), scale_max (P,), dadd (P, 256).
    """
    backward = norm_reference.norm_backward(grad)
    values, scale, scale_max = norm_reference.quantize_rows(backward.x)
    return values, scale, scale_max, backward.add


def _add_layer_norm_silu_outputs(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    width = operators.width_of(x, (64, 256))
    operators.check_vectors(width, add, weight, bias)
    m = x.shape[0]
    out = x.new_empty((m, width), dtype=x.dtype if dtype is None else dtype)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return out, mean, rstd


@operators.kernel(__package__, "4dcceb73", _add_layer_norm_silu_outputs)
def add_layer_norm_silu(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, W), add (W,), weight (W,), bias (W,) -> out (M, W), mean (M,), rstd (M,).
    """
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype), forward.mean, forward.rstd


def _add_layer_norm_silu_backward_outputs(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    operators.check_rows(grad, 64)
    operators.check_rows(x, 64, grad.shape[0])
    m = grad.shape[0]
    programs = operators.programs(grad, rows=64, per_multiprocessor=8)
    dx = grad.new_empty((m, 64))
    dweight = grad.new_empty((programs, 64), dtype=torch.float32)
    dbias = grad.new_empty((programs, 64), dtype=torch.float32)
    dadd = grad.new_empty((programs, 64), dtype=torch.float32)
    return dx, dweight, dbias, dadd


@operators.kernel(__package__, "dd5eedef", _add_layer_norm_silu_backward_outputs)
def add_layer_norm_silu_backward(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition, LayerNorm, SiLU.

    grad (M, 64), x (M, 64), add (64,), weight (64,), bias (64,), mean (M,), rstd (M,) -> dx (M, 64), dweight (P, 64),
    dbias (P, 64), dadd (P, 64).
    """
    backward = norm_reference.norm_backward(
        grad, x=x, add=add, weight=weight, bias=bias, mean=mean, rstd=rstd, norm="layer_norm", activation="silu"
    )
    return backward.x.to(grad.dtype), backward.weight, backward.bias, backward.add


def _add_layer_norm_silu_backward_e4m3_outputs(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    operators.check_rows(grad, 256)
    operators.check_rows(x, 256, grad.shape[0])
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dweight = grad.new_empty((programs, 256), dtype=torch.float32)
    dbias = grad.new_empty((programs, 256), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    return values, scale, scale_max, dweight, dbias, dadd


@operators.kernel(__package__, "4bd810c8", _add_layer_norm_silu_backward_e4m3_outputs)
def add_layer_norm_silu_backward_e4m3(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row.

    grad (M, 256), x (M, 256), add (256,), weight (256,), bias (256,), mean (M,), rstd (M,) -> values (M, 256), scale
    (M, 1), scale_max (P,), dweight (P, 256), dbias (P, 256), dadd (P, 256).
    """
    backward = norm_reference.norm_backward(
        grad, x=x, add=add, weight=weight, bias=bias, mean=mean, rstd=rstd, norm="layer_norm", activation="silu"
    )
    values, scale, scale_max = norm_reference.quantize_rows(backward.x)
    return values, scale, scale_max, backward.weight, backward.bias, backward.add


def _add_layer_norm_silu_e4m3_outputs(x: Tensor, add: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    operators.check_rows(x, 256)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return values, scale, scale_max, mean, rstd


@operators.kernel(__package__, "c03baa14", _add_layer_norm_silu_e4m3_outputs)
def add_layer_norm_silu_e4m3(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.

    x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,), mean (M,), rstd
    (M,).
    """
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    values, scale, scale_max = norm_reference.quantize_rows(forward.y)
    return values, scale, scale_max, forward.mean, forward.rstd


def _add_layer_norm_silu_e4m3_inference_outputs(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    operators.check_rows(x, 256)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


@operators.kernel(__package__, "e2670fa4", _add_layer_norm_silu_e4m3_inference_outputs)
def add_layer_norm_silu_e4m3_inference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.

    x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,).
    """
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return norm_reference.quantize_rows(forward.y)


def _add_layer_norm_silu_inference_outputs(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    width = operators.width_of(x, (64, 256))
    operators.check_vectors(width, add, weight, bias)
    m = x.shape[0]
    out = x.new_empty((m, width), dtype=x.dtype if dtype is None else dtype)
    return out


@operators.kernel(__package__, "922fbc67", _add_layer_norm_silu_inference_outputs)
def add_layer_norm_silu_inference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, W), add (W,), weight (W,), bias (W,) -> out (M, W).
    """
    forward = norm_reference.norm_forward(
        x, add=add, weight=weight, bias=bias, norm="layer_norm", eps=1e-05, activation="silu"
    )
    return forward.y.to(x.dtype if dtype is None else dtype)


def _concat_norm_2_residual_layer_norm_32_outputs(
    part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    m = shape[0] * shape[1]
    out = part_0.new_empty(shape, dtype=dtype)
    mean = part_0.new_empty((m,), dtype=torch.float32)
    rstd = part_0.new_empty((m,), dtype=torch.float32)
    return out, mean, rstd


@operators.kernel(__package__, "8f980dbf", _concat_norm_2_residual_layer_norm_32_outputs)
def concat_norm_2_residual_layer_norm_32(
    part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """2 parts concatenated, a residual added -> LayerNorm (eps 1e-05).

    part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), bias (32,) -> out (B, n, 32), mean (B *
    n,), rstd (B * n,).
    """
    forward = concat_norm_reference.concat_norm_forward(
        (part_0, part_1), residual=residual, weight=weight, bias=bias, norm="layer_norm", eps=1e-05
    )
    out = forward.y.reshape((part_0.shape[0], part_0.shape[1] + part_1.shape[1], 32)).to(dtype)
    return out, forward.mean, forward.rstd


def _concat_norm_2_residual_layer_norm_backward_32_outputs(
    grad: Tensor, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    programs = operators.programs_for(shape[0] * shape[1], part_0.device, rows=64, per_multiprocessor=16)
    dx = part_0.new_empty(shape, dtype=torch.promote_types(part_0.dtype, residual.dtype))
    dweight = part_0.new_empty((programs, 32), dtype=torch.float32)
    dbias = part_0.new_empty((programs, 32), dtype=torch.float32)
    return dx, dweight, dbias


@operators.kernel(__package__, "ecaf19c0", _concat_norm_2_residual_layer_norm_backward_32_outputs)
def concat_norm_2_residual_layer_norm_backward_32(
    grad: Tensor, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of 2 parts concatenated, a residual added -> LayerNorm.

    grad (B, n, 32), part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), mean (B * n,), rstd (B
    * n,) -> dx (B, n, 32), dweight (P, 32), dbias (P, 32).
    """
    backward = concat_norm_reference.concat_norm_backward(
        grad, (part_0, part_1), residual=residual, weight=weight, mean=mean, rstd=rstd, norm="layer_norm"
    )
    dx = backward.x.reshape(grad.shape).to(torch.promote_types(part_0.dtype, residual.dtype))
    return dx, backward.weight, backward.bias


def _fm_interaction_16x32_to_8_8_outputs(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, ...]:
    operators.check_sample(x, 16, 32)
    products = x.new_empty((x.shape[0], 16, 8))
    compressed = x.new_empty((x.shape[0], 8, 32))
    return products, compressed


@operators.kernel(__package__, "663b3131", _fm_interaction_16x32_to_8_8_outputs, flops=24576)
def fm_interaction_16x32_to_8_8(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    """Pairwise products at rank 8 and 8 weighted sums.

    x (B, 16, 32), rank (16, 8), compress (8, 16) -> products (B, 16, 8), compressed (B, 8, 32).
    """
    return fm_reference.fm_forward(x, rank, compress)


def _fm_interaction_backward_16x32_to_8_8_passed_outputs(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, ...]:
    operators.check_sample(x, 16, 32)
    programs = operators.programs(x, rows=1, per_multiprocessor=2) if x.dtype.itemsize == 2 else 1
    dx = x.new_empty((x.shape[0], 16, 32), dtype=passed.dtype)
    drank = x.new_empty((programs, 128), dtype=torch.float32)
    dcompress = x.new_empty((programs, 128), dtype=torch.float32)
    return dx, drank, dcompress


@operators.kernel(__package__, "eb4cba9e", _fm_interaction_backward_16x32_to_8_8_passed_outputs, flops=49152)
def fm_interaction_backward_16x32_to_8_8_passed(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of pairwise products at rank 8 and 8 weighted sums.

    dproducts (B, 16, 8), dcompressed (B, 8, 32), x (B, 16, 32), rank (16, 8), compress (8, 16), passed (B, 16, 32) ->
    dx (B, 16, 32), drank (P, 16 * 8), dcompress (P, 8 * 16).
    """
    return fm_reference.fm_backward(dproducts, dcompressed, x, rank, compress, passed)


def _layer_norm_backward_outputs(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    operators.check_rows(grad, 128)
    operators.check_rows(x, 128, grad.shape[0])
    m = grad.shape[0]
    programs = operators.programs(grad, rows=32, per_multiprocessor=8)
    dx = grad.new_empty((m, 128))
    dweight = grad.new_empty((programs, 128), dtype=torch.float32)
    dbias = grad.new_empty((programs, 128), dtype=torch.float32)
    return dx, dweight, dbias


@operators.kernel(__package__, "8c43629d", _layer_norm_backward_outputs)
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of LayerNorm.

    grad (M, 128), x (M, 128), weight (128,), mean (M,), rstd (M,) -> dx (M, 128), dweight (P, 128), dbias (P, 128).
    """
    backward = norm_reference.norm_backward(grad, x=x, weight=weight, mean=mean, rstd=rstd, norm="layer_norm")
    return backward.x.to(grad.dtype), backward.weight, backward.bias


def _layer_norm_e4m3_outputs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    operators.check_rows(x, 128)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    return values, scale, scale_max, mean, rstd


@operators.kernel(__package__, "7b7f230d", _layer_norm_e4m3_outputs)
def layer_norm_e4m3(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.

    x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,), mean (M,), rstd (M,).
    """
    forward = norm_reference.norm_forward(x, weight=weight, bias=bias, norm="layer_norm", eps=1e-05)
    values, scale, scale_max = norm_reference.quantize_rows(forward.y)
    return values, scale, scale_max, forward.mean, forward.rstd


def _layer_norm_e4m3_inference_outputs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    operators.check_rows(x, 128)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


@operators.kernel(__package__, "788cea13", _layer_norm_e4m3_inference_outputs)
def layer_norm_e4m3_inference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.

    x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,).
    """
    forward = norm_reference.norm_forward(x, weight=weight, bias=bias, norm="layer_norm", eps=1e-05)
    return norm_reference.quantize_rows(forward.y)


def _quantize_e4m3_outputs(x: Tensor) -> tuple[Tensor, ...]:
    operators.check_rows(x, 512)
    m = x.shape[0]
    programs = operators.programs(x, rows=1, per_multiprocessor=32)
    values = x.new_empty((m, 512), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    return values, scale, scale_max


@operators.kernel(__package__, "b6bd080f", _quantize_e4m3_outputs)
def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To e4m3 with one power-of-two scale a row.

    x (M, 512) -> values (M, 512), scale (M, 1), scale_max (P,).
    """
    forward = norm_reference.norm_forward(x)
    return norm_reference.quantize_rows(forward.y)


def _quantize_weights_128_256_256_outputs(*weights: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for weight, (width, columns, rows) in zip(weights, ((128, 128, 8), (256, 256, 4), (256, 256, 4)), strict=True):
        operators.check_rows(weight, width)
        m, programs = weight.shape[0], operators.programs(weight, rows=rows, per_multiprocessor=32)
        values = weight.new_empty((m, columns), dtype=torch.float8_e4m3fn)
        scale = weight.new_empty((m, 1), dtype=torch.float32)
        outputs += [values, scale, weight.new_empty((programs,), dtype=torch.float32)]
    return tuple(outputs)


@operators.kernel(__package__, "d129eb33", _quantize_weights_128_256_256_outputs)
def quantize_weights_128_256_256(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 weights to e4m3 with one power-of-two scale a row.

    weight_0 (M_0, 128), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 128), scale_0 (M_0, 1), scale_max_0
    (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
    scale_max_2 (P_2,).
    """
    values_0, scale_0, scale_max_0 = norm_reference.quantize_rows(weight_0)
    values_1, scale_1, scale_max_1 = norm_reference.quantize_rows(weight_1)
    values_2, scale_2, scale_max_2 = norm_reference.quantize_rows(weight_2)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


def _quantize_weights_512_256_256_outputs(*weights: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for weight, (width, columns, rows) in zip(weights, ((512, 512, 2), (256, 256, 4), (256, 256, 4)), strict=True):
        operators.check_rows(weight, width)
        m, programs = weight.shape[0], operators.programs(weight, rows=rows, per_multiprocessor=32)
        values = weight.new_empty((m, columns), dtype=torch.float8_e4m3fn)
        scale = weight.new_empty((m, 1), dtype=torch.float32)
        outputs += [values, scale, weight.new_empty((programs,), dtype=torch.float32)]
    return tuple(outputs)


@operators.kernel(__package__, "cf47359b", _quantize_weights_512_256_256_outputs)
def quantize_weights_512_256_256(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 weights to e4m3 with one power-of-two scale a row.

    weight_0 (M_0, 512), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 512), scale_0 (M_0, 1), scale_max_0
    (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
    scale_max_2 (P_2,).
    """
    values_0, scale_0, scale_max_0 = norm_reference.quantize_rows(weight_0)
    values_1, scale_1, scale_max_1 = norm_reference.quantize_rows(weight_1)
    values_2, scale_2, scale_max_2 = norm_reference.quantize_rows(weight_2)
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


def _reduce_2_outputs(*operands: Any) -> tuple[Tensor, ...]:
    partials, dtypes = operands[::2], operands[1::2]
    return tuple(x.new_empty((x.shape[1],), dtype=dtype) for x, dtype in zip(partials, dtypes, strict=True))


@operators.kernel(__package__, "a017e675", _reduce_2_outputs)
def reduce_2(partial_0: Tensor, dtype_0: torch.dtype, partial_1: Tensor, dtype_1: torch.dtype) -> tuple[Tensor, Tensor]:
    """Column sums of 2 matrices.

    partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1 -> total_0 (N_0,), total_1
    (N_1,).
    """
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    return total_0, total_1


def _reduce_3_outputs(*operands: Any) -> tuple[Tensor, ...]:
    partials, dtypes = operands[::2], operands[1::2]
    return tuple(x.new_empty((x.shape[1],), dtype=dtype) for x, dtype in zip(partials, dtypes, strict=True))


@operators.kernel(__package__, "6918bf8b", _reduce_3_outputs)
def reduce_3(
    partial_0: Tensor,
    dtype_0: torch.dtype,
    partial_1: Tensor,
    dtype_1: torch.dtype,
    partial_2: Tensor,
    dtype_2: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Column sums of 3 matrices.

    partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1, partial_2 (P_2, N_2), dtype_2 of
    total_2 -> total_0 (N_0,), total_1 (N_1,), total_2 (N_2,).
    """
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    total_2 = norm_reference.reduce(partial_2, dtype_2)
    return total_0, total_1, total_2


def _reduce_6_outputs(*operands: Any) -> tuple[Tensor, ...]:
    partials, dtypes = operands[::2], operands[1::2]
    return tuple(x.new_empty((x.shape[1],), dtype=dtype) for x, dtype in zip(partials, dtypes, strict=True))


@operators.kernel(__package__, "d70c26cc", _reduce_6_outputs)
def reduce_6(
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
    """Column sums of 6 matrices.

    partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1, partial_2 (P_2, N_2), dtype_2 of
    total_2, partial_3 (P_3, N_3), dtype_3 of total_3, partial_4 (P_4, N_4), dtype_4 of total_4, partial_5 (P_5, N_5),
    dtype_5 of total_5 -> total_0 (N_0,), total_1 (N_1,), total_2 (N_2,), total_3 (N_3,), total_4 (N_4,), total_5
    (N_5,).
    """
    total_0 = norm_reference.reduce(partial_0, dtype_0)
    total_1 = norm_reference.reduce(partial_1, dtype_1)
    total_2 = norm_reference.reduce(partial_2, dtype_2)
    total_3 = norm_reference.reduce(partial_3, dtype_3)
    total_4 = norm_reference.reduce(partial_4, dtype_4)
    total_5 = norm_reference.reduce(partial_5, dtype_5)
    return total_0, total_1, total_2, total_3, total_4, total_5


def _requantize_transpose_2_outputs(*operands: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for values in operands[::3]:
        m, n = values.shape
        m_t = -(-m // 16) * 16
        outputs += [values.new_empty((n, m_t)), values.new_empty((n, 1), dtype=torch.float32)]
    return tuple(outputs)


@operators.kernel(__package__, "9511a08e", _requantize_transpose_2_outputs)
def requantize_transpose_2(
    values_0: Tensor, scale_0: Tensor, scale_max_0: Tensor, values_1: Tensor, scale_1: Tensor, scale_max_1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transposed copies of 2 e4m3 matrices.

    values_0 (R_0, C_0) e4m3, scale_0 (R_0, 1), scale_max_0 (P_0,), values_1 (R_1, C_1) e4m3, scale_1 (R_1, 1),
    scale_max_1 (P_1,) -> transposed_0 (C_0, R_0), scale_t_0 (C_0, 1), transposed_1 (C_1, R_1), scale_t_1 (C_1, 1).
    """
    transposed_0, scale_t_0 = norm_reference.requantize_transpose(values_0, scale_0, of_the_batch=True)
    transposed_1, scale_t_1 = norm_reference.requantize_transpose(values_1, scale_1, of_the_batch=True)
    return transposed_0, scale_t_0, transposed_1, scale_t_1


def _requantize_transpose_3_outputs(*operands: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for place, values in enumerate(operands[::3]):
        m, n = values.shape
        m_t = -(-m // 16) * 16 if place < 2 else m
        outputs += [values.new_empty((n, m_t)), values.new_empty((n, 1), dtype=torch.float32)]
    return tuple(outputs)


@operators.kernel(__package__, "4990ae37", _requantize_transpose_3_outputs)
def requantize_transpose_3(
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
    """Transposed copies of 3 e4m3 matrices.

    values_0 (R_0, C_0) e4m3, scale_0 (R_0, 1), scale_max_0 (P_0,), values_1 (R_1, C_1) e4m3, scale_1 (R_1, 1),
    scale_max_1 (P_1,), values_2 (R_2, C_2) e4m3, scale_2 (R_2, 1), scale_max_2 (P_2,) -> transposed_0 (C_0, R_0),
    scale_t_0 (C_0, 1), transposed_1 (C_1, R_1), scale_t_1 (C_1, 1), transposed_2 (C_2, R_2), scale_t_2 (C_2, 1).
    """
    transposed_0, scale_t_0 = norm_reference.requantize_transpose(values_0, scale_0, of_the_batch=True)
    transposed_1, scale_t_1 = norm_reference.requantize_transpose(values_1, scale_1, of_the_batch=True)
    transposed_2, scale_t_2 = norm_reference.requantize_transpose(values_2, scale_2)
    return transposed_0, scale_t_0, transposed_1, scale_t_1, transposed_2, scale_t_2

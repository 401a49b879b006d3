# ruff: noqa: N803
"""Triton kernels of ranker.yaml, and the functions that launch them.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

A function NAME fills the results that `fused` allocated: it takes them, and then the arguments of `fused.NAME`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.kernels.fused import operators
from loka.kernels.fused.interaction import fm_reference

STAMP = "97758d9c0d919a04f032cb0c0e26f778d0e43e6f2dbd07c455d2fd0ea80d89f3"


@triton.jit
def sigmoid(z):
    # Instructions are what these kernels wait for: a division takes seven more than a root, and exp three more than
    # exp2.
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def silu(z):
    return z * sigmoid(z)


@triton.jit
def silu_gradient(grad, z):
    s = sigmoid(z)
    return grad * s * (1.0 + z * (1.0 - s))


@triton.jit
def e4m3_scale(amax):
    """The smallest power of two that is not below amax / 448, and its reciprocal; 448 is 1.75 * 2**8."""
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x04000000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def nan_unless_finite(x):
    """Zero where x is finite, elsewhere NaN. Maxima ignore NaN, so that adding this leaves out what is not finite."""
    return x - x


@triton.jit
def quantize_rows(
    program, programs, x_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m, columns: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """One program's rows of x (m, columns), written to values (m, columns) in e4m3."""
    column = tl.arange(0, columns)[None, :]
    scale_max = 0.0
    for first in range(program * rows, m, programs * rows):
        # Behind the last row it stands again: that takes no mask.
        row = tl.minimum(first + tl.arange(0, rows), m - 1)
        start = row[:, None].to(tl.int64)
        x = tl.load(x_ptr + start * x_stride + column).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(x)
        amax = tl.maximum(tl.max(tl.abs(x) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = x * reciprocal[:, None] - nan
        tl.store(values_ptr + start * columns + column, values.to(tl.float8e4nv))
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, tl.max(scale, 0))
    tl.store(scale_max_ptr + program, scale_max)


@triton.jit
def sum_columns(block, partial_ptr, total_ptr, p, n, rows: tl.constexpr, columns: tl.constexpr):
    """Sums of one block of columns of partial (p, n), written to total (n,)."""
    column = block * columns + tl.arange(0, columns)
    inside = column < n
    total = tl.zeros([rows, columns], tl.float32)
    for first in range(0, p, rows):
        row = first + tl.arange(0, rows)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit
def requantize_transpose_tile(
    tile, values_ptr, scale_ptr, scale_max_ptr, transposed_ptr, scale_t_ptr, m, n, m_t, parts, side: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """One tile of side x side of values (m, n), written to transposed (n, m_t); the first ones fill scale_t (n,)."""
    # The largest of the scales; 2**-108 is that of a zero row, the smallest there is.
    scale_max = tl.full([chunk], 3.0814879110195774e-33, tl.float32)
    for first in range(0, parts, chunk):
        part = first + tl.arange(0, chunk)
        scale_max = tl.maximum(scale_max, tl.load(scale_max_ptr + part, mask=part < parts, other=0.0))
    bits = tl.max(scale_max, 0).to(tl.int32, bitcast=True)
    reciprocal = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    across = tl.maximum(tl.cdiv(n, side), 1)
    row = tile // across * side + tl.arange(0, side)
    column = tile % across * side + tl.arange(0, side)
    mask = (row < m)[:, None] & (column < n)[None, :]
    values = tl.load(values_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    ratio = tl.load(scale_ptr + row, mask=row < m, other=0.0) * reciprocal
    transposed = tl.trans((values.to(tl.float32) * ratio[:, None]).to(tl.float8e4nv))
    # Behind the last row come zeros, up to m_t.
    written = (column < n)[:, None] & (row < m_t)[None, :]
    tl.store(transposed_ptr + column[:, None].to(tl.int64) * m_t + row[None, :], transposed, mask=written)
    if tile < across:
        scale_t = tl.zeros([side], tl.float32) + bits.to(tl.float32, bitcast=True)
        tl.store(scale_t_ptr + column, scale_t, mask=column < n)


@triton.jit(do_not_specialize=["m"])
def _add_backward_e4m3(
    grad_ptr, values_ptr, scale_ptr, scale_max_ptr, dadd_ptr, grad_stride, m, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Gradient of addition -> e4m3 with one power-of-two scale a row for grad (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    dadd = tl.zeros([ROWS, WIDTH], tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        dadd += grad
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(grad)
        amax = tl.maximum(tl.max(tl.abs(grad) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = grad * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_backward_e4m3(values, scale, scale_max, dadd, grad):
    grad = operators.whole_rows(grad)
    grid = (dadd.shape[0],)
    tensors = (grad, values, scale, scale_max, dadd)
    sizes = (grad.stride(0), grad.shape[0])
    operators.launch(_add_backward_e4m3, grid, *tensors, *sizes, constants=(256, 4), num_warps=2)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu(
    x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, x_stride, m, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


# Width: the kernel, its constants, its warps, how many rows a program has at least, how many programs a multiprocessor
# has at most.
_ADD_LAYER_NORM_SILU_LAUNCHES = {
    64: (_add_layer_norm_silu, (64, 16), 1, 16, 16),
    256: (_add_layer_norm_silu, (256, 4), 1, 4, 16),
}


def add_layer_norm_silu(out, mean, rstd, x, add, weight, bias, _dtype=None):
    x = operators.whole_rows(x)
    add, weight, bias = add.contiguous(), weight.contiguous(), bias.contiguous()
    kernel, constants, warps, rows, per_multiprocessor = _ADD_LAYER_NORM_SILU_LAUNCHES[int(x.shape[1])]
    programs = operators.programs(x, rows, per_multiprocessor)
    grid = (programs,)
    tensors = (x, add, weight, bias, out, mean, rstd)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(kernel, grid, *tensors, *sizes, constants=constants, num_warps=warps)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_backward(
    grad_ptr, x_ptr, add_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, dadd_ptr,
    grad_stride, m, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of addition, LayerNorm, SiLU for grad (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    dadd = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        n = (x - mean[:, None]) * rstd[:, None]
        z = n * weight[None, :] + bias[None, :]
        dz = silu_gradient(grad, z)
        dweight += dz * n
        dbias += dz
        dn = dz * weight[None, :]
        mean_dn = tl.sum(dn, 1) / WIDTH
        mean_dn_n = tl.sum(dn * n, 1) / WIDTH
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        dadd += dx
        tl.store(dx_ptr + offsets, dx, mask=valid[:, None])
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))


def add_layer_norm_silu_backward(dx, dweight, dbias, dadd, grad, x, add, weight, bias, mean, rstd):
    grad = operators.whole_rows(grad)
    x, add, weight, bias = x.contiguous(), add.contiguous(), weight.contiguous(), bias.contiguous()
    grid = (dweight.shape[0],)
    tensors = (grad, x, add, weight, bias, mean, rstd, dx, dweight, dbias, dadd)
    sizes = (grad.stride(0), grad.shape[0])
    operators.launch(_add_layer_norm_silu_backward, grid, *tensors, *sizes, constants=(64, 16), num_warps=2)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_backward_e4m3(
    grad_ptr, x_ptr, add_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, values_ptr, scale_ptr, scale_max_ptr,
    dweight_ptr, dbias_ptr, dadd_ptr, grad_stride, m, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row for grad (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    dadd = tl.zeros([ROWS, WIDTH], tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        n = (x - mean[:, None]) * rstd[:, None]
        z = n * weight[None, :] + bias[None, :]
        dz = silu_gradient(grad, z)
        dweight += dz * n
        dbias += dz
        dn = dz * weight[None, :]
        mean_dn = tl.sum(dn, 1) / WIDTH
        mean_dn_n = tl.sum(dn * n, 1) / WIDTH
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        dadd += dx
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(dx)
        amax = tl.maximum(tl.max(tl.abs(dx) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = dx * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_backward_e4m3(
    values, scale, scale_max, dweight, dbias, dadd, grad, x, add, weight, bias, mean, rstd
):
    grad = operators.whole_rows(grad)
    x, add, weight, bias = x.contiguous(), add.contiguous(), weight.contiguous(), bias.contiguous()
    grid = (dweight.shape[0],)
    tensors = (grad, x, add, weight, bias, mean, rstd, values, scale, scale_max, dweight, dbias, dadd)
    sizes = (grad.stride(0), grad.shape[0])
    operators.launch(_add_layer_norm_silu_backward_e4m3, grid, *tensors, *sizes, constants=(256, 4), num_warps=2)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_e4m3(
    x_ptr, add_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, mean_ptr, rstd_ptr, x_stride, m,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = silu(y)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(y)
        amax = tl.maximum(tl.max(tl.abs(y) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_e4m3(values, scale, scale_max, mean, rstd, x, add, weight, bias):
    x = operators.whole_rows(x)
    add, weight, bias = add.contiguous(), weight.contiguous(), bias.contiguous()
    grid = (scale_max.shape[0],)
    tensors = (x, add, weight, bias, values, scale, scale_max, mean, rstd)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(_add_layer_norm_silu_e4m3, grid, *tensors, *sizes, constants=(256, 4), num_warps=1)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_e4m3_inference(
    x_ptr, add_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        y = silu(y)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(y)
        amax = tl.maximum(tl.max(tl.abs(y) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_e4m3_inference(values, scale, scale_max, x, add, weight, bias):
    x = operators.whole_rows(x)
    add, weight, bias = add.contiguous(), weight.contiguous(), bias.contiguous()
    grid = (scale_max.shape[0],)
    tensors = (x, add, weight, bias, values, scale, scale_max)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(_add_layer_norm_silu_e4m3_inference, grid, *tensors, *sizes, constants=(256, 4), num_warps=1)


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_inference(
    x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, m, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


# Width: the kernel, its constants, its warps, how many rows a program has at least, how many programs a multiprocessor
# has at most.
_ADD_LAYER_NORM_SILU_INFERENCE_LAUNCHES = {
    64: (_add_layer_norm_silu_inference, (64, 16), 1, 16, 16),
    256: (_add_layer_norm_silu_inference, (256, 4), 1, 4, 16),
}


def add_layer_norm_silu_inference(out, x, add, weight, bias, _dtype=None):
    x = operators.whole_rows(x)
    add, weight, bias = add.contiguous(), weight.contiguous(), bias.contiguous()
    kernel, constants, warps, rows, per_multiprocessor = _ADD_LAYER_NORM_SILU_INFERENCE_LAUNCHES[int(x.shape[1])]
    programs = operators.programs(x, rows, per_multiprocessor)
    grid = (programs,)
    tensors = (x, add, weight, bias, out)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(kernel, grid, *tensors, *sizes, constants=constants, num_warps=warps)


@triton.jit(do_not_specialize=["m"])
def _concat_norm_2_residual_layer_norm_32(
    part_0_ptr, part_1_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, n_0, n_1, n, m
):
    """2 parts concatenated, a residual added -> LayerNorm (eps 1e-05): rows (m, 32), n of them a sample."""
    columns = tl.arange(0, 32)[None, :]
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * 128, m, tl.num_programs(0) * 128):
        row = first + tl.arange(0, 128)
        valid = row < m
        mask = valid[:, None]
        offsets = row[:, None].to(tl.int64) * 32 + columns
        sample, place = (row // n).to(tl.int64), row % n
        own = (place >= 0) & (place < n_0)
        part = part_0_ptr + (sample * n_0 + place)[:, None] * 32 + columns
        s = tl.load(part, mask=mask & own[:, None], other=0.0).to(tl.float32)
        place -= n_0
        own = (place >= 0) & (place < n_1)
        part = part_1_ptr + (sample * n_1 + place)[:, None] * 32 + columns
        s += tl.load(part, mask=mask & own[:, None], other=0.0).to(tl.float32)
        s += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(s, 1) / 32
        s = s - mean[:, None]
        tl.store(mean_ptr + row, mean, mask=valid)
        rstd = tl.rsqrt(tl.sum(s * s, 1) / 32 + 1e-05)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = s * rstd[:, None] * weight + bias
        tl.store(out_ptr + offsets, y, mask=mask)


def concat_norm_2_residual_layer_norm_32(out, mean, rstd, part_0, part_1, residual, weight, bias, _dtype):
    m = rstd.shape[0]
    programs = operators.programs_for(m, part_0.device, rows=128, per_multiprocessor=4)
    part_0, part_1, residual = part_0.contiguous(), part_1.contiguous(), residual.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    tensors = (part_0, part_1, residual, weight, bias, out, mean, rstd)
    sizes = (part_0.shape[1], part_1.shape[1], out.shape[1], m)
    operators.launch(_concat_norm_2_residual_layer_norm_32, (programs,), *tensors, *sizes, num_warps=8)


@triton.jit(do_not_specialize=["m"])
def _concat_norm_2_residual_layer_norm_backward_32(
    grad_ptr, part_0_ptr, part_1_ptr, residual_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, n_0,
    n_1, n, m,
):  # fmt: skip
    """Gradient of 2 parts concatenated, a residual added -> LayerNorm: rows (m, 32), n of them a sample."""
    columns = tl.arange(0, 32)[None, :]
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    dweight = tl.zeros([64, 32], tl.float32)
    dbias = tl.zeros([64, 32], tl.float32)
    for first in range(tl.program_id(0) * 64, m, tl.num_programs(0) * 64):
        row = first + tl.arange(0, 64)
        valid = row < m
        mask = valid[:, None]
        offsets = row[:, None].to(tl.int64) * 32 + columns
        sample, place = (row // n).to(tl.int64), row % n
        own = (place >= 0) & (place < n_0)
        part = part_0_ptr + (sample * n_0 + place)[:, None] * 32 + columns
        s = tl.load(part, mask=mask & own[:, None], other=0.0).to(tl.float32)
        place -= n_0
        own = (place >= 0) & (place < n_1)
        part = part_1_ptr + (sample * n_1 + place)[:, None] * 32 + columns
        s += tl.load(part, mask=mask & own[:, None], other=0.0).to(tl.float32)
        s += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        normed = (s - mean[:, None]) * rstd[:, None]
        dweight += grad * normed
        dbias += grad
        grad = grad * weight
        mean_grad = tl.sum(grad, 1) / 32
        mean_grad_normed = tl.sum(grad * normed, 1) / 32
        dx = grad - mean_grad[:, None] - normed * mean_grad_normed[:, None]
        tl.store(dx_ptr + offsets, dx * rstd[:, None], mask=mask)
    total = tl.program_id(0).to(tl.int64) * 32 + tl.arange(0, 32)
    tl.store(dweight_ptr + total, tl.sum(dweight, 0))
    tl.store(dbias_ptr + total, tl.sum(dbias, 0))


def concat_norm_2_residual_layer_norm_backward_32(
    dx, dweight, dbias, grad, part_0, part_1, residual, weight, mean, rstd
):
    grad, part_0, part_1 = grad.contiguous(), part_0.contiguous(), part_1.contiguous()
    residual, weight = residual.contiguous(), weight.contiguous()
    tensors = (grad, part_0, part_1, residual, weight, mean, rstd, dx, dweight, dbias)
    sizes = (part_0.shape[1], part_1.shape[1], dx.shape[1], rstd.shape[0])
    grid = (dweight.shape[0],)
    operators.launch(_concat_norm_2_residual_layer_norm_backward_32, grid, *tensors, *sizes, num_warps=2)


@triton.jit(do_not_specialize=["batch"])
def _fm_interaction_16x32_to_8_8(x_ptr, rank_ptr, compress_ptr, products_ptr, compressed_ptr, batch):
    """Pairwise products at rank 8 and 8 weighted sums: x (batch, 16, 32)."""
    n, d = tl.arange(0, 16), tl.arange(0, 32)
    r = tl.arange(0, 16)
    r_in = r < 8
    rank_t = tl.load(rank_ptr + n[None, :] * 8 + r[:, None], mask=r_in[:, None], other=0.0)
    c = tl.arange(0, 16)
    c_in = c < 8
    compress = tl.load(compress_ptr + c[:, None] * 16 + n[None, :], mask=c_in[:, None], other=0.0)
    for index in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=3):
        sample = tl.cast(index, tl.int64)
        x_at = sample * 512 + n[:, None] * 32 + d[None, :]
        x = tl.load(x_ptr + x_at)
        inner = tl.dot(rank_t, x).to(x.dtype)  # (x^T @ rank)^T
        products = tl.dot(x, tl.trans(inner))
        products_at = products_ptr + sample * 128 + n[:, None] * 8 + r[None, :]
        tl.store(products_at, products, mask=r_in[None, :])
        compressed = tl.dot(compress, x)
        compressed_at = compressed_ptr + sample * 256 + c[:, None] * 32 + d[None, :]
        tl.store(compressed_at, compressed, mask=c_in[:, None])


def fm_interaction_16x32_to_8_8(products, compressed, x, rank, compress):
    if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
        results = fm_reference.fm_forward(x, rank, compress)
        torch._foreach_copy_([products, compressed], results)
        return
    programs = operators.programs(x, rows=1, per_multiprocessor=2)
    x, rank, compress = x.contiguous(), rank.contiguous(), compress.contiguous()
    tensors = (x, rank, compress, products, compressed)
    operators.launch(_fm_interaction_16x32_to_8_8, (programs,), *tensors, x.shape[0], num_warps=4)


@triton.jit(do_not_specialize=["batch"])
def _fm_interaction_backward_16x32_to_8_8_passed(
    dproducts_ptr, dcompressed_ptr, x_ptr, rank_ptr, compress_ptr, passed_ptr, dx_ptr, drank_ptr, dcompress_ptr,
    dcompressed_stride, passed_stride, batch,
):  # fmt: skip
    """Gradients of pairwise products at rank 8 and 8 weighted sums, of x (batch, 16, 32); 32 columns at a step."""
    n, r = tl.arange(0, 16), tl.arange(0, 16)
    r_in = r < 8
    rank = tl.load(rank_ptr + n[:, None] * 8 + r[None, :], mask=r_in[None, :], other=0.0)
    drank = tl.zeros([16, 16], tl.float32)
    c = tl.arange(0, 16)
    c_in = c < 8
    compress = tl.load(compress_ptr + c[:, None] * 16 + n[None, :], mask=c_in[:, None], other=0.0)
    dcompress = tl.zeros([16, 16], tl.float32)
    steps = batch
    for step in tl.range(tl.program_id(0), steps, tl.num_programs(0), num_stages=3):
        sample = tl.cast(step, tl.int64)
        d = tl.arange(0, 32)
        x_at = sample * 512 + n[:, None] * 32 + d[None, :]
        x = tl.load(x_ptr + x_at)
        dproducts_at = dproducts_ptr + sample * 128 + n[:, None] * 8 + r[None, :]
        dproducts = tl.load(dproducts_at, mask=r_in[None, :], other=0.0)
        passed_at = passed_ptr + sample * passed_stride + n[:, None] * 32 + d[None, :]
        passed = tl.load(passed_at)
        inner = tl.dot(tl.trans(rank), x).to(x.dtype)
        dinner = tl.dot(tl.trans(dproducts), x).to(x.dtype)
        dx = tl.dot(dproducts, inner, passed.to(tl.float32))
        dx = tl.dot(rank, dinner, dx)
        dcompressed_at = dcompressed_ptr + sample * dcompressed_stride + c[:, None] * 32 + d[None, :]
        dcompressed = tl.load(dcompressed_at, mask=c_in[:, None], other=0.0)
        dx = tl.dot(tl.trans(compress), dcompressed, dx)
        dcompress = tl.dot(dcompressed, tl.trans(x), dcompress)
        drank = tl.dot(x, tl.trans(dinner), drank)
        tl.store(dx_ptr + x_at, dx)
    part = tl.program_id(0)
    tl.store(drank_ptr + part * 128 + n[:, None] * 8 + r[None, :], drank, mask=r_in[None, :])
    tl.store(dcompress_ptr + part * 128 + c[:, None] * 16 + n[None, :], dcompress, mask=c_in[:, None])


def fm_interaction_backward_16x32_to_8_8_passed(
    dx, drank, dcompress, dproducts, dcompressed, x, rank, compress, passed
):
    if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
        results = fm_reference.fm_backward(dproducts, dcompressed, x, rank, compress, passed)
        torch._foreach_copy_([dx, drank, dcompress], results)
        return
    dcompressed = operators.whole_samples(dcompressed)
    passed = operators.whole_samples(passed)
    dproducts, x, rank, compress = dproducts.contiguous(), x.contiguous(), rank.contiguous(), compress.contiguous()
    tensors = (dproducts, dcompressed, x, rank, compress, passed, dx, drank, dcompress)
    sizes = (dcompressed.stride(0), passed.stride(0), x.shape[0])
    grid = (drank.shape[0],)
    operators.launch(_fm_interaction_backward_16x32_to_8_8_passed, grid, *tensors, *sizes, num_warps=4)


@triton.jit(do_not_specialize=["m"])
def _layer_norm_backward(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, grad_stride, m,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of LayerNorm for grad (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        n = (x - mean[:, None]) * rstd[:, None]
        dweight += grad * n
        dbias += grad
        dn = grad * weight[None, :]
        mean_dn = tl.sum(dn, 1) / WIDTH
        mean_dn_n = tl.sum(dn * n, 1) / WIDTH
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        tl.store(dx_ptr + offsets, dx, mask=valid[:, None])
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))


def layer_norm_backward(dx, dweight, dbias, grad, x, weight, mean, rstd):
    grad = operators.whole_rows(grad)
    x, weight = x.contiguous(), weight.contiguous()
    grid = (dweight.shape[0],)
    tensors = (grad, x, weight, mean, rstd, dx, dweight, dbias)
    sizes = (grad.stride(0), grad.shape[0])
    operators.launch(_layer_norm_backward, grid, *tensors, *sizes, constants=(128, 8), num_warps=2)


@triton.jit(do_not_specialize=["m"])
def _layer_norm_e4m3(
    x_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, mean_ptr, rstd_ptr, x_stride, m,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(y)
        amax = tl.maximum(tl.max(tl.abs(y) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def layer_norm_e4m3(values, scale, scale_max, mean, rstd, x, weight, bias):
    x = operators.whole_rows(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    grid = (scale_max.shape[0],)
    tensors = (x, weight, bias, values, scale, scale_max, mean, rstd)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(_layer_norm_e4m3, grid, *tensors, *sizes, constants=(128, 8), num_warps=1)


@triton.jit(do_not_specialize=["m"])
def _layer_norm_e4m3_inference(
    x_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * WIDTH + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / WIDTH
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(y)
        amax = tl.maximum(tl.max(tl.abs(y) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None] - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def layer_norm_e4m3_inference(values, scale, scale_max, x, weight, bias):
    x = operators.whole_rows(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    grid = (scale_max.shape[0],)
    tensors = (x, weight, bias, values, scale, scale_max)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(_layer_norm_e4m3_inference, grid, *tensors, *sizes, constants=(128, 8), num_warps=1)


@triton.jit(do_not_specialize=["m"])
def _quantize_e4m3(x_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m, WIDTH: tl.constexpr):
    """To e4m3 with one power-of-two scale a row of x (m, WIDTH)."""
    columns = tl.arange(0, WIDTH)
    scale_max = 0.0
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * WIDTH + columns
        x_offsets = tl.cast(row, tl.int64) * x_stride + columns
        x = tl.load(x_ptr + x_offsets).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(x)
        amax = tl.maximum(tl.max(tl.abs(x) + nan, 0), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = x * reciprocal - nan
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv))
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, scale)
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def quantize_e4m3(values, scale, scale_max, x):
    x = operators.whole_rows(x)
    grid = (scale_max.shape[0],)
    tensors = (x, values, scale, scale_max)
    sizes = (x.stride(0), x.shape[0])
    operators.launch(_quantize_e4m3, grid, *tensors, *sizes, constants=(512,), num_warps=1)


@triton.jit(do_not_specialize=["m_0", "m_1", "m_2", "programs_0", "programs_1", "programs_2"])
def _quantize_weights_128_256_256(
    weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, weight_1_ptr, values_1_ptr, scale_1_ptr,
    scale_max_1_ptr, stride_1, m_1, weight_2_ptr, values_2_ptr, scale_2_ptr, scale_max_2_ptr, stride_2, m_2, programs_0,
    programs_1, programs_2,
):  # fmt: skip
    """3 weights to e4m3 with one power-of-two scale a row."""
    program = tl.program_id(0)
    if program < programs_0:
        quantize_rows(
            program, programs_0, weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, columns=128,
            rows=8,
        )  # fmt: skip
    elif program < programs_0 + programs_1:
        quantize_rows(
            program - programs_0, programs_1, weight_1_ptr, values_1_ptr, scale_1_ptr, scale_max_1_ptr, stride_1, m_1,
            columns=256, rows=4,
        )  # fmt: skip
    else:
        quantize_rows(
            program - programs_0 - programs_1, programs_2, weight_2_ptr, values_2_ptr, scale_2_ptr, scale_max_2_ptr,
            stride_2, m_2, columns=256, rows=4,
        )  # fmt: skip


def quantize_weights_128_256_256(*tensors):
    operands, programs = [], []
    for i in range(3):
        values, scale, scale_max = tensors[3 * i : 3 * i + 3]
        weight = operators.whole_rows(tensors[i + 9])
        operands += [weight, values, scale, scale_max, weight.stride(0), weight.shape[0]]
        programs.append(scale_max.shape[0])
    operators.launch(_quantize_weights_128_256_256, (sum(programs),), *operands, *programs, num_warps=1)


@triton.jit(do_not_specialize=["m_0", "m_1", "m_2", "programs_0", "programs_1", "programs_2"])
def _quantize_weights_512_256_256(
    weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, weight_1_ptr, values_1_ptr, scale_1_ptr,
    scale_max_1_ptr, stride_1, m_1, weight_2_ptr, values_2_ptr, scale_2_ptr, scale_max_2_ptr, stride_2, m_2, programs_0,
    programs_1, programs_2,
):  # fmt: skip
    """3 weights to e4m3 with one power-of-two scale a row."""
    program = tl.program_id(0)
    if program < programs_0:
        quantize_rows(
            program, programs_0, weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, columns=512,
            rows=2,
        )  # fmt: skip
    elif program < programs_0 + programs_1:
        quantize_rows(
            program - programs_0, programs_1, weight_1_ptr, values_1_ptr, scale_1_ptr, scale_max_1_ptr, stride_1, m_1,
            columns=256, rows=4,
        )  # fmt: skip
    else:
        quantize_rows(
            program - programs_0 - programs_1, programs_2, weight_2_ptr, values_2_ptr, scale_2_ptr, scale_max_2_ptr,
            stride_2, m_2, columns=256, rows=4,
        )  # fmt: skip


def quantize_weights_512_256_256(*tensors):
    operands, programs = [], []
    for i in range(3):
        values, scale, scale_max = tensors[3 * i : 3 * i + 3]
        weight = operators.whole_rows(tensors[i + 9])
        operands += [weight, values, scale, scale_max, weight.stride(0), weight.shape[0]]
        programs.append(scale_max.shape[0])
    operators.launch(_quantize_weights_512_256_256, (sum(programs),), *operands, *programs, num_warps=1)


@triton.jit(do_not_specialize=["p_0", "p_1"])
def _reduce_2(partial_0_ptr, total_0_ptr, p_0, n_0, partial_1_ptr, total_1_ptr, p_1, n_1, blocks_0):
    """Column sums of 2 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        sum_columns(block, partial_0_ptr, total_0_ptr, p_0, n_0, rows=128, columns=16)
    else:
        sum_columns(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1, rows=128, columns=16)


def reduce_2(*tensors):
    operands, blocks = [], []
    # Before the partial sums are the totals, and between them the dtypes of these.
    for partial, total in zip(tensors[2::2], tensors[:2], strict=True):
        operands += [partial.contiguous(), total, *partial.shape]
        blocks.append(-(-total.numel() // 16))
    operators.launch(_reduce_2, (sum(blocks),), *operands, *blocks[:-1], num_warps=8)


@triton.jit(do_not_specialize=["p_0", "p_1", "p_2"])
def _reduce_3(
    partial_0_ptr, total_0_ptr, p_0, n_0, partial_1_ptr, total_1_ptr, p_1, n_1, partial_2_ptr, total_2_ptr, p_2, n_2,
    blocks_0, blocks_1,
):  # fmt: skip
    """Column sums of 3 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        sum_columns(block, partial_0_ptr, total_0_ptr, p_0, n_0, rows=128, columns=16)
    elif block < blocks_0 + blocks_1:
        sum_columns(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1, rows=128, columns=16)
    else:
        sum_columns(block - blocks_0 - blocks_1, partial_2_ptr, total_2_ptr, p_2, n_2, rows=128, columns=16)


def reduce_3(*tensors):
    operands, blocks = [], []
    # Before the partial sums are the totals, and between them the dtypes of these.
    for partial, total in zip(tensors[3::2], tensors[:3], strict=True):
        operands += [partial.contiguous(), total, *partial.shape]
        blocks.append(-(-total.numel() // 16))
    operators.launch(_reduce_3, (sum(blocks),), *operands, *blocks[:-1], num_warps=8)


@triton.jit(do_not_specialize=["p_0", "p_1", "p_2", "p_3", "p_4", "p_5"])
def _reduce_6(
    partial_0_ptr, total_0_ptr, p_0, n_0, partial_1_ptr, total_1_ptr, p_1, n_1, partial_2_ptr, total_2_ptr, p_2, n_2,
    partial_3_ptr, total_3_ptr, p_3, n_3, partial_4_ptr, total_4_ptr, p_4, n_4, partial_5_ptr, total_5_ptr, p_5, n_5,
    blocks_0, blocks_1, blocks_2, blocks_3, blocks_4,
):  # fmt: skip
    """Column sums of 6 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        sum_columns(block, partial_0_ptr, total_0_ptr, p_0, n_0, rows=128, columns=16)
    elif block < blocks_0 + blocks_1:
        sum_columns(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1, rows=128, columns=16)
    elif block < blocks_0 + blocks_1 + blocks_2:
        sum_columns(block - blocks_0 - blocks_1, partial_2_ptr, total_2_ptr, p_2, n_2, rows=128, columns=16)
    elif block < blocks_0 + blocks_1 + blocks_2 + blocks_3:
        sum_columns(block - blocks_0 - blocks_1 - blocks_2, partial_3_ptr, total_3_ptr, p_3, n_3, rows=128, columns=16)
    elif block < blocks_0 + blocks_1 + blocks_2 + blocks_3 + blocks_4:
        sum_columns(
            block - blocks_0 - blocks_1 - blocks_2 - blocks_3, partial_4_ptr, total_4_ptr, p_4, n_4, rows=128,
            columns=16,
        )  # fmt: skip
    else:
        sum_columns(
            block - blocks_0 - blocks_1 - blocks_2 - blocks_3 - blocks_4, partial_5_ptr, total_5_ptr, p_5, n_5,
            rows=128, columns=16,
        )  # fmt: skip


def reduce_6(*tensors):
    operands, blocks = [], []
    # Before the partial sums are the totals, and between them the dtypes of these.
    for partial, total in zip(tensors[6::2], tensors[:6], strict=True):
        operands += [partial.contiguous(), total, *partial.shape]
        blocks.append(-(-total.numel() // 16))
    operators.launch(_reduce_6, (sum(blocks),), *operands, *blocks[:-1], num_warps=8)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "tiles_0"])
def _requantize_transpose_2(
    values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0, parts_0, values_1_ptr,
    scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1, m_t_1, parts_1, tiles_0,
):  # fmt: skip
    """Transposed copies of 2 e4m3 matrices."""
    tile = tl.program_id(0)
    if tile < tiles_0:
        requantize_transpose_tile(
            tile, values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0, parts_0,
            side=128, chunk=1024,
        )  # fmt: skip
    else:
        requantize_transpose_tile(
            tile - tiles_0, values_1_ptr, scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1,
            m_t_1, parts_1, side=128, chunk=1024,
        )  # fmt: skip


def requantize_transpose_2(*tensors):
    operands, tiles = [], []
    for i in range(2):
        transposed, scale_t = tensors[2 * i : 2 * i + 2]
        values, scale, scale_max = tensors[3 * i + 4 : 3 * i + 7]
        m, n = values.shape
        sizes = (m, n, transposed.shape[1], scale_max.shape[0])
        operands += [values.contiguous(), scale, scale_max, transposed, scale_t, *sizes]
        tiles.append(max(-(-m // 128), 1) * max(-(-n // 128), 1))
    operators.launch(_requantize_transpose_2, (sum(tiles),), *operands, *tiles[:-1], num_warps=4)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "parts_2", "tiles_0", "tiles_1"])
def _requantize_transpose_3(
    values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0, parts_0, values_1_ptr,
    scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1, m_t_1, parts_1, values_2_ptr, scale_2_ptr,
    scale_max_2_ptr, transposed_2_ptr, scale_t_2_ptr, m_2, n_2, m_t_2, parts_2, tiles_0, tiles_1,
):  # fmt: skip
    """Transposed copies of 3 e4m3 matrices."""
    tile = tl.program_id(0)
    if tile < tiles_0:
        requantize_transpose_tile(
            tile, values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0, parts_0,
            side=128, chunk=1024,
        )  # fmt: skip
    elif tile < tiles_0 + tiles_1:
        requantize_transpose_tile(
            tile - tiles_0, values_1_ptr, scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1,
            m_t_1, parts_1, side=128, chunk=1024,
        )  # fmt: skip
    else:
        requantize_transpose_tile(
            tile - tiles_0 - tiles_1, values_2_ptr, scale_2_ptr, scale_max_2_ptr, transposed_2_ptr, scale_t_2_ptr, m_2,
            n_2, m_t_2, parts_2, side=128, chunk=1024,
        )  # fmt: skip


def requantize_transpose_3(*tensors):
    operands, tiles = [], []
    for i in range(3):
        transposed, scale_t = tensors[2 * i : 2 * i + 2]
        values, scale, scale_max = tensors[3 * i + 6 : 3 * i + 9]
        m, n = values.shape
        sizes = (m, n, transposed.shape[1], scale_max.shape[0])
        operands += [values.contiguous(), scale, scale_max, transposed, scale_t, *sizes]
        tiles.append(max(-(-m // 128), 1) * max(-(-n // 128), 1))
    operators.launch(_requantize_transpose_3, (sum(tiles),), *operands, *tiles[:-1], num_warps=4)

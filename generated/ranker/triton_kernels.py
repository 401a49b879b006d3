"""Triton kernels of ranker.yaml, and the functions that launch them; `fused` makes operators of these.

Written by `loka generate`, which overwrites it: edit the policy and generate again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.interaction import fm_reference

STAMP = "2d24789dc8cbb91ac1388ff7d169ef8479e79e0c7d80da25b0c0992f91ff9a65"


@triton.jit
def silu(z):
    return z * tl.sigmoid(z)


@triton.jit
def silu_gradient(grad, z):
    s = tl.sigmoid(z)
    return grad * s * (1.0 + z * (1.0 - s))


@triton.jit
def e4m3_scale(amax):
    """The smallest power of two that is not below amax / 448, and its reciprocal; 448 is 1.75 * 2**8."""
    bits = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x04000000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["m"])
def _add_backward_e4m3_256(grad_ptr, values_ptr, scale_ptr, scale_max_ptr, dadd_ptr, grad_stride, m):
    """Gradient of addition -> e4m3 with one power-of-two scale a row for grad (m, 256)."""
    columns = tl.arange(0, 256)
    dadd = tl.zeros([4, 256], tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        dadd += grad
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(grad) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(grad), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = grad * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    part = tl.program_id(0).to(tl.int64) * 256 + columns
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_backward_e4m3_256(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition -> e4m3 with one power-of-two scale a row.

    grad (M, 256) -> values (M, 256), scale (M, 1), scale_max (P,), dadd (P, 256).
    """
    operators.check_rows(grad, 256)
    grad = operators.whole_rows(grad)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    operators.launch(
        _add_backward_e4m3_256, (programs,), grad, values, scale, scale_max, dadd, grad.stride(0), m, num_warps=2
    )
    return values, scale, scale_max, dadd


@triton.jit(do_not_specialize=["m"])
def _add_backward_e4m3_32(grad_ptr, values_ptr, scale_ptr, scale_max_ptr, dadd_ptr, grad_stride, m):
    """Gradient of addition -> e4m3 with one power-of-two scale a row for grad (m, 32)."""
    columns = tl.arange(0, 32)
    dadd = tl.zeros([32, 32], tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 32, m, tl.num_programs(0) * 32):
        row = first + tl.arange(0, 32)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 32 + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        dadd += grad
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(grad) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(grad), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = grad * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    part = tl.program_id(0).to(tl.int64) * 32 + columns
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_backward_e4m3_32(grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition -> e4m3 with one power-of-two scale a row.

    grad (M, 32) -> values (M, 32), scale (M, 1), scale_max (P,), dadd (P, 32).
    """
    operators.check_rows(grad, 32)
    grad = operators.whole_rows(grad)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=128, per_multiprocessor=8)
    values = grad.new_empty((m, 32), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dadd = grad.new_empty((programs, 32), dtype=torch.float32)
    operators.launch(
        _add_backward_e4m3_32, (programs,), grad, values, scale, scale_max, dadd, grad.stride(0), m, num_warps=2
    )
    return values, scale, scale_max, dadd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_256(x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, x_stride, m):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, 256)."""
    columns = tl.arange(0, 256)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 256
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 256 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


def add_layer_norm_silu_256(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, 256), add (256,), weight (256,), bias (256,) -> out (M, 256), mean (M,), rstd (M,).
    """
    operators.check_rows(x, 256)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    out = x.new_empty((m, 256), dtype=x.dtype if dtype is None else dtype)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_256,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        out,
        mean,
        rstd,
        x.stride(0),
        m,
        num_warps=1,
    )
    return out, mean, rstd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_256_inference(x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, m):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, 256)."""
    columns = tl.arange(0, 256)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 256
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 256 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


def add_layer_norm_silu_256_inference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, 256), add (256,), weight (256,), bias (256,) -> out (M, 256).
    """
    operators.check_rows(x, 256)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    out = x.new_empty((m, 256), dtype=x.dtype if dtype is None else dtype)
    operators.launch(
        _add_layer_norm_silu_256_inference,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        out,
        x.stride(0),
        m,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_64(x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, x_stride, m):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, 64)."""
    columns = tl.arange(0, 64)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * 16, m, tl.num_programs(0) * 16):
        row = first + tl.arange(0, 16)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 64 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 64
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 64 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


def add_layer_norm_silu_64(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, 64), add (64,), weight (64,), bias (64,) -> out (M, 64), mean (M,), rstd (M,).
    """
    operators.check_rows(x, 64)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=16, per_multiprocessor=16)
    out = x.new_empty((m, 64), dtype=x.dtype if dtype is None else dtype)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_64,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        out,
        mean,
        rstd,
        x.stride(0),
        m,
        num_warps=1,
    )
    return out, mean, rstd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_64_inference(x_ptr, add_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, m):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU of x (m, 64)."""
    columns = tl.arange(0, 64)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    for first in range(tl.program_id(0) * 16, m, tl.num_programs(0) * 16):
        row = first + tl.arange(0, 16)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 64 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 64
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 64 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        y = silu(y)
        tl.store(out_ptr + offsets, y, mask=valid[:, None])


def add_layer_norm_silu_64_inference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU.

    x (M, 64), add (64,), weight (64,), bias (64,) -> out (M, 64).
    """
    operators.check_rows(x, 64)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=16, per_multiprocessor=16)
    out = x.new_empty((m, 64), dtype=x.dtype if dtype is None else dtype)
    operators.launch(
        _add_layer_norm_silu_64_inference,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        out,
        x.stride(0),
        m,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_backward_64(
    grad_ptr,
    x_ptr,
    add_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dadd_ptr,
    grad_stride,
    m,
):
    """Gradient of addition, LayerNorm, SiLU for grad (m, 64)."""
    columns = tl.arange(0, 64)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    dweight = tl.zeros([16, 64], tl.float32)
    dbias = tl.zeros([16, 64], tl.float32)
    dadd = tl.zeros([16, 64], tl.float32)
    for first in range(tl.program_id(0) * 16, m, tl.num_programs(0) * 16):
        row = first + tl.arange(0, 16)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 64 + columns[None, :]
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
        mean_dn = tl.sum(dn, 1) / 64
        mean_dn_n = tl.sum(dn * n, 1) / 64
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        dadd += dx
        tl.store(dx_ptr + offsets, dx, mask=valid[:, None])
    part = tl.program_id(0).to(tl.int64) * 64 + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))


def add_layer_norm_silu_backward_64(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition, LayerNorm, SiLU.

    grad (M, 64), x (M, 64), add (64,), weight (64,), bias (64,), mean (M,), rstd (M,) -> dx (M, 64), dweight (P, 64),
    dbias (P, 64), dadd (P, 64).
    """
    operators.check_rows(grad, 64)
    operators.check_rows(x, 64, grad.shape[0])
    grad = operators.whole_rows(grad)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=64, per_multiprocessor=8)
    dx = grad.new_empty((m, 64))
    dweight = grad.new_empty((programs, 64), dtype=torch.float32)
    dbias = grad.new_empty((programs, 64), dtype=torch.float32)
    dadd = grad.new_empty((programs, 64), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_backward_64,
        (programs,),
        grad,
        x.contiguous(),
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        mean,
        rstd,
        dx,
        dweight,
        dbias,
        dadd,
        grad.stride(0),
        m,
        num_warps=2,
    )
    return dx, dweight, dbias, dadd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_backward_e4m3_256(
    grad_ptr,
    x_ptr,
    add_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    values_ptr,
    scale_ptr,
    scale_max_ptr,
    dweight_ptr,
    dbias_ptr,
    dadd_ptr,
    grad_stride,
    m,
):
    """Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row for grad (m, 256)."""
    columns = tl.arange(0, 256)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    dweight = tl.zeros([4, 256], tl.float32)
    dbias = tl.zeros([4, 256], tl.float32)
    dadd = tl.zeros([4, 256], tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
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
        mean_dn = tl.sum(dn, 1) / 256
        mean_dn_n = tl.sum(dn * n, 1) / 256
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        dadd += dx
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(dx) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(dx), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = dx * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    part = tl.program_id(0).to(tl.int64) * 256 + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))
    tl.store(dadd_ptr + part, tl.sum(dadd, 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_backward_e4m3_256(
    grad: Tensor, x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row.

    grad (M, 256), x (M, 256), add (256,), weight (256,), bias (256,), mean (M,), rstd (M,) -> values (M, 256), scale
    (M, 1), scale_max (P,), dweight (P, 256), dbias (P, 256), dadd (P, 256).
    """
    operators.check_rows(grad, 256)
    operators.check_rows(x, 256, grad.shape[0])
    grad = operators.whole_rows(grad)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=16, per_multiprocessor=8)
    values = grad.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = grad.new_empty((m, 1), dtype=torch.float32)
    scale_max = grad.new_empty((programs,), dtype=torch.float32)
    dweight = grad.new_empty((programs, 256), dtype=torch.float32)
    dbias = grad.new_empty((programs, 256), dtype=torch.float32)
    dadd = grad.new_empty((programs, 256), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_backward_e4m3_256,
        (programs,),
        grad,
        x.contiguous(),
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        mean,
        rstd,
        values,
        scale,
        scale_max,
        dweight,
        dbias,
        dadd,
        grad.stride(0),
        m,
        num_warps=2,
    )
    return values, scale, scale_max, dweight, dbias, dadd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_e4m3_256(
    x_ptr, add_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, mean_ptr, rstd_ptr, x_stride, m
):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row of x (m, 256)."""
    columns = tl.arange(0, 256)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 256
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 256 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = silu(y)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(y) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(y), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_e4m3_256(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.

    x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,), mean (M,), rstd
    (M,).
    """
    operators.check_rows(x, 256)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_e4m3_256,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        values,
        scale,
        scale_max,
        mean,
        rstd,
        x.stride(0),
        m,
        num_warps=1,
    )
    return values, scale, scale_max, mean, rstd


@triton.jit(do_not_specialize=["m"])
def _add_layer_norm_silu_e4m3_256_inference(
    x_ptr, add_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m
):
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row of x (m, 256)."""
    columns = tl.arange(0, 256)
    add = tl.load(add_ptr + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 4, m, tl.num_programs(0) * 4):
        row = first + tl.arange(0, 4)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 256 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = x + add[None, :]
        mean = tl.sum(x, 1) / 256
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 256 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        y = silu(y)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(y) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(y), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def add_layer_norm_silu_e4m3_256_inference(
    x: Tensor, add: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.

    x (M, 256), add (256,), weight (256,), bias (256,) -> values (M, 256), scale (M, 1), scale_max (P,).
    """
    operators.check_rows(x, 256)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=4, per_multiprocessor=16)
    values = x.new_empty((m, 256), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    operators.launch(
        _add_layer_norm_silu_e4m3_256_inference,
        (programs,),
        x,
        add.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        values,
        scale,
        scale_max,
        x.stride(0),
        m,
        num_warps=1,
    )
    return values, scale, scale_max


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


def concat_norm_2_residual_layer_norm_32(
    part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """2 parts concatenated, a residual added -> LayerNorm (eps 1e-05).

    part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), bias (32,) -> out (B, n, 32), mean (B *
    n,), rstd (B * n,).
    """
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    m = shape[0] * shape[1]
    programs = operators.programs_for(m, part_0.device, rows=128, per_multiprocessor=4)
    out = part_0.new_empty(shape, dtype=dtype)
    mean = part_0.new_empty((m,), dtype=torch.float32)
    rstd = part_0.new_empty((m,), dtype=torch.float32)
    operators.launch(
        _concat_norm_2_residual_layer_norm_32,
        (programs,),
        part_0.contiguous(),
        part_1.contiguous(),
        residual.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        out,
        mean,
        rstd,
        part_0.shape[1],
        part_1.shape[1],
        shape[1],
        m,
        num_warps=8,
    )
    return out, mean, rstd


@triton.jit(do_not_specialize=["m"])
def _concat_norm_2_residual_layer_norm_backward_32(
    grad_ptr,
    part_0_ptr,
    part_1_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    n_0,
    n_1,
    n,
    m,
):
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
    grad: Tensor, part_0: Tensor, part_1: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of 2 parts concatenated, a residual added -> LayerNorm.

    grad (B, n, 32), part_0 (B, n_0, 32), part_1 (B, n_1, 32), residual (B, n, 32), weight (32,), mean (B * n,), rstd (B
    * n,) -> dx (B, n, 32), dweight (P, 32), dbias (P, 32).
    """
    operators.check_joined(part_0, part_1, width=32)
    shape = residual.shape
    m = shape[0] * shape[1]
    programs = operators.programs_for(m, part_0.device, rows=64, per_multiprocessor=16)
    dx = part_0.new_empty(shape, dtype=torch.promote_types(part_0.dtype, residual.dtype))
    dweight = part_0.new_empty((programs, 32), dtype=torch.float32)
    dbias = part_0.new_empty((programs, 32), dtype=torch.float32)
    operators.launch(
        _concat_norm_2_residual_layer_norm_backward_32,
        (programs,),
        grad.contiguous(),
        part_0.contiguous(),
        part_1.contiguous(),
        residual.contiguous(),
        weight.contiguous(),
        mean,
        rstd,
        dx,
        dweight,
        dbias,
        part_0.shape[1],
        part_1.shape[1],
        shape[1],
        m,
        num_warps=2,
    )
    return dx, dweight, dbias


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


def fm_interaction_16x32_to_8_8(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    """Pairwise products at rank 8 and 8 weighted sums.

    x (B, 16, 32), rank (16, 8), compress (8, 16) -> products (B, 16, 8), compressed (B, 8, 32).
    """
    operators.check_sample(x, 16, 32)
    if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
        return fm_reference.fm_forward(x, rank, compress)
    programs = operators.programs(x, rows=1, per_multiprocessor=2)
    products = x.new_empty((x.shape[0], 16, 8))
    compressed = x.new_empty((x.shape[0], 8, 32))
    operators.launch(
        _fm_interaction_16x32_to_8_8,
        (programs,),
        x.contiguous(),
        rank.contiguous(),
        compress.contiguous(),
        products,
        compressed,
        x.shape[0],
        num_warps=4,
    )
    return products, compressed


@triton.jit(do_not_specialize=["batch"])
def _fm_interaction_backward_16x32_to_8_8_passed(
    dproducts_ptr,
    dcompressed_ptr,
    x_ptr,
    rank_ptr,
    compress_ptr,
    passed_ptr,
    dx_ptr,
    drank_ptr,
    dcompress_ptr,
    dcompressed_stride,
    passed_stride,
    batch,
):
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
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of pairwise products at rank 8 and 8 weighted sums.

    dproducts (B, 16, 8), dcompressed (B, 8, 32), x (B, 16, 32), rank (16, 8), compress (8, 16), passed (B, 16, 32) ->
    dx (B, 16, 32), drank (P, 16 * 8), dcompress (P, 8 * 16).
    """
    operators.check_sample(x, 16, 32)
    if x.dtype.itemsize != 2:  # tensor cores take 16 bits; more is for torch's own products
        return fm_reference.fm_backward(dproducts, dcompressed, x, rank, compress, passed)
    dcompressed = operators.whole_samples(dcompressed)
    passed = operators.whole_samples(passed)
    programs = operators.programs(x, rows=1, per_multiprocessor=2) if x.dtype.itemsize == 2 else 1
    dx = x.new_empty((x.shape[0], 16, 32), dtype=passed.dtype)
    drank = x.new_empty((programs, 128), dtype=torch.float32)
    dcompress = x.new_empty((programs, 128), dtype=torch.float32)
    operators.launch(
        _fm_interaction_backward_16x32_to_8_8_passed,
        (programs,),
        dproducts.contiguous(),
        dcompressed,
        x.contiguous(),
        rank.contiguous(),
        compress.contiguous(),
        passed,
        dx,
        drank,
        dcompress,
        dcompressed.stride(0),
        passed.stride(0),
        x.shape[0],
        num_warps=4,
    )
    return dx, drank, dcompress


@triton.jit(do_not_specialize=["m"])
def _layer_norm_backward_128(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, grad_stride, m
):
    """Gradient of LayerNorm for grad (m, 128)."""
    columns = tl.arange(0, 128)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    dweight = tl.zeros([8, 128], tl.float32)
    dbias = tl.zeros([8, 128], tl.float32)
    for first in range(tl.program_id(0) * 8, m, tl.num_programs(0) * 8):
        row = first + tl.arange(0, 8)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 128 + columns[None, :]
        grad_offsets = row[:, None].to(tl.int64) * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        n = (x - mean[:, None]) * rstd[:, None]
        dweight += grad * n
        dbias += grad
        dn = grad * weight[None, :]
        mean_dn = tl.sum(dn, 1) / 128
        mean_dn_n = tl.sum(dn * n, 1) / 128
        dx = (dn - mean_dn[:, None] - n * mean_dn_n[:, None]) * rstd[:, None]
        tl.store(dx_ptr + offsets, dx, mask=valid[:, None])
    part = tl.program_id(0).to(tl.int64) * 128 + columns
    tl.store(dweight_ptr + part, tl.sum(dweight, 0))
    tl.store(dbias_ptr + part, tl.sum(dbias, 0))


def layer_norm_backward_128(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of LayerNorm.

    grad (M, 128), x (M, 128), weight (128,), mean (M,), rstd (M,) -> dx (M, 128), dweight (P, 128), dbias (P, 128).
    """
    operators.check_rows(grad, 128)
    operators.check_rows(x, 128, grad.shape[0])
    grad = operators.whole_rows(grad)
    m = grad.shape[0]
    programs = operators.programs(grad, rows=32, per_multiprocessor=8)
    dx = grad.new_empty((m, 128))
    dweight = grad.new_empty((programs, 128), dtype=torch.float32)
    dbias = grad.new_empty((programs, 128), dtype=torch.float32)
    operators.launch(
        _layer_norm_backward_128,
        (programs,),
        grad,
        x.contiguous(),
        weight.contiguous(),
        mean,
        rstd,
        dx,
        dweight,
        dbias,
        grad.stride(0),
        m,
        num_warps=2,
    )
    return dx, dweight, dbias


@triton.jit(do_not_specialize=["m"])
def _layer_norm_e4m3_128(
    x_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, mean_ptr, rstd_ptr, x_stride, m
):
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row of x (m, 128)."""
    columns = tl.arange(0, 128)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 8, m, tl.num_programs(0) * 8):
        row = first + tl.arange(0, 8)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 128 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / 128
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 128 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_ptr + row, mean, mask=valid)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(y) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(y), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def layer_norm_e4m3_128(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.

    x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,), mean (M,), rstd (M,).
    """
    operators.check_rows(x, 128)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    mean = x.new_empty((m,), dtype=torch.float32)
    rstd = x.new_empty((m,), dtype=torch.float32)
    operators.launch(
        _layer_norm_e4m3_128,
        (programs,),
        x,
        weight.contiguous(),
        bias.contiguous(),
        values,
        scale,
        scale_max,
        mean,
        rstd,
        x.stride(0),
        m,
        num_warps=1,
    )
    return values, scale, scale_max, mean, rstd


@triton.jit(do_not_specialize=["m"])
def _layer_norm_e4m3_128_inference(x_ptr, weight_ptr, bias_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m):
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row of x (m, 128)."""
    columns = tl.arange(0, 128)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    bias = tl.load(bias_ptr + columns).to(tl.float32)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 8, m, tl.num_programs(0) * 8):
        row = first + tl.arange(0, 8)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 128 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / 128
        x = x - mean[:, None]
        rstd = tl.rsqrt(tl.sum(x * x, 1) / 128 + 1e-05)
        y = x * rstd[:, None] * weight[None, :] + bias[None, :]
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(y) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(y), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = y * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def layer_norm_e4m3_128_inference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm (eps 1e-05) -> e4m3 with one power-of-two scale a row.

    x (M, 128), weight (128,), bias (128,) -> values (M, 128), scale (M, 1), scale_max (P,).
    """
    operators.check_rows(x, 128)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=8, per_multiprocessor=16)
    values = x.new_empty((m, 128), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    operators.launch(
        _layer_norm_e4m3_128_inference,
        (programs,),
        x,
        weight.contiguous(),
        bias.contiguous(),
        values,
        scale,
        scale_max,
        x.stride(0),
        m,
        num_warps=1,
    )
    return values, scale, scale_max


@triton.jit(do_not_specialize=["m"])
def _quantise_e4m3_512(x_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m):
    """To e4m3 with one power-of-two scale a row of x (m, 512)."""
    columns = tl.arange(0, 512)
    scale_max = 0.0
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * 512 + columns
        x_offsets = tl.cast(row, tl.int64) * x_stride + columns
        x = tl.load(x_ptr + x_offsets).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(x) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), 0), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = x * reciprocal
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv))
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, scale)
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def quantise_e4m3_512(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To e4m3 with one power-of-two scale a row.

    x (M, 512) -> values (M, 512), scale (M, 1), scale_max (P,).
    """
    operators.check_rows(x, 512)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=1, per_multiprocessor=32)
    values = x.new_empty((m, 512), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    operators.launch(_quantise_e4m3_512, (programs,), x, values, scale, scale_max, x.stride(0), m, num_warps=1)
    return values, scale, scale_max


@triton.jit(do_not_specialize=["m"])
def _quantise_e4m3_64(x_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m):
    """To e4m3 with one power-of-two scale a row of x (m, 64)."""
    columns = tl.arange(0, 64)
    scale_max = 0.0
    for first in range(tl.program_id(0) * 16, m, tl.num_programs(0) * 16):
        row = first + tl.arange(0, 16)
        valid = row < m
        offsets = row[:, None].to(tl.int64) * 64 + columns[None, :]
        x_offsets = row[:, None].to(tl.int64) * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(x) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = x * reciprocal[:, None]
        values = tl.where(finite, values, float("nan"))
        tl.store(values_ptr + offsets, values.to(tl.float8e4nv), mask=valid[:, None])
        tl.store(scale_ptr + row, scale, mask=valid)
        scale_max = tl.maximum(scale_max, tl.max(tl.where(valid, scale, 0.0), 0))
    tl.store(scale_max_ptr + tl.program_id(0), scale_max)


def quantise_e4m3_64(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """To e4m3 with one power-of-two scale a row.

    x (M, 64) -> values (M, 64), scale (M, 1), scale_max (P,).
    """
    operators.check_rows(x, 64)
    x = operators.whole_rows(x)
    m = x.shape[0]
    programs = operators.programs(x, rows=16, per_multiprocessor=16)
    values = x.new_empty((m, 64), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((m, 1), dtype=torch.float32)
    scale_max = x.new_empty((programs,), dtype=torch.float32)
    operators.launch(_quantise_e4m3_64, (programs,), x, values, scale, scale_max, x.stride(0), m, num_warps=1)
    return values, scale, scale_max


@triton.jit
def _quantise_weights_128_256_256_rows(
    program,
    programs,
    x_ptr,
    values_ptr,
    scale_ptr,
    scale_max_ptr,
    x_stride,
    m,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """One program's rows of x (m, columns), written to values (m, columns)."""
    column = tl.arange(0, columns)[None, :]
    scale_max = 0.0
    for first in range(program * rows, m, programs * rows):
        # Behind the last row it stands again: that takes no mask.
        row = tl.minimum(first + tl.arange(0, rows), m - 1)
        start = row[:, None].to(tl.int64)
        x = tl.load(x_ptr + start * x_stride + column).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(x) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = tl.where(finite, x * reciprocal[:, None], float("nan"))
        tl.store(values_ptr + start * columns + column, values.to(tl.float8e4nv))
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, tl.max(scale, 0))
    tl.store(scale_max_ptr + program, scale_max)


@triton.jit(do_not_specialize=["m_0", "m_1", "m_2", "programs_0", "programs_1", "programs_2"])
def _quantise_weights_128_256_256(
    weight_0_ptr,
    values_0_ptr,
    scale_0_ptr,
    scale_max_0_ptr,
    stride_0,
    m_0,
    weight_1_ptr,
    values_1_ptr,
    scale_1_ptr,
    scale_max_1_ptr,
    stride_1,
    m_1,
    weight_2_ptr,
    values_2_ptr,
    scale_2_ptr,
    scale_max_2_ptr,
    stride_2,
    m_2,
    programs_0,
    programs_1,
    programs_2,
):
    """3 weights to e4m3 with one power-of-two scale a row."""
    program = tl.program_id(0)
    if program < programs_0:
        _quantise_weights_128_256_256_rows(
            program,
            programs_0,
            weight_0_ptr,
            values_0_ptr,
            scale_0_ptr,
            scale_max_0_ptr,
            stride_0,
            m_0,
            columns=128,
            rows=8,
        )
    elif program < programs_0 + programs_1:
        _quantise_weights_128_256_256_rows(
            program - programs_0,
            programs_1,
            weight_1_ptr,
            values_1_ptr,
            scale_1_ptr,
            scale_max_1_ptr,
            stride_1,
            m_1,
            columns=256,
            rows=4,
        )
    else:
        _quantise_weights_128_256_256_rows(
            program - programs_0 - programs_1,
            programs_2,
            weight_2_ptr,
            values_2_ptr,
            scale_2_ptr,
            scale_max_2_ptr,
            stride_2,
            m_2,
            columns=256,
            rows=4,
        )


def quantise_weights_128_256_256(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 weights to e4m3 with one power-of-two scale a row.

    weight_0 (M_0, 128), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 128), scale_0 (M_0, 1), scale_max_0
    (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
    scale_max_2 (P_2,).
    """
    operators.check_rows(weight_0, 128)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    weight_0 = operators.whole_rows(weight_0)
    m_0 = weight_0.shape[0]
    programs_0 = operators.programs(weight_0, rows=8, per_multiprocessor=32)
    values_0 = weight_0.new_empty((m_0, 128), dtype=torch.float8_e4m3fn)
    scale_0 = weight_0.new_empty((m_0, 1), dtype=torch.float32)
    scale_max_0 = weight_0.new_empty((programs_0,), dtype=torch.float32)
    weight_1 = operators.whole_rows(weight_1)
    m_1 = weight_1.shape[0]
    programs_1 = operators.programs(weight_1, rows=4, per_multiprocessor=32)
    values_1 = weight_1.new_empty((m_1, 256), dtype=torch.float8_e4m3fn)
    scale_1 = weight_1.new_empty((m_1, 1), dtype=torch.float32)
    scale_max_1 = weight_1.new_empty((programs_1,), dtype=torch.float32)
    weight_2 = operators.whole_rows(weight_2)
    m_2 = weight_2.shape[0]
    programs_2 = operators.programs(weight_2, rows=4, per_multiprocessor=32)
    values_2 = weight_2.new_empty((m_2, 256), dtype=torch.float8_e4m3fn)
    scale_2 = weight_2.new_empty((m_2, 1), dtype=torch.float32)
    scale_max_2 = weight_2.new_empty((programs_2,), dtype=torch.float32)
    operators.launch(
        _quantise_weights_128_256_256,
        (programs_0 + programs_1 + programs_2,),
        weight_0,
        values_0,
        scale_0,
        scale_max_0,
        weight_0.stride(0),
        m_0,
        weight_1,
        values_1,
        scale_1,
        scale_max_1,
        weight_1.stride(0),
        m_1,
        weight_2,
        values_2,
        scale_2,
        scale_max_2,
        weight_2.stride(0),
        m_2,
        programs_0,
        programs_1,
        programs_2,
        num_warps=1,
    )
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


@triton.jit
def _quantise_weights_512_256_256_rows(
    program,
    programs,
    x_ptr,
    values_ptr,
    scale_ptr,
    scale_max_ptr,
    x_stride,
    m,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """One program's rows of x (m, columns), written to values (m, columns)."""
    column = tl.arange(0, columns)[None, :]
    scale_max = 0.0
    for first in range(program * rows, m, programs * rows):
        # Behind the last row it stands again: that takes no mask.
        row = tl.minimum(first + tl.arange(0, rows), m - 1)
        start = row[:, None].to(tl.int64)
        x = tl.load(x_ptr + start * x_stride + column).to(tl.float32)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        finite = tl.abs(x) < float("inf")
        amax = tl.maximum(tl.max(tl.where(finite, tl.abs(x), 0.0), 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = e4m3_scale(amax)
        values = tl.where(finite, x * reciprocal[:, None], float("nan"))
        tl.store(values_ptr + start * columns + column, values.to(tl.float8e4nv))
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, tl.max(scale, 0))
    tl.store(scale_max_ptr + program, scale_max)


@triton.jit(do_not_specialize=["m_0", "m_1", "m_2", "programs_0", "programs_1", "programs_2"])
def _quantise_weights_512_256_256(
    weight_0_ptr,
    values_0_ptr,
    scale_0_ptr,
    scale_max_0_ptr,
    stride_0,
    m_0,
    weight_1_ptr,
    values_1_ptr,
    scale_1_ptr,
    scale_max_1_ptr,
    stride_1,
    m_1,
    weight_2_ptr,
    values_2_ptr,
    scale_2_ptr,
    scale_max_2_ptr,
    stride_2,
    m_2,
    programs_0,
    programs_1,
    programs_2,
):
    """3 weights to e4m3 with one power-of-two scale a row."""
    program = tl.program_id(0)
    if program < programs_0:
        _quantise_weights_512_256_256_rows(
            program,
            programs_0,
            weight_0_ptr,
            values_0_ptr,
            scale_0_ptr,
            scale_max_0_ptr,
            stride_0,
            m_0,
            columns=512,
            rows=2,
        )
    elif program < programs_0 + programs_1:
        _quantise_weights_512_256_256_rows(
            program - programs_0,
            programs_1,
            weight_1_ptr,
            values_1_ptr,
            scale_1_ptr,
            scale_max_1_ptr,
            stride_1,
            m_1,
            columns=256,
            rows=4,
        )
    else:
        _quantise_weights_512_256_256_rows(
            program - programs_0 - programs_1,
            programs_2,
            weight_2_ptr,
            values_2_ptr,
            scale_2_ptr,
            scale_max_2_ptr,
            stride_2,
            m_2,
            columns=256,
            rows=4,
        )


def quantise_weights_512_256_256(
    weight_0: Tensor, weight_1: Tensor, weight_2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 weights to e4m3 with one power-of-two scale a row.

    weight_0 (M_0, 512), weight_1 (M_1, 256), weight_2 (M_2, 256) -> values_0 (M_0, 512), scale_0 (M_0, 1), scale_max_0
    (P_0,), values_1 (M_1, 256), scale_1 (M_1, 1), scale_max_1 (P_1,), values_2 (M_2, 256), scale_2 (M_2, 1),
    scale_max_2 (P_2,).
    """
    operators.check_rows(weight_0, 512)
    operators.check_rows(weight_1, 256)
    operators.check_rows(weight_2, 256)
    weight_0 = operators.whole_rows(weight_0)
    m_0 = weight_0.shape[0]
    programs_0 = operators.programs(weight_0, rows=2, per_multiprocessor=32)
    values_0 = weight_0.new_empty((m_0, 512), dtype=torch.float8_e4m3fn)
    scale_0 = weight_0.new_empty((m_0, 1), dtype=torch.float32)
    scale_max_0 = weight_0.new_empty((programs_0,), dtype=torch.float32)
    weight_1 = operators.whole_rows(weight_1)
    m_1 = weight_1.shape[0]
    programs_1 = operators.programs(weight_1, rows=4, per_multiprocessor=32)
    values_1 = weight_1.new_empty((m_1, 256), dtype=torch.float8_e4m3fn)
    scale_1 = weight_1.new_empty((m_1, 1), dtype=torch.float32)
    scale_max_1 = weight_1.new_empty((programs_1,), dtype=torch.float32)
    weight_2 = operators.whole_rows(weight_2)
    m_2 = weight_2.shape[0]
    programs_2 = operators.programs(weight_2, rows=4, per_multiprocessor=32)
    values_2 = weight_2.new_empty((m_2, 256), dtype=torch.float8_e4m3fn)
    scale_2 = weight_2.new_empty((m_2, 1), dtype=torch.float32)
    scale_max_2 = weight_2.new_empty((programs_2,), dtype=torch.float32)
    operators.launch(
        _quantise_weights_512_256_256,
        (programs_0 + programs_1 + programs_2,),
        weight_0,
        values_0,
        scale_0,
        scale_max_0,
        weight_0.stride(0),
        m_0,
        weight_1,
        values_1,
        scale_1,
        scale_max_1,
        weight_1.stride(0),
        m_1,
        weight_2,
        values_2,
        scale_2,
        scale_max_2,
        weight_2.stride(0),
        m_2,
        programs_0,
        programs_1,
        programs_2,
        num_warps=1,
    )
    return values_0, scale_0, scale_max_0, values_1, scale_1, scale_max_1, values_2, scale_2, scale_max_2


@triton.jit
def _reduce_1_block(block, partial_ptr, total_ptr, p, n):
    """Sums of 16 columns of partial (p, n), written to total (n,)."""
    column = block * 16 + tl.arange(0, 16)
    inside = column < n
    total = tl.zeros([128, 16], tl.float32)
    for first in range(0, p, 128):
        row = first + tl.arange(0, 128)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["p"])
def _reduce_1(partial_ptr, total_ptr, p, n):
    """Column sums of a matrix."""
    block = tl.program_id(0)
    _reduce_1_block(block, partial_ptr, total_ptr, p, n)


def reduce_1(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of a matrix.

    partial (P, N), dtype of total -> total (N,).
    """
    total = partial.new_empty((partial.shape[1],), dtype=dtype)
    blocks = triton.cdiv(partial.shape[1], 16)
    operators.launch(_reduce_1, (blocks,), partial.contiguous(), total, *partial.shape, num_warps=8)
    return total


@triton.jit
def _reduce_2_block(block, partial_ptr, total_ptr, p, n):
    """Sums of 16 columns of partial (p, n), written to total (n,)."""
    column = block * 16 + tl.arange(0, 16)
    inside = column < n
    total = tl.zeros([128, 16], tl.float32)
    for first in range(0, p, 128):
        row = first + tl.arange(0, 128)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["p_0", "p_1"])
def _reduce_2(partial_0_ptr, total_0_ptr, p_0, n_0, partial_1_ptr, total_1_ptr, p_1, n_1, blocks_0):
    """Column sums of 2 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        _reduce_2_block(block, partial_0_ptr, total_0_ptr, p_0, n_0)
    else:
        _reduce_2_block(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1)


def reduce_2(partial_0: Tensor, dtype_0: torch.dtype, partial_1: Tensor, dtype_1: torch.dtype) -> tuple[Tensor, Tensor]:
    """Column sums of 2 matrices.

    partial_0 (P_0, N_0), dtype_0 of total_0, partial_1 (P_1, N_1), dtype_1 of total_1 -> total_0 (N_0,), total_1
    (N_1,).
    """
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    blocks_0 = triton.cdiv(partial_0.shape[1], 16)
    blocks_1 = triton.cdiv(partial_1.shape[1], 16)
    operators.launch(
        _reduce_2,
        (blocks_0 + blocks_1,),
        partial_0.contiguous(),
        total_0,
        *partial_0.shape,
        partial_1.contiguous(),
        total_1,
        *partial_1.shape,
        blocks_0,
        num_warps=8,
    )
    return total_0, total_1


@triton.jit
def _reduce_3_block(block, partial_ptr, total_ptr, p, n):
    """Sums of 16 columns of partial (p, n), written to total (n,)."""
    column = block * 16 + tl.arange(0, 16)
    inside = column < n
    total = tl.zeros([128, 16], tl.float32)
    for first in range(0, p, 128):
        row = first + tl.arange(0, 128)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["p_0", "p_1", "p_2"])
def _reduce_3(
    partial_0_ptr,
    total_0_ptr,
    p_0,
    n_0,
    partial_1_ptr,
    total_1_ptr,
    p_1,
    n_1,
    partial_2_ptr,
    total_2_ptr,
    p_2,
    n_2,
    blocks_0,
    blocks_1,
):
    """Column sums of 3 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        _reduce_3_block(block, partial_0_ptr, total_0_ptr, p_0, n_0)
    elif block < blocks_0 + blocks_1:
        _reduce_3_block(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1)
    else:
        _reduce_3_block(block - blocks_0 - blocks_1, partial_2_ptr, total_2_ptr, p_2, n_2)


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
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    total_2 = partial_2.new_empty((partial_2.shape[1],), dtype=dtype_2)
    blocks_0 = triton.cdiv(partial_0.shape[1], 16)
    blocks_1 = triton.cdiv(partial_1.shape[1], 16)
    blocks_2 = triton.cdiv(partial_2.shape[1], 16)
    operators.launch(
        _reduce_3,
        (blocks_0 + blocks_1 + blocks_2,),
        partial_0.contiguous(),
        total_0,
        *partial_0.shape,
        partial_1.contiguous(),
        total_1,
        *partial_1.shape,
        partial_2.contiguous(),
        total_2,
        *partial_2.shape,
        blocks_0,
        blocks_1,
        num_warps=8,
    )
    return total_0, total_1, total_2


@triton.jit
def _reduce_6_block(block, partial_ptr, total_ptr, p, n):
    """Sums of 16 columns of partial (p, n), written to total (n,)."""
    column = block * 16 + tl.arange(0, 16)
    inside = column < n
    total = tl.zeros([128, 16], tl.float32)
    for first in range(0, p, 128):
        row = first + tl.arange(0, 128)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["p_0", "p_1", "p_2", "p_3", "p_4", "p_5"])
def _reduce_6(
    partial_0_ptr,
    total_0_ptr,
    p_0,
    n_0,
    partial_1_ptr,
    total_1_ptr,
    p_1,
    n_1,
    partial_2_ptr,
    total_2_ptr,
    p_2,
    n_2,
    partial_3_ptr,
    total_3_ptr,
    p_3,
    n_3,
    partial_4_ptr,
    total_4_ptr,
    p_4,
    n_4,
    partial_5_ptr,
    total_5_ptr,
    p_5,
    n_5,
    blocks_0,
    blocks_1,
    blocks_2,
    blocks_3,
    blocks_4,
):
    """Column sums of 6 matrices."""
    block = tl.program_id(0)
    if block < blocks_0:
        _reduce_6_block(block, partial_0_ptr, total_0_ptr, p_0, n_0)
    elif block < blocks_0 + blocks_1:
        _reduce_6_block(block - blocks_0, partial_1_ptr, total_1_ptr, p_1, n_1)
    elif block < blocks_0 + blocks_1 + blocks_2:
        _reduce_6_block(block - blocks_0 - blocks_1, partial_2_ptr, total_2_ptr, p_2, n_2)
    elif block < blocks_0 + blocks_1 + blocks_2 + blocks_3:
        _reduce_6_block(block - blocks_0 - blocks_1 - blocks_2, partial_3_ptr, total_3_ptr, p_3, n_3)
    elif block < blocks_0 + blocks_1 + blocks_2 + blocks_3 + blocks_4:
        _reduce_6_block(block - blocks_0 - blocks_1 - blocks_2 - blocks_3, partial_4_ptr, total_4_ptr, p_4, n_4)
    else:
        _reduce_6_block(
            block - blocks_0 - blocks_1 - blocks_2 - blocks_3 - blocks_4, partial_5_ptr, total_5_ptr, p_5, n_5
        )


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
    total_0 = partial_0.new_empty((partial_0.shape[1],), dtype=dtype_0)
    total_1 = partial_1.new_empty((partial_1.shape[1],), dtype=dtype_1)
    total_2 = partial_2.new_empty((partial_2.shape[1],), dtype=dtype_2)
    total_3 = partial_3.new_empty((partial_3.shape[1],), dtype=dtype_3)
    total_4 = partial_4.new_empty((partial_4.shape[1],), dtype=dtype_4)
    total_5 = partial_5.new_empty((partial_5.shape[1],), dtype=dtype_5)
    blocks_0 = triton.cdiv(partial_0.shape[1], 16)
    blocks_1 = triton.cdiv(partial_1.shape[1], 16)
    blocks_2 = triton.cdiv(partial_2.shape[1], 16)
    blocks_3 = triton.cdiv(partial_3.shape[1], 16)
    blocks_4 = triton.cdiv(partial_4.shape[1], 16)
    blocks_5 = triton.cdiv(partial_5.shape[1], 16)
    operators.launch(
        _reduce_6,
        (blocks_0 + blocks_1 + blocks_2 + blocks_3 + blocks_4 + blocks_5,),
        partial_0.contiguous(),
        total_0,
        *partial_0.shape,
        partial_1.contiguous(),
        total_1,
        *partial_1.shape,
        partial_2.contiguous(),
        total_2,
        *partial_2.shape,
        partial_3.contiguous(),
        total_3,
        *partial_3.shape,
        partial_4.contiguous(),
        total_4,
        *partial_4.shape,
        partial_5.contiguous(),
        total_5,
        *partial_5.shape,
        blocks_0,
        blocks_1,
        blocks_2,
        blocks_3,
        blocks_4,
        num_warps=8,
    )
    return total_0, total_1, total_2, total_3, total_4, total_5


@triton.jit
def _requantize_transpose_2_tile(tile, values_ptr, scale_ptr, scale_max_ptr, transposed_ptr, scale_t_ptr, m, n, parts):
    """One tile of 128 x 128 of values (m, n), written to transposed (n, m); the first ones fill scale_t (n,)."""
    # The largest of the scales; 2**-108 is that of a zero row, the smallest there is.
    scale_max = tl.full([1024], 3.0814879110195774e-33, tl.float32)
    for first in range(0, parts, 1024):
        part = first + tl.arange(0, 1024)
        scale_max = tl.maximum(scale_max, tl.load(scale_max_ptr + part, mask=part < parts, other=0.0))
    bits = tl.max(scale_max, 0).to(tl.int32, bitcast=True)
    reciprocal = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    across = tl.maximum(tl.cdiv(n, 128), 1)
    row = tile // across * 128 + tl.arange(0, 128)
    column = tile % across * 128 + tl.arange(0, 128)
    mask = (row < m)[:, None] & (column < n)[None, :]
    values = tl.load(values_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    ratio = tl.load(scale_ptr + row, mask=row < m, other=0.0) * reciprocal
    transposed = tl.trans((values.to(tl.float32) * ratio[:, None]).to(tl.float8e4nv))
    tl.store(transposed_ptr + column[:, None].to(tl.int64) * m + row[None, :], transposed, mask=tl.trans(mask))
    if tile < across:
        scale_t = tl.zeros([128], tl.float32) + bits.to(tl.float32, bitcast=True)
        tl.store(scale_t_ptr + column, scale_t, mask=column < n)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "tiles_0"])
def _requantize_transpose_2(
    values_0_ptr,
    scale_0_ptr,
    scale_max_0_ptr,
    transposed_0_ptr,
    scale_t_0_ptr,
    m_0,
    n_0,
    parts_0,
    values_1_ptr,
    scale_1_ptr,
    scale_max_1_ptr,
    transposed_1_ptr,
    scale_t_1_ptr,
    m_1,
    n_1,
    parts_1,
    tiles_0,
):
    """Transposed copies of 2 e4m3 matrices."""
    tile = tl.program_id(0)
    if tile < tiles_0:
        _requantize_transpose_2_tile(
            tile, values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, parts_0
        )
    else:
        _requantize_transpose_2_tile(
            tile - tiles_0,
            values_1_ptr,
            scale_1_ptr,
            scale_max_1_ptr,
            transposed_1_ptr,
            scale_t_1_ptr,
            m_1,
            n_1,
            parts_1,
        )


def requantize_transpose_2(
    values_0: Tensor, scale_0: Tensor, scale_max_0: Tensor, values_1: Tensor, scale_1: Tensor, scale_max_1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transposed copies of 2 e4m3 matrices.

    values_0 (R_0, C_0) e4m3, scale_0 (R_0, 1), scale_max_0 (P_0,), values_1 (R_1, C_1) e4m3, scale_1 (R_1, 1),
    scale_max_1 (P_1,) -> transposed_0 (C_0, R_0), scale_t_0 (C_0, 1), transposed_1 (C_1, R_1), scale_t_1 (C_1, 1).
    """
    m_0, n_0 = values_0.shape
    transposed_0 = values_0.new_empty((n_0, m_0))
    scale_t_0 = values_0.new_empty((n_0, 1), dtype=torch.float32)
    m_1, n_1 = values_1.shape
    transposed_1 = values_1.new_empty((n_1, m_1))
    scale_t_1 = values_1.new_empty((n_1, 1), dtype=torch.float32)
    tiles_0 = max(triton.cdiv(m_0, 128), 1) * max(triton.cdiv(n_0, 128), 1)
    tiles_1 = max(triton.cdiv(m_1, 128), 1) * max(triton.cdiv(n_1, 128), 1)
    operators.launch(
        _requantize_transpose_2,
        (tiles_0 + tiles_1,),
        values_0.contiguous(),
        scale_0,
        scale_max_0,
        transposed_0,
        scale_t_0,
        m_0,
        n_0,
        scale_max_0.shape[0],
        values_1.contiguous(),
        scale_1,
        scale_max_1,
        transposed_1,
        scale_t_1,
        m_1,
        n_1,
        scale_max_1.shape[0],
        tiles_0,
        num_warps=4,
    )
    return transposed_0, scale_t_0, transposed_1, scale_t_1


@triton.jit
def _requantize_transpose_3_tile(tile, values_ptr, scale_ptr, scale_max_ptr, transposed_ptr, scale_t_ptr, m, n, parts):
    """One tile of 128 x 128 of values (m, n), written to transposed (n, m); the first ones fill scale_t (n,)."""
    # The largest of the scales; 2**-108 is that of a zero row, the smallest there is.
    scale_max = tl.full([1024], 3.0814879110195774e-33, tl.float32)
    for first in range(0, parts, 1024):
        part = first + tl.arange(0, 1024)
        scale_max = tl.maximum(scale_max, tl.load(scale_max_ptr + part, mask=part < parts, other=0.0))
    bits = tl.max(scale_max, 0).to(tl.int32, bitcast=True)
    reciprocal = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    across = tl.maximum(tl.cdiv(n, 128), 1)
    row = tile // across * 128 + tl.arange(0, 128)
    column = tile % across * 128 + tl.arange(0, 128)
    mask = (row < m)[:, None] & (column < n)[None, :]
    values = tl.load(values_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    ratio = tl.load(scale_ptr + row, mask=row < m, other=0.0) * reciprocal
    transposed = tl.trans((values.to(tl.float32) * ratio[:, None]).to(tl.float8e4nv))
    tl.store(transposed_ptr + column[:, None].to(tl.int64) * m + row[None, :], transposed, mask=tl.trans(mask))
    if tile < across:
        scale_t = tl.zeros([128], tl.float32) + bits.to(tl.float32, bitcast=True)
        tl.store(scale_t_ptr + column, scale_t, mask=column < n)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "parts_2", "tiles_0", "tiles_1"])
def _requantize_transpose_3(
    values_0_ptr,
    scale_0_ptr,
    scale_max_0_ptr,
    transposed_0_ptr,
    scale_t_0_ptr,
    m_0,
    n_0,
    parts_0,
    values_1_ptr,
    scale_1_ptr,
    scale_max_1_ptr,
    transposed_1_ptr,
    scale_t_1_ptr,
    m_1,
    n_1,
    parts_1,
    values_2_ptr,
    scale_2_ptr,
    scale_max_2_ptr,
    transposed_2_ptr,
    scale_t_2_ptr,
    m_2,
    n_2,
    parts_2,
    tiles_0,
    tiles_1,
):
    """Transposed copies of 3 e4m3 matrices."""
    tile = tl.program_id(0)
    if tile < tiles_0:
        _requantize_transpose_3_tile(
            tile, values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, parts_0
        )
    elif tile < tiles_0 + tiles_1:
        _requantize_transpose_3_tile(
            tile - tiles_0,
            values_1_ptr,
            scale_1_ptr,
            scale_max_1_ptr,
            transposed_1_ptr,
            scale_t_1_ptr,
            m_1,
            n_1,
            parts_1,
        )
    else:
        _requantize_transpose_3_tile(
            tile - tiles_0 - tiles_1,
            values_2_ptr,
            scale_2_ptr,
            scale_max_2_ptr,
            transposed_2_ptr,
            scale_t_2_ptr,
            m_2,
            n_2,
            parts_2,
        )


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
    m_0, n_0 = values_0.shape
    transposed_0 = values_0.new_empty((n_0, m_0))
    scale_t_0 = values_0.new_empty((n_0, 1), dtype=torch.float32)
    m_1, n_1 = values_1.shape
    transposed_1 = values_1.new_empty((n_1, m_1))
    scale_t_1 = values_1.new_empty((n_1, 1), dtype=torch.float32)
    m_2, n_2 = values_2.shape
    transposed_2 = values_2.new_empty((n_2, m_2))
    scale_t_2 = values_2.new_empty((n_2, 1), dtype=torch.float32)
    tiles_0 = max(triton.cdiv(m_0, 128), 1) * max(triton.cdiv(n_0, 128), 1)
    tiles_1 = max(triton.cdiv(m_1, 128), 1) * max(triton.cdiv(n_1, 128), 1)
    tiles_2 = max(triton.cdiv(m_2, 128), 1) * max(triton.cdiv(n_2, 128), 1)
    operators.launch(
        _requantize_transpose_3,
        (tiles_0 + tiles_1 + tiles_2,),
        values_0.contiguous(),
        scale_0,
        scale_max_0,
        transposed_0,
        scale_t_0,
        m_0,
        n_0,
        scale_max_0.shape[0],
        values_1.contiguous(),
        scale_1,
        scale_max_1,
        transposed_1,
        scale_t_1,
        m_1,
        n_1,
        scale_max_1.shape[0],
        values_2.contiguous(),
        scale_2,
        scale_max_2,
        transposed_2,
        scale_t_2,
        m_2,
        n_2,
        scale_max_2.shape[0],
        tiles_0,
        tiles_1,
        num_warps=4,
    )
    return transposed_0, scale_t_0, transposed_1, scale_t_1, transposed_2, scale_t_2

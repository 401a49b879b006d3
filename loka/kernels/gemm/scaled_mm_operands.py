"""Operands of `torch.nn.functional.scaled_mm` in FP8: what a device takes, by the limits in its spec, and in which
sizes and strides.

Those of Hopper (`loka.devices.hopper`) were measured on an H100 with torch 2.11 and CUDA 13.0 (docs/results/LOG.md,
tests/kernels/gemm/test_scaled_mm_gpu.py). The checks are torch's own (aten/src/ATen/native/cuda/ScaledBlas.cpp) or
cuBLASLt's, where it finds no algorithm:

- only the pairs of scalings in `pairs`; a transposed operand (`requantize_transpose`) has the same scale for all its
  rows, which can be used as a tensorwise or as a rowwise scale: its recipe says which;
- e5m2 for one operand at most, and for none with blockwise scaling;
- contraction and columns of the result in multiples of 16; rows are free, except for a 1x128-scaled first operand
  (multiples of 4);
- fast accumulation with tensorwise and rowwise scales only;
- scales of 1x32 (MXFP8, Blackwell and CDNA 4) as e8m0, the exponent's bits of a float32 power of two. NVIDIA's are in
  tiles of 128 rows and 4 blocks ("32x4x4"; cuBLAS documentation, 1D block scaling factors layout), AMD's row by row.
  The layout is tested against its definition and torchao's; no GPU of ours has multiplied them.

Zero padding changes no result: a zero multiplies only padding of the other operand, and padded rows and columns of the
product are sliced off.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.devices.spec import OCP, ScaledMMLimits
from loka.devices.targets import DEFAULT, device_named
from loka.numerics.enums import Accumulation, Format, Scaling


def refuse_recipe(
    scalings: tuple[Scaling, Scaling],
    formats: tuple[Format, Format],
    accumulation: Accumulation,
    limits: ScaledMMLimits = DEFAULT.scaled_mm,
) -> str | None:
    """Reason why a device's kernel cannot multiply operands of these scalings and formats; None where it can."""
    if limits.e4m3 != OCP:
        return f"its tensor cores multiply {limits.e4m3}, whose numbers are not those of the FP8 that LoKA makes, {OCP}"
    if scalings not in limits.pairs:
        allowed = ", ".join(sorted(f"{a} x {b}" for a, b in limits.pairs))
        return f"no kernel multiplies {scalings[0].value} x {scalings[1].value}; it takes {allowed}"
    if formats == (Format.E5M2, Format.E5M2):
        return "the tensor core multiplies no e5m2 x e5m2; make one operand e4m3"
    if scalings[0] in limits.precise_e4m3 and Format.E5M2 in formats:
        return "blockwise scaling takes e4m3 operands only"
    if scalings[0] in limits.precise_e4m3 and accumulation is Accumulation.FAST:
        return "blockwise scaling has no fast accumulation; use accumulation: precise"
    return None


@cache
def limits_of(device: int) -> ScaledMMLimits:
    """Limits of a CUDA device's kernel; the default target's for a device that is no target."""
    found = device_named(torch.cuda.get_device_name(device))
    return (found or DEFAULT).scaled_mm


SCALE_ALIGNMENT = 4  # of a 128x128 operand's scales along the contraction: 16 bytes
MX_TILE = (128, 4)  # rows and blocks of a tile of 1x32 scales, ...
MX_ROWS = 32  # ... of which rows this far apart are neighbours


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below size."""
    return -(-size // multiple) * multiple


def pad_operand(x: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """An FP8 matrix (R, C), zero-padded at the end to multiples, row-major with strides (C, 1) even where R is 1."""
    rows, columns = x.shape
    more_rows, more_columns = -rows % row_multiple, -columns % column_multiple
    if more_rows or more_columns:
        # as bytes: padding is not implemented for every FP8 type, and 0x00 is zero in both
        x = F.pad(x.view(torch.uint8), (0, more_columns, 0, more_rows)).view(x.dtype)
    x = x.contiguous()
    # a matrix of one row counts as contiguous whatever its first stride, but the kernel reads that stride
    return x if x.stride(0) == x.shape[1] else x.as_strided(x.shape, (x.shape[1], 1))


def pad_vector(x: Tensor, size: int) -> Tensor:
    """A bias (S,), zero-padded at the end to `size`, contiguous."""
    return (F.pad(x, (0, size - x.shape[0])) if size != x.shape[0] else x).contiguous()


def first_scale(scale: Tensor, scaling: Scaling, rows: int, swizzled: bool = True) -> Tensor:
    """Scales of the first operand with `rows` (padded) rows.

    tensorwise (1, 1); rowwise (R, 1); 1x128 (R, n) with strides (1, R); 128x128 (n rounded up to 4, R / 128) with
    strides (1, n rounded up to 4); 1x32 in e8m0, (R, n) or, where `swizzled`, the tiles one after another.
    """
    if scaling is Scaling.ROWWISE:
        return _pad_rows(scale, rows).reshape(-1).unsqueeze(1)
    return _blockwise_scale(scale, scaling, rows, swizzled)


def second_scale(scale: Tensor, scaling: Scaling, rows: int, swizzled: bool = True) -> Tensor:
    """Scales of the second operand with `rows` (padded) rows: as `first_scale`, but rowwise (1, R)."""
    if scaling is Scaling.ROWWISE:
        return _pad_rows(scale, rows).reshape(-1).unsqueeze(0)
    return _blockwise_scale(scale, scaling, rows, swizzled)


def _blockwise_scale(scale: Tensor, scaling: Scaling, rows: int, swizzled: bool) -> Tensor:
    if scaling is Scaling.TENSORWISE:
        return scale
    if scaling is Scaling.BLOCKWISE_1X32:
        exponents = (_pad_rows(scale, rows).view(torch.int32) >> 23).to(torch.uint8)
        return (_swizzle(exponents) if swizzled else exponents).view(torch.float8_e8m0fnu)
    blocks = scale.shape[1]
    if scaling is Scaling.BLOCKWISE_1X128:
        columns_first = scale.new_empty((blocks, rows))
        columns_first[:, : scale.shape[0]] = scale.t()
        columns_first[:, scale.shape[0] :] = 1.0
        return columns_first.t()
    padded = scale.new_ones((scale.shape[0], round_up(blocks, SCALE_ALIGNMENT)))
    padded[:, :blocks] = scale
    return padded.t()


def _swizzle(exponents: Tensor) -> Tensor:
    """Bytes (R, n) in tiles of MX_TILE, zero-padded; in a tile, 4 blocks of row 0, of 32, 64 and 96, then of row 1."""
    tile_rows, tile_blocks = MX_TILE
    rows, blocks = exponents.shape
    padded = F.pad(exponents, (0, -blocks % tile_blocks, 0, -rows % tile_rows))
    tiles = padded.view(-1, tile_rows // MX_ROWS, MX_ROWS, padded.shape[1] // tile_blocks, tile_blocks)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _pad_rows(scale: Tensor, rows: int) -> Tensor:
    missing = rows - scale.shape[0]
    return F.pad(scale, (0, 0, 0, missing), value=1.0) if missing else scale

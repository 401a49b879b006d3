"""Operands and scales in the sizes and strides that `torch.nn.functional.scaled_mm` needs on a GPU.

Zero padding changes no result: a zero multiplies only padding of the other operand, and padded rows and columns of the
product are sliced off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.numerics.enums import Scaling

SCALE_ALIGNMENT = 4  # of a 128x128 operand's scales along the contraction: 16 bytes


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


def first_scale(scale: Tensor, scaling: Scaling, rows: int) -> Tensor:
    """Scales of the first operand with `rows` (padded) rows.

    tensorwise (1, 1); rowwise (R, 1); 1x128 (R, n) with strides (1, R); 128x128 (n rounded up to 4, R / 128) with
    strides (1, n rounded up to 4).
    """
    if scaling is Scaling.ROWWISE:
        return _pad_rows(scale, rows).reshape(-1).unsqueeze(1)
    return _blockwise_scale(scale, scaling, rows)


def second_scale(scale: Tensor, scaling: Scaling, rows: int) -> Tensor:
    """Scales of the second operand with `rows` (padded) rows: as `first_scale`, but rowwise (1, R)."""
    if scaling is Scaling.ROWWISE:
        return _pad_rows(scale, rows).reshape(-1).unsqueeze(0)
    return _blockwise_scale(scale, scaling, rows)


def _blockwise_scale(scale: Tensor, scaling: Scaling, rows: int) -> Tensor:
    if scaling is Scaling.TENSORWISE:
        return scale
    blocks = scale.shape[1]
    if scaling is Scaling.BLOCKWISE_1X128:
        columns_first = scale.new_empty((blocks, rows))
        columns_first[:, : scale.shape[0]] = scale.t()
        columns_first[:, scale.shape[0] :] = 1.0
        return columns_first.t()
    padded = scale.new_ones((scale.shape[0], round_up(blocks, SCALE_ALIGNMENT)))
    padded[:, :blocks] = scale
    return padded.t()


def _pad_rows(scale: Tensor, rows: int) -> Tensor:
    missing = rows - scale.shape[0]
    return F.pad(scale, (0, 0, 0, missing), value=1.0) if missing else scale

"""Counts an operand's elements on a GPU with one Triton kernel instead of two dozen torch kernels in `operand_tracker`.

The counts are equal: values by feature, and the octaves of u = |x| * 448 / amax in each view. The sums of squares for
the spread of rows and blocks are equal up to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # rows per program; it has one block of features


@triton.jit
def _tally(magnitude, inside, amax, first, last, floor, out):
    """Count exponents of u = magnitude * 448 / amax in a row of the table `out`; returns u."""
    u = tl.math.div_rn(magnitude, tl.math.div_rn(tl.maximum(amax, floor), 448.0))
    field = u.to(tl.int32, bitcast=True) >> 23
    bins = tl.minimum(tl.maximum(field, first), last) - first + 1
    bins = tl.where(inside, bins, 63)  # a bin outside all views, dropped below
    counts = tl.histogram(tl.reshape(bins, [bins.shape[0] * bins.shape[1]]), 64)
    place = tl.arange(0, 64)
    tl.atomic_add(out + place, counts.to(tl.int64), mask=(place <= last - first + 1) & (counts > 0), sem="relaxed")
    return u


@triton.jit
def _count(
    rows_ptr,  # (R, C) float32, as sampled
    row_amax_ptr,  # (R,)
    block_amax_ptr,  # (R, blocks)
    column_amax_ptr,  # (C,)
    amax_ptr,  # ()
    values_ptr,  # (VALUE_BINS, width) int32, added to
    relative_ptr,  # (views, relative_bins) int64, added to
    squares_ptr,  # (R, 2, blocks): sums of u^2 in each block, scaled by the row and by the block
    rows,
    features,
    width,
    blocks,
    smallest,
    largest,
    offset,  # offset from the bits of a half octave to its 1-based index
    zero_bin,
    relative_bins,
    first,
    last,
    floor,
    block: tl.constexpr,
    padded: tl.constexpr,  # block, rounded up to a power of two
    count: tl.constexpr,  # rows per program
):
    number = tl.program_id(0)
    row = tl.program_id(1) * count + tl.arange(0, count)
    lane = tl.arange(0, padded)
    column = number * block + lane
    inside = (row < rows)[:, None] & ((lane < block) & (column < features))[None, :]
    x = tl.load(rows_ptr + row[:, None].to(tl.int64) * features + column[None, :], mask=inside, other=0.0)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # NaN fails the comparison
    magnitude = tl.abs(x)
    half = (tl.minimum(tl.maximum(magnitude, smallest), largest).to(tl.int32, bitcast=True) >> 22) - offset
    sign = (x > 0).to(tl.int32) - (x < 0).to(tl.int32)
    place = (zero_bin + sign * half) * width + column[None, :]
    tl.atomic_add(values_ptr + place, 1, mask=inside, sem="relaxed")
    amax = tl.load(amax_ptr)
    _tally(magnitude, inside, amax, first, last, floor, relative_ptr)
    row_amax = tl.load(row_amax_ptr + row, mask=row < rows, other=1.0)
    by_row = _tally(magnitude, inside, row_amax[:, None], first, last, floor, relative_ptr + relative_bins)
    column_amax = tl.load(column_amax_ptr + column, mask=(lane < block) & (column < features), other=1.0)
    _tally(magnitude, inside, column_amax[None, :], first, last, floor, relative_ptr + 2 * relative_bins)
    block_amax = tl.load(block_amax_ptr + row * blocks + number, mask=row < rows, other=1.0)
    by_block = _tally(magnitude, inside, block_amax[:, None], first, last, floor, relative_ptr + 3 * relative_bins)
    squares = squares_ptr + row * 2 * blocks + number
    tl.store(squares, tl.sum(by_row * by_row, 1), mask=row < rows)
    tl.store(squares + blocks, tl.sum(by_block * by_block, 1), mask=row < rows)


def count(
    rows: Tensor,
    row_amax: Tensor,
    block_amax: Tensor,
    column_amax: Tensor,
    amax: Tensor,
    values: Tensor,
    relative: Tensor,
    *,
    block: int,
    value_limits: tuple[float, float, int, int],
    relative_limits: tuple[int, int, float],
) -> Tensor:
    """Count the finite elements of `rows`, (R, C) float32, into `values` and `relative`; the norms, (R, 1 + blocks).

    `value_limits` are the smallest and the largest distinguished magnitude, the offset from a half octave to its index,
    and the zero bin; `relative_limits` the first and the last exponent field and the floor of an amax. The norms are
    those of u in a row, and in each of its blocks, with the scale of that row or block.
    """
    sampled, features = rows.shape
    blocks = block_amax.shape[1]
    squares = rows.new_empty((sampled, 2, blocks))
    smallest, largest, offset, zero_bin = value_limits
    first, last, floor = relative_limits
    _count[(blocks, triton.cdiv(sampled, ROWS))](
        rows.contiguous(),
        row_amax.contiguous(),
        block_amax.contiguous(),
        column_amax.contiguous(),
        amax,
        values,
        relative,
        squares,
        sampled,
        features,
        values.shape[1],
        blocks,
        smallest,
        largest,
        offset,
        zero_bin,
        relative.shape[1],
        first,
        last,
        floor,
        block=block,
        padded=triton.next_power_of_2(block),
        count=ROWS,
        num_warps=4,
    )
    return torch.cat((squares[:, 0].sum(1, keepdim=True), squares[:, 1]), 1).sqrt_()

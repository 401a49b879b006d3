"""Statistics of a site, as plain tensors on the CPU: the result of trackers, and the content of the full profile.

Sums and moments are float64, counts int64. Merging is exact: it equals one pass over all rows. For that the bins of
magnitudes are the same for all sites, ranks and runs. Three kinds of histogram are kept of an operand, a matrix
(rows, C):

- values: for each feature, the number of its values in each of VALUE_BINS bins, ordered by value. Half an octave each:
  [1, 1.5) x 2^e and [1.5, 2) x 2^e, over OCTAVES octaves of each sign, zero in the middle. An operand's lowest octave
  begins at 2^LOWEST[operand]; smaller magnitudes count in the bin next to zero, larger ones in the outermost.
- relative: the distance of each value below the largest magnitude of its scale's block. With u = |x| * 448 / amax, the
  magnitude that e4m3 would round, the bins are octaves of u: bin 0 counts zeros, bin 1 u < 2^-32, and bin 2 + i u in
  [2^(i-32), 2^(i-31)). 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15, so that every boundary of e4m3 and of e5m2 (subnormal,
  underflow) is a boundary of these bins, for dynamic scales that are not rounded to powers of two.
- spread: of rows, log2 of the root mean square in steps of 1/8 octave over the operand's range; and log2 of amax / rms
  of each row and of each 128 neighbours in a row, in the same steps from 0 to 16 octaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import torch
from pydantic import Field, PlainSerializer, PlainValidator, SerializationInfo, ValidationInfo
from torch import Tensor

from loka.numerics.enums import Operand

OCTAVES = 64
PER_OCTAVE = 2
MAGNITUDE_BINS = OCTAVES * PER_OCTAVE  # of one sign
ZERO_BIN = MAGNITUDE_BINS
VALUE_BINS = 2 * MAGNITUDE_BINS + 1
LOWEST = {Operand.INPUT: -40, Operand.WEIGHT: -40, Operand.GRAD_OUTPUT: -56}  # exponent of the lowest octave

RELATIVE_LOWEST = -32
RELATIVE_BINS = 2 + 41  # zeros, below 2^-32, octaves up to [2^8, 2^9)

SPREAD_STEPS = 8  # an octave
SPREAD_OCTAVES = 16
ROW_RMS_BINS = OCTAVES * SPREAD_STEPS + 1  # bin 0: rows of zeros
SPREAD_BINS = SPREAD_OCTAVES * SPREAD_STEPS + 1  # bin 0: rows (blocks) of zeros


class HistogramView(StrEnum):
    """The block of an operand (rows, C) that shares a scale. A GEMM with its transpose has `COLUMNWISE` scales."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"  # one per feature, over all rows: rowwise scaling of the transpose
    BLOCKWISE = "blockwise_1x128"


VIEWS = tuple(HistogramView)


FULL_WIDTH = 512  # features up to which a covariance is kept in full; above, a sketch
SKETCH = 64  # columns of a sketch's test matrix
CHECKS = 8  # additional columns to measure the error of the low-rank covariance
JOINT = 128  # features of each side in the joint moments of an input and an output gradient
WEIGHT_ROWS = 256  # rows, and columns, of a weight that are kept unmodified


def _put(tensor: Tensor, info: SerializationInfo[dict[str, Tensor]]) -> str:
    contents = info.context
    name = str(len(contents))
    # A copy: safetensors refuses memory that two tensors share.
    contents[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return name


def _take(name: object, info: ValidationInfo[dict[str, Tensor]]) -> Tensor:
    tensor = info.context.pop(name, None) if isinstance(name, str) else None
    if tensor is None:
        raise ValueError(f"the file lacks its tensor {name!r}")
    return tensor


Count = Annotated[int, Field(ge=0, le=1 << 62)]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# A tensor that JSON names, and that is in the dict given as pydantic's context.
Stored = Annotated[Tensor, PlainValidator(_take), PlainSerializer(_put, return_type=str)]


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and summed outer products of deviations of `count` rows with C features.

    `comoment` is the full S = sum (x - mean)(x - mean)^T, (C, C), if C <= FULL_WIDTH, otherwise the sketch S @
    test_matrix, (C, SKETCH + CHECKS). S / (count - 1) is the covariance. Both are linear in S and merge exactly.
    """

    count: Count
    mean: Stored  # (C,)
    diagonal: Stored  # (C,), of S
    comoment: Stored  # (C, C) or (C, SKETCH + CHECKS)


def comoment_columns(width: int) -> int:
    """The number of columns of a comoment of `width` features."""
    return width if width <= FULL_WIDTH else SKETCH + CHECKS


@dataclass(frozen=True, slots=True)
class OperandStats:
    """An activation operand, a matrix (rows, C) at each call: the input (C = K) or the output gradient (C = N)."""

    operand: Operand
    calls: Count
    rows: Count  # of all observed calls
    sampled: Count  # rows of these that the statistics cover
    nonfinite: Count  # NaN or infinite elements among the sampled rows
    nonfinite_calls: Count  # calls with any in the tensor, sampled or not
    moments: Moments  # over sampled rows without a non-finite element
    values: Stored  # (C, VALUE_BINS), finite elements of the sampled rows
    relative: Stored  # (len(VIEWS), RELATIVE_BINS), finite elements of the sampled rows
    row_rms: Stored  # (ROW_RMS_BINS,), of rows without a non-finite element
    row_spread: Stored  # (SPREAD_BINS,), log2(amax / rms) of those rows
    block_spread: Stored  # (SPREAD_BINS,), of 128 neighbours in those rows
    column_amax: Stored  # (C,), largest finite |x| of each feature, over all rows of fully finite calls
    call_amax: Stored  # (ROW_RMS_BINS,), log2 of each call's largest finite |x|, if any, in the bins of row_rms


def count_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the counts of an operand with `width` features, by field of OperandStats."""
    return {
        "values": (width, VALUE_BINS),
        "relative": (len(VIEWS), RELATIVE_BINS),
        "row_rms": (ROW_RMS_BINS,),
        "row_spread": (SPREAD_BINS,),
        "block_spread": (SPREAD_BINS,),
        "call_amax": (ROW_RMS_BINS,),
    }


@dataclass(frozen=True, slots=True)
class JointStats:
    """Joint statistics of an input and an output gradient, for fixed subsets of features: a weight gradient's terms.

    The moments are of the concatenation [input[:, input_features], grad_output[:, grad_features]].
    """

    input_features: Stored  # (J,), int64, J <= JOINT
    grad_features: Stored  # (I,), int64, I <= JOINT
    moments: Moments
    coherent: Finite = 0.0  # sum over calls: mean of (x.x')(g.g') over pairs of different rows of the call
    incoherent: Finite = 0.0  # sum over calls: mean of (x.x)(g.g) over its rows; both over the chosen features


@dataclass(frozen=True, slots=True)
class LowRank:
    """A covariance C as factor @ factor.T + diag(diagonal); `error` is its relative Frobenius error."""

    factor: Stored  # (C, R)
    diagonal: Stored  # (C,)
    error: Figure


@dataclass(frozen=True, slots=True)
class WeightStats:
    """A weight (N, K) at the time of saving: the matrix normal of the paper, and some of its rows and columns.

    The matrix normal is vec(W) ~ N(vec(mean), V (x) U) with mean = row_mean[:, None] + column_mean[None, :].
    """

    step: Count
    updates: Count  # flip-flop updates so far
    amax: Figure
    nonfinite: Count
    row_mean: Stored  # (N,)
    column_mean: Stored  # (K,), so that row_mean + column_mean is the additive fit
    u: LowRank  # among rows, (N, N), trace N
    v: LowRank  # among columns, (K, K)
    row_index: Stored  # (n,), int64
    rows: Stored  # (n, K) float32, n <= WEIGHT_ROWS
    column_index: Stored  # (k,), int64
    columns: Stored  # (N, k) float32
    row_amax: Stored  # (N,)
    column_amax: Stored  # (K,)
    values: Stored  # (VALUE_BINS,), all elements


@dataclass(frozen=True, slots=True)
class SiteStats:
    """All statistics of one site. None for a part that was never seen."""

    name: str
    k: Count
    n: Count
    input: OperandStats | None
    grad_output: OperandStats | None
    joint: JointStats | None
    weight: WeightStats | None

"""Statistics of a site, as plain tensors on the CPU: the result of trackers, and the content of the full profile.

Sums and moments are float64, counts int64. Merging is exact: it equals one pass over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PlainSerializer, PlainValidator, SerializationInfo, ValidationInfo
from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe.profile.profile import Count, Figure, Profile

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


@dataclass(frozen=True, slots=True)
class RecordedStats:
    """The full form of a profile: statistics that can be merged and used for estimates, and the summary.

    While training writes it, `profile` has no estimates yet: they are made offline.
    """

    profile: Profile
    stats: tuple[SiteStats, ...]  # one for each of profile.sites, in that order

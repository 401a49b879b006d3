"""Statistics of a site, as plain tensors on the CPU: the result of trackers, and the content of the full profile.

Sums and moments are float64, counts int64. Merging is exact: it equals one pass over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe.profile.profile import Profile

FULL_WIDTH = 512  # features up to which a covariance is kept in full; above, a sketch
SKETCH = 64  # columns of a sketch's test matrix
CHECKS = 8  # additional columns to measure the error of the low-rank covariance
JOINT = 128  # features of each side in the joint moments of an input and an output gradient
WEIGHT_ROWS = 256  # rows, and columns, of a weight that are kept unmodified


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and summed outer products of deviations of `count` rows with C features.

    `comoment` is the full S = sum (x - mean)(x - mean)^T, (C, C), if C <= FULL_WIDTH, otherwise the sketch S @
    test_matrix, (C, SKETCH + CHECKS). S / (count - 1) is the covariance. Both are linear in S and merge exactly.
    """

    count: int
    mean: Tensor  # (C,)
    diagonal: Tensor  # (C,), of S
    comoment: Tensor  # (C, C) or (C, SKETCH + CHECKS)


@dataclass(frozen=True, slots=True)
class OperandStats:
    """An activation operand, a matrix (rows, C) at each call: the input (C = K) or the output gradient (C = N)."""

    operand: Operand
    calls: int
    rows: int  # of all observed calls
    sampled: int  # rows of these that the statistics cover
    nonfinite: int  # NaN or infinite elements among the sampled rows
    nonfinite_calls: int  # calls with any in the tensor, sampled or not
    moments: Moments  # over sampled rows without a non-finite element
    values: Tensor  # (C, VALUE_BINS), finite elements of the sampled rows
    relative: Tensor  # (len(VIEWS), RELATIVE_BINS), finite elements of the sampled rows
    row_rms: Tensor  # (ROW_RMS_BINS,), of rows without a non-finite element
    row_spread: Tensor  # (SPREAD_BINS,), log2(amax / rms) of those rows
    block_spread: Tensor  # (SPREAD_BINS,), of 128 neighbours in those rows
    column_amax: Tensor  # (C,), largest finite |x| of each feature, over all rows of fully finite calls
    call_amax: (
        Tensor  # (ROW_RMS_BINS,), log2 of the largest finite |x| of each call that has one, in the bins of row_rms
    )


@dataclass(frozen=True, slots=True)
class JointStats:
    """Joint statistics of an input and an output gradient, for fixed subsets of features: a weight gradient's terms.

    The moments are of the concatenation [input[:, input_features], grad_output[:, grad_features]].
    """

    input_features: Tensor  # (J,), int64, J <= JOINT
    grad_features: Tensor  # (I,), int64, I <= JOINT
    moments: Moments
    coherent: float = 0.0  # sum over calls: mean of (x.x')(g.g') over pairs of different rows of the call
    incoherent: float = 0.0  # sum over calls: mean of (x.x)(g.g) over its rows; both over the chosen features


@dataclass(frozen=True, slots=True)
class LowRank:
    """A covariance C as factor @ factor.T + diag(diagonal); `error` is its relative Frobenius error."""

    factor: Tensor  # (C, R)
    diagonal: Tensor  # (C,)
    error: float


@dataclass(frozen=True, slots=True)
class WeightStats:
    """A weight (N, K) at the time of saving: the matrix normal of the paper, and some of its rows and columns.

    The matrix normal is vec(W) ~ N(vec(mean), V (x) U) with mean = row_mean[:, None] + column_mean[None, :].
    """

    step: int
    updates: int  # flip-flop updates so far
    amax: float
    nonfinite: int
    row_mean: Tensor  # (N,)
    column_mean: Tensor  # (K,), so that row_mean + column_mean is the additive fit
    u: LowRank  # among rows, (N, N), trace N
    v: LowRank  # among columns, (K, K)
    row_index: Tensor  # (n,), int64
    rows: Tensor  # (n, K) float32, n <= WEIGHT_ROWS
    column_index: Tensor  # (k,), int64
    columns: Tensor  # (N, k) float32
    row_amax: Tensor  # (N,)
    column_amax: Tensor  # (K,)
    values: Tensor  # (VALUE_BINS,), all elements


@dataclass(frozen=True, slots=True)
class SiteStats:
    """All statistics of one site. None for a part that was never seen."""

    name: str
    k: int
    n: int
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

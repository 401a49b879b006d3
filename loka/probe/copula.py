"""Samples operands from learned marginals, a Gaussian copula, and a learned scale of rows.

A sample is a matrix (C, n): features down, rows of the operand across, so that each feature is contiguous. It is made
in three steps:

1. z ~ N(0, R): dependence. R is chosen so that the features have the learned (Pearson) correlation *after* step 2,
   which weakens it. With g the marginal's quantile function of a normal score and a_k its Hermite coefficients,
   features i and j come out correlated by sum_k a_ik a_jk R_ij^k (Mehler), which is solved for R_ij.
2. Marginals, by ranks: the j-th largest of a feature's n values becomes the j-th largest of n stratified draws from the
   learned histogram. Exact zeros (after a ReLU) stay an atom.
3. Row scale: rows keep their order by root mean square and take sorted draws of the learned row_rms histogram; then the
   marginals are imposed again, and so on alternately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loka.probe.stats.site_stats import MAGNITUDE_BINS, PER_OCTAVE, SPREAD_STEPS, VALUE_BINS, ZERO_BIN, LowRank

GRID = 1024  # points of a normal score at which a marginal is evaluated
HERMITE = 6  # terms of Mehler's series; the rest of a marginal's variance counts as one more
BISECTIONS = 20
STRETCH = 1.3  # of one side of a marginal, at most
TURNS = 4  # alternations of row scale and marginals
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Marginals:
    """The distribution of each of C features, from histograms in the bins of bins.VALUE_BINS.

    Within a bin the density is linear, with a slope limited by the neighbours' densities: bins of half an octave are so
    wide that a constant density would overstate the tails.
    """

    cumulative: Tensor  # (C, VALUE_BINS) float64: share of values up to and including each bin
    mass: Tensor  # (C, VALUE_BINS)
    low: Tensor  # (C, VALUE_BINS), edges
    high: Tensor
    tilt: Tensor  # (C, VALUE_BINS), -1 to 1: density within a bin is 1 + tilt (2 t - 1) for t from 0 to 1

    def quantile(self, u: Tensor) -> Tensor:
        """The values (C, n) float32 at levels u (C, n) float64 in [0, 1)."""
        bin = torch.searchsorted(self.cumulative, u, right=True).clamp(max=VALUE_BINS - 1)
        mass = self.mass.gather(1, bin)
        part = ((u - self.cumulative.gather(1, bin) + mass) / mass.clamp(min=TINY)).clamp(0.0, 1.0)
        tilt = self.tilt.gather(1, bin)
        root = ((1 - tilt).square() + 4 * tilt * part).clamp(min=0.0).sqrt()
        t = (2 * part / (1 - tilt + root).clamp(min=TINY)).clamp(0.0, 1.0)
        low = self.low.gather(1, bin)
        return (low + t * (self.high.gather(1, bin) - low)).float()


def marginals(values: Tensor, lowest: int, column_amax: Tensor) -> Marginals:
    """The distributions for `values` (C, VALUE_BINS); the outer bins of each feature end at its `column_amax` (C,).

    A feature without any count is zero.
    """
    counts = values.double().clone()
    counts[:, ZERO_BIN] += counts.sum(1) == 0
    mass = counts / counts.sum(1, keepdim=True)
    low, high = _edges(lowest)
    limit = column_amax.double()[:, None]
    beyond = torch.where(limit > 0, limit, math.inf)
    low, high = low.expand_as(mass), high.expand_as(mass)
    high = torch.where((high > beyond) & (low < beyond), beyond, high)
    low = torch.where((low < -beyond) & (high > -beyond), -beyond, low)
    return Marginals(mass.cumsum(1), mass, low, high, _tilt(mass, low, high))


def _edges(lowest: int) -> tuple[Tensor, Tensor]:
    """Lower and upper edges (VALUE_BINS,) of the value bins; both zero for the bin of zeros."""
    steps = torch.arange(MAGNITUDE_BINS + 1, dtype=torch.float64)
    octave = (steps / PER_OCTAVE).floor()
    edge = torch.exp2(octave + lowest) * (1 + (steps / PER_OCTAVE - octave))
    zero = torch.zeros(1, dtype=torch.float64)
    inner, outer = edge[:-1], edge[1:]
    return torch.cat((-outer.flip(0), zero, inner)), torch.cat((-inner.flip(0), zero, outer))


def _tilt(mass: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The slope of the density within each bin, limited so that it stays between its neighbours' and positive."""
    width = high - low
    density = torch.where(width > 0, mass / width.clamp(min=TINY), 0.0)
    centre = (low + high) / 2
    step = density.diff(dim=1) / centre.diff(dim=1).clamp(min=TINY)
    before, after = step[:, :-1], step[:, 1:]
    least = torch.minimum(before.abs(), after.abs()) * 2
    slope = torch.minimum(least, (before + after).abs() / 2) * before.sign()
    slope = torch.where(before * after > 0, slope, 0.0)
    tilt = slope * width[:, 1:-1] / (2 * density[:, 1:-1]).clamp(min=TINY)
    full = torch.zeros_like(mass)
    full[:, 1:-1] = tilt.clamp(-1.0, 1.0)
    full[:, ZERO_BIN - 1 : ZERO_BIN + 2] = 0.0  # the atom of zeros has no density
    return full


def spread_quantile(histogram: Tensor, lowest: int, u: Tensor) -> Tensor:
    """Values (n,) float64 at levels u (n,) of a histogram (ROW_RMS_BINS,) of log2 magnitudes; bin 0 is zero.

    All zero if nothing was counted.
    """
    counts = histogram.double()
    total = float(counts.sum())
    if total == 0.0:
        return torch.zeros_like(u)
    cumulative = counts.cumsum(0) / total
    bin = torch.searchsorted(cumulative, u, right=True).clamp(max=counts.numel() - 1)
    mass = counts[bin] / total
    part = ((u - cumulative[bin] + mass) / mass.clamp(min=TINY)).clamp(0.0, 1.0)
    octaves = lowest + (bin - 1 + part) / SPREAD_STEPS
    return torch.where(bin == 0, 0.0, torch.exp2(octaves))


@dataclass(frozen=True, slots=True)
class Latent:
    """The normal scores' covariance factor @ factor.T + diag(own^2), with ones on its diagonal."""

    factor: Tensor  # (C, R) float32
    own: Tensor  # (C,) float32

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Normal scores (C, rows) float32."""
        shared = torch.randn((self.factor.shape[1], rows), generator=generator)
        z = self.factor @ shared
        if bool(self.own.any()):
            z += self.own[:, None] * torch.randn(z.shape, generator=generator)
        return z


def latent(covariance: Tensor | LowRank, shapes: Marginals) -> Latent:
    """The normal scores that give features with these marginals this covariance, as closely as a copula can.

    A full covariance (C, C) is solved element by element, and negative eigenvalues are dropped; for a low-rank one the
    factor is corrected to first order.
    """
    coefficients = _hermite(shapes)
    if isinstance(covariance, LowRank):
        deviation = (covariance.factor.square().sum(1) + covariance.diagonal).sqrt()
        weakened = deviation * coefficients[:, 0].abs()
        factor = torch.where(weakened[:, None] > 0, covariance.factor / weakened.clamp(min=TINY)[:, None], 0.0)
        factor = factor / factor.norm(dim=1, keepdim=True).clamp(min=1.0)
        own = (1 - factor.square().sum(1)).clamp(min=0.0).sqrt()
        return Latent(factor.float(), own.float())
    deviation = covariance.diagonal().clamp(min=0.0).sqrt()
    pearson = covariance / torch.outer(deviation, deviation).clamp(min=TINY)
    values, vectors = torch.linalg.eigh(_unweaken(pearson.clamp(-1.0, 1.0), coefficients))
    factor = vectors * values.clamp(min=0.0).sqrt()
    norm = factor.norm(dim=1, keepdim=True)
    factor = torch.where(norm > 0, factor / norm.clamp(min=TINY), 0.0)
    own = torch.where(norm[:, 0] > 0, 0.0, 1.0)
    return Latent(factor.float(), own.float())


def _hermite(shapes: Marginals) -> Tensor:
    """Coefficients (C, HERMITE + 1) of each marginal in normalised Hermite polynomials of degree 1 and up.

    They are those of the standardised feature: their squares sum to 1, with the remainder as the last one. They are
    zero for a constant feature.
    """
    u = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    z = torch.special.ndtri(u)
    values = shapes.quantile(u.expand(shapes.mass.shape[0], GRID).contiguous()).double()
    values = values - values.mean(1, keepdim=True)
    deviation = values.square().mean(1, keepdim=True).sqrt()
    standard = torch.where(deviation > 0, values / deviation.clamp(min=TINY), 0.0)
    polynomials = [torch.ones_like(z), z]
    for degree in range(2, HERMITE + 1):
        polynomials.append(z * polynomials[-1] - (degree - 1) * polynomials[-2])
    basis = torch.stack([p / p.square().mean().sqrt() for p in polynomials[1:]], 1)
    coefficients = standard @ basis / GRID
    left = (1 - coefficients.square().sum(1)).clamp(min=0.0).sqrt() * (deviation[:, 0] > 0)
    return torch.cat((coefficients, left[:, None]), 1)


def _unweaken(pearson: Tensor, coefficients: Tensor) -> Tensor:
    """The correlation R (C, C) of normal scores with sum_k a_ik a_jk R_ij^k = pearson, ones on the diagonal."""
    products = [torch.outer(a, a) for a in coefficients.t()]
    low, high = -torch.ones_like(pearson), torch.ones_like(pearson)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        made = torch.zeros_like(pearson)
        for product in reversed(products):
            made = (made + product) * middle
        above = made > pearson
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    solved = (low + high) / 2
    solved = torch.where(products[0] == 0, 0.0, solved)
    solved.fill_diagonal_(1.0)
    return (solved + solved.t()) / 2


def levels(count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Stratified levels (count, rows) float64: ascending, one uniform draw in each of `rows` equal parts."""
    inside = torch.rand((count, rows), generator=generator, dtype=torch.float64)
    return (torch.arange(rows, dtype=torch.float64) + inside) / rows


def by_ranks(scores: Tensor, ascending: Tensor) -> Tensor:
    """The values `ascending` (C, n), arranged in the order of each feature's scores (C, n)."""
    order = np.argsort(scores.numpy(), axis=1)
    placed = np.empty_like(ascending.numpy())
    np.put_along_axis(placed, order, ascending.numpy(), axis=1)
    return torch.from_numpy(placed)


def scale_rows(x: Tensor, ascending: Tensor) -> Tensor:
    """x (C, n) with the n rows' root mean squares set to `ascending` (n,), in the rows' own order."""
    rms = x.square().mean(0).sqrt()
    target = torch.empty_like(rms)
    target[rms.argsort()] = ascending.to(rms.dtype)
    return x * torch.where(rms > 0, target / rms.clamp(min=TINY), 1.0)


def joined(parts: list[Marginals]) -> Marginals:
    """The features of all parts, in order."""
    return Marginals(
        cumulative=torch.cat([part.cumulative for part in parts]),
        mass=torch.cat([part.mass for part in parts]),
        low=torch.cat([part.low for part in parts]),
        high=torch.cat([part.high for part in parts]),
        tilt=torch.cat([part.tilt for part in parts]),
    )


def fitted(shapes: Marginals, mean: Tensor, variance: Tensor) -> Marginals:
    """The same with each feature's negative and positive values stretched to match its `mean` and `variance` (C,).

    A bin is wide compared with values that hardly vary (the lower end of SiLU), and coherent sums depend on the mean.
    No side is stretched by more than STRETCH; zeros stay zeros.
    """
    u = ((torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID).expand(shapes.mass.shape[0], GRID).contiguous()
    values = shapes.quantile(u).double()
    above, below = values.clamp(min=0.0), (-values).clamp(min=0.0)
    up, down = above.mean(1), below.mean(1)
    up_square, down_square = above.square().mean(1), below.square().mean(1)
    # up s - down t = mean and up_square s^2 + down_square t^2 = variance + mean^2, for s; t follows.
    square = up_square + down_square * (up / down.clamp(min=TINY)).square()
    cross = -down_square * up * mean / down.clamp(min=TINY).square()
    rest = down_square * (mean / down.clamp(min=TINY)).square() - variance - mean.square()
    root = (cross.square() - square * rest).clamp(min=0.0).sqrt()
    one, other = ((-cross + sign * root) / square.clamp(min=TINY) for sign in (1.0, -1.0))
    s = torch.where((one - 1).abs() < (other - 1).abs(), one, other)
    s = torch.where(down > 0, s, mean / up.clamp(min=TINY))
    s = torch.where(up > 0, s, 1.0).clamp(1 / STRETCH, STRETCH)
    t = torch.where(down > 0, (up * s - mean) / down.clamp(min=TINY), 1.0).clamp(1 / STRETCH, STRETCH)
    factor = torch.ones_like(shapes.mass)
    factor[:, :ZERO_BIN] = t[:, None]
    factor[:, ZERO_BIN + 1 :] = s[:, None]
    return replace(shapes, low=shapes.low * factor, high=shapes.high * factor)

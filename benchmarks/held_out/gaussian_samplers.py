"""Samplers for comparison with the copula: standard normal, and the paper's Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Gemm, Operand
from loka.probe import copula
from loka.probe.samplers import LARGEST_DRAW, ROW_CAP, Drawn, at_least, usable
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import JOINT, LowRank, OperandStats, SiteStats, WeightStats


class NormalSampler:
    """Standard normal operands in the GEMM's shapes, except for the cap on rows."""

    name = "normal"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, rows

    def can_draw(self, gemm: Gemm) -> bool:
        """Always True: only the shapes are used."""
        return True

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands from N(0, 1); amax_* is the median of the maximum of the whole operand."""
        k, n, m = self._stats.k, self._stats.n, self._rows
        (r, s), c = {Gemm.FPROP: ((m, n), k), Gemm.DGRAD: ((m, k), n), Gemm.WGRAD: ((n, k), m)}[gemm]
        if gemm is Gemm.WGRAD:
            a_rows, b_rows = min(r, JOINT), min(s, JOINT)
            c = min(c, LARGEST_DRAW // (a_rows + b_rows))
        else:
            a_rows, b_rows = min(r, ROW_CAP), min(s, ROW_CAP)
        a = torch.randn((a_rows, c), generator=generator)
        b = torch.randn((b_rows, c), generator=generator)
        whole = {Operand.INPUT: m * k, Operand.WEIGHT: n * k, Operand.GRAD_OUTPUT: m * n}
        first, second = OPERANDS[gemm]
        return Drawn(a, b, at_least(normal_amax(whole[first]), a), at_least(normal_amax(whole[second]), b))


class GaussianSampler:
    """The paper's sampler: activations multivariate normal with independent rows, the weight matrix normal.

    The operands of wgrad are drawn independently of each other, up to JOINT features of each.
    """

    name = "gaussian"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, rows
        self._normals = {
            Operand.INPUT: _normal(stats.input),
            Operand.GRAD_OUTPUT: _normal(stats.grad_output),
        }
        self._weight = None if stats.weight is None else _MatrixNormal(stats.weight)

    def can_draw(self, gemm: Gemm) -> bool:
        """True if both operands were recorded."""
        return all(self._seen(operand) for operand in OPERANDS[gemm])

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands T' = 1 mu^T + Z L^T and W' = mean + L_U Z L_V^T, as in the paper."""
        if gemm is Gemm.WGRAD:
            widths = min(self._stats.n, JOINT), min(self._stats.k, JOINT)
            rows = min(self._rows, LARGEST_DRAW // sum(widths))
            a, amax_a = self._activation(Operand.GRAD_OUTPUT, rows, widths[0], generator)
            b, amax_b = self._activation(Operand.INPUT, rows, widths[1], generator)
            return Drawn(a.t().contiguous(), b.t().contiguous(), amax_a, amax_b)
        first = OPERANDS[gemm][0]
        width = self._stats.k if gemm is Gemm.FPROP else self._stats.n
        a, amax_a = self._activation(first, min(self._rows, ROW_CAP), width, generator)
        weight = self._weight
        if weight is None:
            raise InputError(f"site {self._stats.name}: no weight was seen")
        b = weight.draw(ROW_CAP, gemm is Gemm.DGRAD, generator)
        return Drawn(a, b, amax_a, at_least(weight.amax, b))

    def _seen(self, operand: Operand) -> bool:
        return self._weight is not None if operand is Operand.WEIGHT else self._normals[operand] is not None

    def _activation(
        self, operand: Operand, rows: int, width: int, generator: torch.Generator
    ) -> tuple[Tensor, float | None]:
        """(rows, width) of an activation, its first `width` features, and the whole operand's median maximum."""
        normal = self._normals[operand]
        if normal is None:
            raise InputError(f"site {self._stats.name}: no {operand.value} was seen")
        drawn = normal.draw(rows, width, generator)
        return drawn, at_least(normal.amax(self._rows), drawn)


class _Normal:
    """A multivariate normal over the features of an activation."""

    def __init__(self, stats: OperandStats) -> None:
        found = covariance(stats.moments)
        self._mean = stats.moments.mean.double()
        if isinstance(found, LowRank):
            self._factor, self._own = found.factor, found.diagonal.clamp(min=0.0).sqrt()
        else:
            values, vectors = torch.linalg.eigh(found)
            self._factor, self._own = vectors * values.clamp(min=0.0).sqrt(), torch.zeros_like(self._mean)
        self._deviation = (self._factor.square().sum(1) + self._own.square()).sqrt()
        self._amax: dict[int, float] = {}

    def draw(self, rows: int, width: int, generator: torch.Generator) -> Tensor:
        """The first `width` features of random rows: (rows, width), float32."""
        factor, own = self._factor[:width].float(), self._own[:width].float()
        drawn = torch.randn((rows, factor.shape[1]), generator=generator) @ factor.t()
        if bool(own.any()):
            drawn += torch.randn(drawn.shape, generator=generator) * own
        return drawn + self._mean[:width].float()

    def amax(self, rows: int) -> float:
        """Median of the largest |x| in `rows` rows, assuming independent elements."""
        if rows not in self._amax:
            self._amax[rows] = median_amax(self._mean, self._deviation, rows)
        return self._amax[rows]


class _MatrixNormal:
    """W' = mean + L_U Z L_V^T for some rows or columns of a weight (N, K)."""

    def __init__(self, stats: WeightStats) -> None:
        self._stats = stats
        self.amax = self._largest()

    def draw(self, cap: int, transposed: bool, generator: torch.Generator) -> Tensor:
        """At most `cap` random rows (rows, K) of W', or rows (rows, N) of its transpose, float32."""
        stats = self._stats
        left, right = (stats.v, stats.u) if transposed else (stats.u, stats.v)
        means = (stats.column_mean, stats.row_mean) if transposed else (stats.row_mean, stats.column_mean)
        chosen = torch.randperm(means[0].numel(), generator=generator)[:cap]
        wide = right.factor.shape[1] + right.diagonal.numel()
        shared = torch.randn((left.factor.shape[1], wide), generator=generator)
        own = torch.randn((chosen.numel(), wide), generator=generator)
        left_own, right_own = (part.diagonal.clamp(min=0.0).sqrt().float() for part in (left, right))
        rows = left.factor[chosen].float() @ shared + left_own[chosen, None] * own
        rank = right.factor.shape[1]
        drawn = rows[:, :rank] @ right.factor.float().t() + rows[:, rank:] * right_own
        return drawn + means[0][chosen].float()[:, None] + means[1].float()

    def _largest(self) -> float:
        """Median of the largest |x| of W', from about ROW_CAP rows, each weighted by the number it represents."""
        stats = self._stats
        n = stats.row_mean.numel()
        chosen = torch.arange(0, n, max(1, n // ROW_CAP))
        variance = torch.outer(_variance(stats.u)[chosen], _variance(stats.v))
        mean = stats.row_mean.double()[chosen, None] + stats.column_mean.double()
        return median_amax(mean.flatten(), variance.sqrt().flatten(), n / chosen.numel())


def _variance(found: LowRank) -> Tensor:
    return (found.factor.double().square().sum(1) + found.diagonal.double()).clamp(min=0.0)


def _normal(stats: OperandStats | None) -> _Normal | None:
    return _Normal(stats) if stats is not None and usable(stats) else None


def normal_amax(count: float) -> float:
    """Median of the largest |x| of `count` standard normal numbers."""
    level = torch.tensor(-math.expm1(-math.log(2) / count) / 2, dtype=torch.float64)
    return float(-torch.special.ndtri(level))


def median_amax(mean: Tensor, deviation: Tensor, times: float) -> float:
    """Median of the largest |x| if each normal variable of `mean` and `deviation` is drawn `times` times."""
    low = 0.0
    high = float(mean.abs().max() + deviation.max() * normal_amax(2 * times * mean.numel())) if mean.numel() else 0.0
    spread = deviation.clamp(min=copula.TINY)
    for _ in range(24):
        middle = (low + high) / 2
        above = torch.special.ndtr((mean - middle) / spread) + torch.special.ndtr((-mean - middle) / spread)
        if times * float(above.sum()) > math.log(2):
            low = middle
        else:
            high = middle
    return high

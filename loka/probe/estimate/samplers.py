"""Operands drawn from what was learned: standard normal, the paper's Gaussian, and ours (copula.py).

All are written as docs/architecture.md says ("How an FP8 linear is written"): a is (R, C) and b (S, C), contracted
over C. Of a and b only some rows are drawn, for time's sake; the contracted dimension C is whole, so that rowwise
scales are what they would be. For a weight gradient C is the batch: its rows are drawn up to LARGEST_DRAW elements
in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Gemm, Operand
from loka.probe.estimate import copula
from loka.probe.stats import coherence
from loka.probe.stats.bins import LOWEST
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import JOINT, JointStats, LowRank, OperandStats, SiteStats, WeightStats

ROW_CAP = 256  # drawn rows of each operand
LARGEST_DRAW = 2**22  # elements of both operands of a weight gradient together: 16384 rows of 256 features


@dataclass(frozen=True, slots=True)
class Drawn:
    """Both operands of one GEMM, K-major float32; perhaps only some rows of each.

    `amax_a` and `amax_b` are the largest |x| of the whole operand, for a tensorwise scale, where the drawn
    part does not show it; never less than the drawn part's. None: the drawn part is the whole operand.
    """

    a: Tensor  # (R, C)
    b: Tensor  # (S, C)
    amax_a: float | None
    amax_b: float | None


class Sampler(Protocol):
    """Draws operands of a site's GEMMs. Built from (stats, rows), `rows` being the M of one call."""

    name: str

    def can_draw(self, gemm: Gemm) -> bool:
        """Whether what the GEMM's operands need was seen."""

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands of the GEMM. Raises InputError where `can_draw` is False."""


class NormalSampler:
    """Every element standard normal, in the GEMM's true shapes, but for the cap on rows."""

    name = "normal"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, check_rows(rows)

    def can_draw(self, gemm: Gemm) -> bool:
        """Always: nothing that was learned is used but the shapes."""
        return True

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands of N(0, 1); amax_* is the median of the largest of as many as the whole operand has."""
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
    """The paper's: activations multivariate normal with independent rows, the weight matrix normal.

    The operands of a weight gradient are drawn independently of each other, at up to JOINT features of each.
    """

    name = "gaussian"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, check_rows(rows)
        self._normals = {
            Operand.INPUT: _normal(stats.input),
            Operand.GRAD_OUTPUT: _normal(stats.grad_output),
        }
        self._weight = None if stats.weight is None else _MatrixNormal(stats.weight)

    def can_draw(self, gemm: Gemm) -> bool:
        """Whether both operands were seen."""
        return all(self._seen(operand) for operand in OPERANDS[gemm])

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """T' = 1 mu^T + Z L^T and W' = mean + L_U Z L_V^T, the paper's."""
        require(self, gemm, self._stats.name)
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
        """Rows (rows, width) of an activation, the first `width` features, and the whole operand's usual maximum."""
        normal = self._normals[operand]
        if normal is None:
            raise InputError(f"site {self._stats.name}: no {operand.value} was seen")
        drawn = normal.draw(rows, width, generator)
        return drawn, at_least(normal.amax(self._rows), drawn)


class CopulaSampler:
    """Ours: learned marginals, a Gaussian copula, learned row scales; of the weight, rows and columns as they are."""

    name = "copula"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, check_rows(rows)
        self._sources: dict[Gemm, _Activation] = {}

    def can_draw(self, gemm: Gemm) -> bool:
        """Whether both operands were seen, and for a weight gradient both in the same call."""
        stats = self._stats
        seen = {
            Operand.INPUT: usable(stats.input),
            Operand.GRAD_OUTPUT: usable(stats.grad_output),
            Operand.WEIGHT: stats.weight is not None,
        }
        joint = gemm is not Gemm.WGRAD or (stats.joint is not None and stats.joint.moments.count > 1)
        return joint and all(seen[operand] for operand in OPERANDS[gemm])

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands as copula.py makes them; both operands of a weight gradient are drawn together."""
        require(self, gemm, self._stats.name)
        if gemm not in self._sources:
            self._sources[gemm] = self._source(gemm)
        source, stats = self._sources[gemm], self._stats
        if gemm is Gemm.WGRAD:
            rows = min(self._rows, LARGEST_DRAW // source.width)
            x, grad = source.independent(rows, generator)
            a, b = grad.contiguous(), x.contiguous()
            return Drawn(a, b, at_least(_amax(stats.grad_output), a), at_least(_amax(stats.input), b))
        (drawn,) = source.stratified(min(self._rows, ROW_CAP), generator)
        weight = stats.weight
        if weight is None:
            raise InputError(f"site {stats.name}: no weight was seen")
        b = weight.rows if gemm is Gemm.FPROP else weight.columns.t()
        seen = stats.input if gemm is Gemm.FPROP else stats.grad_output
        a = drawn.t().contiguous()
        return Drawn(a, b.float().contiguous(), at_least(_amax(seen), a), at_least(weight.amax, b))

    def _source(self, gemm: Gemm) -> _Activation:
        stats = self._stats
        if gemm is Gemm.WGRAD and stats.joint is not None:
            parts = ((stats.input, stats.joint.input_features), (stats.grad_output, stats.joint.grad_features))
            found = covariance(stats.joint.moments)
            together = _Activation([(part, features) for part, features in parts if part], found)
            if isinstance(found, Tensor):
                together.lean(stats.joint, found)
            return together
        seen = stats.input if gemm is Gemm.FPROP else stats.grad_output
        if seen is None:
            raise InputError(f"site {stats.name}: no operand of {gemm.value} was seen")
        return _Activation([(seen, torch.arange(seen.values.shape[0]))], covariance(seen.moments))


class _Activation:
    """Draws some features of one activation, or of two together."""

    def __init__(self, parts: list[tuple[OperandStats, Tensor]], covariance: Tensor | LowRank) -> None:
        self._widths = [features.numel() for _, features in parts]
        self.width = sum(self._widths)
        self._marginals = copula.joined([_marginals(stats, features) for stats, features in parts])
        self._latent = copula.latent(covariance, self._marginals)
        self._common: coherence.Coherence | None = None
        self._scales = [_row_scale(stats, features) for stats, features in parts]

    def lean(self, joint: JointStats, covariance: Tensor) -> None:
        """Let the rows of a draw have in common what those of a call have."""
        inputs = self._widths[0]
        self._common = coherence.coherence(
            coherence.missing(joint, covariance),
            joint.moments.mean.double()[:inputs],
            covariance.diagonal()[:inputs].clamp(min=0.0).sqrt(),
            self._latent.factor[:inputs],
        )

    def independent(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """One matrix (features, rows) for each part, float32: rows independent, marginals and copula, no row scale.

        For sums over rows: in stratified draws the mean of a feature, and with it the sum, would not fluctuate.
        """
        scores = self._latent.draw(rows, generator)
        if self._common is not None:
            scores = self._common.apply(scores, self._widths[0], self._latent.factor, generator)
        scores = scores.double()
        return tuple(torch.split_with_sizes(self._marginals.quantile(torch.special.ndtr(scores)), self._widths))

    def stratified(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The same with stratified marginals and the learned row scales: for products of each row by itself."""
        ascending = self._marginals.quantile(copula.levels(self.width, rows, generator))
        x = copula.by_ranks(self._latent.draw(rows, generator), ascending)
        targets = [scale(copula.levels(1, rows, generator)[0]) for scale in self._scales]
        for _ in range(copula.TURNS):
            parts = torch.split_with_sizes(x, self._widths)
            x = torch.cat([copula.scale_rows(part, target) for part, target in zip(parts, targets, strict=True)])
            x = copula.by_ranks(x, ascending)
        return tuple(torch.split_with_sizes(x, self._widths))


def _marginals(stats: OperandStats, features: Tensor) -> copula.Marginals:
    shapes = copula.marginals(stats.values[features], LOWEST[stats.operand], stats.column_amax[features])
    variance = stats.moments.diagonal.double() / max(stats.moments.count - 1, 1)
    return copula.fitted(shapes, stats.moments.mean.double()[features], variance[features])


def _row_scale(stats: OperandStats, features: Tensor) -> Callable[[Tensor], Tensor]:
    """Root mean squares of rows at given levels, of these features alone: as all features', by their share of power."""
    moments = stats.moments
    power = moments.mean.square() + moments.diagonal / max(moments.count - 1, 1)
    all_features = float(power.mean())
    share = math.sqrt(float(power[features].mean()) / all_features) if all_features > 0 else 1.0
    lowest = LOWEST[stats.operand]
    return lambda u: share * copula.spread_quantile(stats.row_rms, lowest, u)


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
        """Rows (rows, width) float32: the first `width` features."""
        factor, own = self._factor[:width].float(), self._own[:width].float()
        drawn = torch.randn((rows, factor.shape[1]), generator=generator) @ factor.t()
        if bool(own.any()):
            drawn += torch.randn(drawn.shape, generator=generator) * own
        return drawn + self._mean[:width].float()

    def amax(self, rows: int) -> float:
        """Median of the largest |x| in `rows` rows, taking elements as independent."""
        if rows not in self._amax:
            self._amax[rows] = median_amax(self._mean, self._deviation, rows)
        return self._amax[rows]


class _MatrixNormal:
    """W' = mean + L_U Z L_V^T for some rows, or some columns, of a weight (N, K)."""

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
        """Median of the largest |x| of W', from at most ROW_CAP rows, each for as many as it stands for."""
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


def usable(stats: OperandStats | None) -> bool:
    """Whether an activation was seen: at least two rows without a non-finite element."""
    return stats is not None and stats.moments.count > 1


def check_rows(rows: int) -> int:
    """`rows`; raises InputError below 1."""
    if rows < 1:
        raise InputError(f"sampler: rows must be at least 1, not {rows}")
    return rows


def require(sampler: Sampler, gemm: Gemm, site: str) -> None:
    """Raises InputError where the sampler cannot draw this GEMM's operands."""
    if not sampler.can_draw(gemm):
        needed = " and ".join(operand.value for operand in OPERANDS[gemm])
        raise InputError(f"site {site}: {gemm.value} needs {needed}, and one was not seen: probe for more steps")


def at_least(amax: float, drawn: Tensor) -> float:
    """The larger of `amax` and the largest finite |x| of what was drawn."""
    return max(amax, float(drawn.abs().nan_to_num(0.0, 0.0, 0.0).max())) if drawn.numel() else amax


def normal_amax(count: float) -> float:
    """Median of the largest |x| of `count` standard normal numbers."""
    level = torch.tensor(-math.expm1(-math.log(2) / count) / 2, dtype=torch.float64)
    return float(-torch.special.ndtri(level))


def median_amax(mean: Tensor, deviation: Tensor, times: float) -> float:
    """Median of the largest |x| where each normal variable of `mean` and `deviation` is drawn `times` times."""
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


def _amax(stats: OperandStats | None) -> float:
    """The median over calls of the largest |x|."""
    if stats is None:
        return 0.0
    return float(copula.spread_quantile(stats.call_amax, LOWEST[stats.operand], torch.full((1,), 0.5).double()))

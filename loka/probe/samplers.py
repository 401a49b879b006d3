"""Draws operands from the statistics, with a copula (copula.py).

They have the layout in docs/kernels.md ("How an FP8 linear is written"): a is (R, C) and b (S, C), contracted over C.
Only some rows of a and b are drawn, to save time; the contracted dimension C is complete, so that rowwise scales are
realistic. For a weight gradient C is the batch: rows are drawn up to LARGEST_DRAW elements in total.

Rows of one call have something in common, their coherence, which differs between calls and dominates sums over rows:
moments are pooled over calls. Training makes the mean gradient over many steps small, but within one batch the errors
have a common direction, so that the products of input and output gradient add up. JointStats.coherent measures this:
over pairs of rows, the mean of (x.x')(g.g'), which determines the squared norm of a weight gradient. If it was not
counted, calls are assumed to differ only in their rows.
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
from loka.probe import copula
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import LOWEST, JointStats, LowRank, OperandStats, SiteStats

ROW_CAP = 256  # drawn rows of each operand
LARGEST_DRAW = 2**22  # elements of both operands of a weight gradient together: 16384 rows of 256 features


@dataclass(frozen=True, slots=True)
class Drawn:
    """Both operands of one GEMM, K-major float32; possibly only some rows of each.

    `amax_a` and `amax_b` are the largest |x| of the whole operand, for a tensorwise scale; never less than the drawn
    part's. None: the drawn part is the whole operand.
    """

    a: Tensor  # (R, C)
    b: Tensor  # (S, C)
    amax_a: float | None
    amax_b: float | None


class Sampler(Protocol):
    """Draws operands of a site's GEMMs. Built from (stats, rows); `rows` is the M of one call."""

    name: str

    def can_draw(self, gemm: Gemm) -> bool:
        """True if the statistics for the GEMM's operands are there."""

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands of a GEMM that `can_draw`."""


class CopulaSampler:
    """Learned marginals, a Gaussian copula, learned row scales; for the weight, actual rows and columns."""

    name = "copula"

    def __init__(self, stats: SiteStats, rows: int) -> None:
        self._stats, self._rows = stats, rows
        self._sources: dict[Gemm, _Activation] = {}

    def can_draw(self, gemm: Gemm) -> bool:
        """True if both operands were seen, for a weight gradient both in the same call."""
        stats = self._stats
        seen = {
            Operand.INPUT: usable(stats.input),
            Operand.GRAD_OUTPUT: usable(stats.grad_output),
            Operand.WEIGHT: stats.weight is not None,
        }
        joint = gemm is not Gemm.WGRAD or (stats.joint is not None and stats.joint.moments.count > 1)
        return joint and all(seen[operand] for operand in OPERANDS[gemm])

    def draw(self, gemm: Gemm, generator: torch.Generator) -> Drawn:
        """Operands as in copula.py; both operands of a weight gradient are drawn together."""
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
        self._common: Coherence | None = None
        self._scales = [_row_scale(stats, features) for stats, features in parts]

    def lean(self, joint: JointStats, covariance: Tensor) -> None:
        """Give the rows of a draw the coherence that rows of a call have."""
        inputs = self._widths[0]
        self._common = coherence(
            missing(joint, covariance),
            joint.moments.mean.double()[:inputs],
            covariance.diagonal()[:inputs].clamp(min=0.0).sqrt(),
            self._latent.factor[:inputs],
        )

    def independent(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """One matrix (features, rows) for each part, float32: rows independent, marginals and copula, no row scale.

        For sums over rows: in stratified draws the mean of a feature, and thus the sum, would not fluctuate.
        """
        scores = self._latent.draw(rows, generator)
        if self._common is not None:
            scores = self._common.apply(scores, self._widths[0], self._latent.factor, generator)
        scores = scores.double()
        return tuple(torch.split_with_sizes(self._marginals.quantile(torch.special.ndtr(scores)), self._widths))

    def stratified(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The same with stratified marginals and the learned row scales: for products of separate rows."""
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
    """Root mean squares of rows at given levels, for these features only: those of all features, by share of power."""
    moments = stats.moments
    power = moments.mean.square() + moments.diagonal / max(moments.count - 1, 1)
    all_features = float(power.mean())
    share = math.sqrt(float(power[features].mean()) / all_features) if all_features > 0 else 1.0
    lowest = LOWEST[stats.operand]
    return lambda u: share * copula.spread_quantile(stats.row_rms, lowest, u)


def usable(stats: OperandStats | None) -> bool:
    """True if an activation was seen: at least two rows without a non-finite element."""
    return stats is not None and stats.moments.count > 1


def at_least(amax: float, drawn: Tensor) -> float:
    """The larger of `amax` and the largest finite |x| drawn."""
    return max(amax, float(drawn.abs().nan_to_num(0.0, 0.0, 0.0).max())) if drawn.numel() else amax


def _amax(stats: OperandStats | None) -> float:
    """The median over calls of the largest |x|."""
    if stats is None:
        return 0.0
    return float(copula.spread_quantile(stats.call_amax, LOWEST[stats.operand], torch.full((1,), 0.5).double()))


DIRECTIONS = 16  # leading directions of the inputs along which a call may be coherent
MOST = 0.5  # share of the variance of a gradient's normal score that may be common, at most


@dataclass(frozen=True, slots=True)
class Coherence:
    """Dependence of one call's output gradients on its inputs that changes between calls.

    A batch's errors have a common direction, which changes with every step and averages out in moments over many calls;
    within a call it adds up. It is drawn separately for each call: normal scores of the gradient get a part that is a
    random linear function of a constant and of the inputs' leading directions.
    """

    weights: Tensor  # (D + 1,) float32: of the constant and of D directions
    directions: Tensor  # (D, J) float32: from the inputs' scores to those directions, of unit variance

    def apply(self, scores: Tensor, inputs: int, factor: Tensor, generator: torch.Generator) -> Tensor:
        """Scores (J + I, rows), the first `inputs` the inputs', with this call's common part in the gradients."""
        x, grad = scores[:inputs], scores[inputs:]
        leaders = torch.cat((torch.ones_like(x[:1]), self.directions @ x)) * self.weights[:, None]
        lean = factor[inputs:] @ torch.randn((factor.shape[1], self.weights.numel()), generator=generator)
        own = math.sqrt(1.0 - float(self.weights.square().sum()))
        return torch.cat((x, own * grad + lean @ leaders))


def missing(joint: JointStats, covariance: Tensor) -> float:
    """Excess agreement of pairs of rows within a call over the pooled moments, relative to a row with itself.

    `covariance` (J + I, J + I) is that of joint.moments. Zero if nothing was counted.
    """
    if joint.incoherent <= 0.0:
        return 0.0
    inputs = joint.input_features.numel()
    mean = joint.moments.mean.double()
    second = covariance.double() + torch.outer(mean, mean)
    powers = second.diagonal().clamp(min=0.0)
    alone = float(powers[:inputs].sum() * powers[inputs:].sum())
    pooled = float(second[inputs:, :inputs].square().sum()) / alone if alone > 0.0 else 0.0
    return max(joint.coherent / joint.incoherent - pooled, 0.0)


def coherence(extra: float, mean: Tensor, deviation: Tensor, scores: Tensor) -> Coherence | None:
    """The coherence that gives pairs of rows an agreement of `extra`: mean of (x.x')(g.g') over mean of |x|^2 |g|^2.

    `mean` and `deviation` (J,) are the inputs', `scores` (J, R) their factor in the latent. Directions are weighted by
    their share of power. None if there is nothing to add.
    """
    power = float((mean.square() + deviation.square()).sum())
    if extra <= 0.0 or power <= 0.0:
        return None
    vectors, values, _ = torch.linalg.svd(deviation[:, None] * scores.double(), full_matrices=False)
    kept = values > values[0] * 1e-3
    values, vectors = values[kept][:DIRECTIONS], vectors[:, kept][:, :DIRECTIONS]
    shares = torch.cat((mean.square().sum()[None], values.square()))
    squares = extra * power * shares / shares.square().sum()
    squares = squares * min(1.0, MOST / float(squares.sum()))
    directions = (vectors / values).t() * deviation
    return Coherence(squares.sqrt().float(), directions.float())

"""Findings about the model around a GEMM: its bias, the normalisation next to it, the activation before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import torch
from torch import Tensor

from loka.mods.protocols import Concern
from loka.numerics.enums import Operand
from loka.probe.diagnostics.finding_evidence import FindingEvidence, FindingKind
from loka.probe.profile.profile import Finding
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import LowRank, Moments, WeightStats

# The paper's rule for a bias that diverges is a norm of 0.1. A PyTorch linear is initialised with a bias of norm about
# sqrt(N / 3K), often above that, so this rule is about growth: by 0.1, and by half of its initial norm, which separates
# a diverging bias from one that learns a little.
BIAS_GROWTH = 0.1
BIAS_RATIO = 1.5
# Subtracting a mean with this share of the power quarters the signal's power and keeps the rounding noise: one bit
# less.
MEAN_SHARE = 0.75
# Octaves of amax / rms beyond a Gaussian of the same size: 2 of the 8.8 that e4m3 has above 1 go to outliers.
OUTLIER_OCTAVES = 2.0
AMPLIFYING = frozenset(("silu", "gelu", "sigmoid"))  # smooth gates: unbounded or saturating, unlike ReLU6


def bias_diverges(evidence: FindingEvidence) -> Iterator[Finding]:
    """A bias whose norm grows in training, which moves values out of the range of a scale."""
    bias = evidence.bias
    if bias is None or not evidence.gemms:
        return
    if bias.last - bias.first >= BIAS_GROWTH and bias.last >= BIAS_RATIO * bias.first:
        yield evidence.finding(
            FindingKind.BIAS_DIVERGES,
            f"the norm of its bias went from {bias.first:.3g} to {bias.last:.3g} "
            f"(limit: +{BIAS_GROWTH:g} and x{BIAS_RATIO:g})",
            evidence.mod(Concern.BIAS, f"build {evidence.quoted} without its bias"),
        )


def norm_cancels(evidence: FindingEvidence) -> Iterator[Finding]:
    """A LayerNorm subtracts each row's mean: if that is most of the row, the remainder is mostly rounding noise."""
    if not evidence.gemms:
        return
    if evidence.site.followed_by[:1] == ("layer_norm",):
        share = output_mean_share(evidence)
        if share is not None and share >= MEAN_SHARE:
            yield evidence.finding(
                FindingKind.NORM_CANCELS,
                f"the row means of its output, which the layer_norm after it subtracts, hold {100 * share:.1f} % of "
                f"its power (limit: {100 * MEAN_SHARE:g} %)",
                evidence.mod(Concern.NORM_AFTER, f"replace the LayerNorm after {evidence.quoted} by a block RMSNorm"),
            )
    if evidence.site.fed_by[:1] == ("layer_norm",) and evidence.stats.input is not None:
        share = mean_share(evidence.stats.input.moments)
        if share >= MEAN_SHARE:
            yield evidence.finding(
                FindingKind.NORM_CANCELS,
                f"the layer_norm before it gives nearly the same to every row: the features' means hold "
                f"{100 * share:.1f} % of the input's power (limit: {100 * MEAN_SHARE:g} %)",
                evidence.mod(Concern.NORM_BEFORE, f"replace the LayerNorm before {evidence.quoted} by a block RMSNorm"),
            )


def activation_outliers(evidence: FindingEvidence) -> Iterator[Finding]:
    """An activation whose output has larger maxima relative to its RMS than a Gaussian: in a row or in the tensor."""
    seen = evidence.operand(Operand.INPUT)
    activation = evidence.site.fed_by[:1]
    if seen is None or not evidence.gemms or not AMPLIFYING.intersection(activation) or seen.rms <= 0:
        return
    elements = seen.width * max(1, round(seen.rows / max(1, seen.calls)))
    places = [("of a tensor", math.log2(max(seen.usual_amax, seen.rms) / seen.rms), gaussian_spread(elements, 0.5))]
    if seen.row_spread is not None:
        places.append(("within a row (99th percentile)", seen.row_spread.p99, gaussian_spread(seen.width, 0.99)))
    where, octaves, usual = max(places, key=lambda place: place[1] - place[2])
    if octaves - usual > OUTLIER_OCTAVES:
        yield evidence.finding(
            FindingKind.ACTIVATION_OUTLIERS,
            f"after {activation[0]} the maximum {where} is {2**octaves:.0f} times the RMS; "
            f"a Gaussian of that size has {2**usual:.1f} (limit: {OUTLIER_OCTAVES:g} octaves more)",
            evidence.mod(
                Concern.ACTIVATION_BEFORE, f"replace the {activation[0]} before {evidence.quoted} by a hard swish"
            ),
        )


MODEL_RULES = (bias_diverges, norm_cancels, activation_outliers)


def gaussian_spread(count: int, quantile: float) -> float:
    """log2 of the `quantile` of the largest |z| of `count` independent N(0, 1)."""
    tail = -math.expm1(math.log(quantile) / count) / 2
    return math.log2(max(-NormalDist().inv_cdf(tail), 2.0**-20))


def mean_share(moments: Moments) -> float:
    """The share of an operand's power in the means of its features, 0 to 1; 0 if there is no power."""
    if moments.count == 0:
        return 0.0
    mean = float(moments.mean.double().square().sum())
    power = mean + float(moments.diagonal.double().sum()) / moments.count
    return mean / power if power > 0 else 0.0


def output_mean_share(evidence: FindingEvidence) -> float | None:
    """The share of the power of y = x @ weight.T + bias in its row means, 0 to 1.

    y is not recorded: its first two moments follow from those of x and the weight, exactly if the covariance is full
    and all rows of the weight are kept, otherwise from the low-rank covariance and the kept rows. None if the input or
    the weight was not seen, or is not finite.
    """
    seen, weight = evidence.stats.input, evidence.stats.weight
    if seen is None or weight is None or seen.moments.count < 2 or weight.nonfinite:
        return None
    bias = torch.zeros(evidence.site.n, dtype=torch.float64)
    if evidence.bias is not None and evidence.bias.values.numel() == evidence.site.n:
        bias = evidence.bias.values.double()
    rows, shifts = weight.rows.double(), bias[weight.row_index]
    mean, spread = seen.moments.mean.double(), covariance(seen.moments)
    powers = (rows @ mean + shifts).square() + _quadratic(rows, spread)
    average = _average_row(weight)[None]
    of_mean = (average @ mean + bias.mean()).square() + _quadratic(average, spread)
    power = float(powers.mean())
    return min(1.0, float(of_mean) / power) if power > 0 else None


def _average_row(weight: WeightStats) -> Tensor:
    """The mean over all rows of the weight, (K,), from the additive fit."""
    if weight.rows.shape[0] == weight.row_mean.shape[0]:
        return weight.rows.double().mean(0)
    return weight.column_mean.double() + weight.row_mean.double().mean()


def _quadratic(rows: Tensor, spread: Tensor | LowRank) -> Tensor:
    """r C r^T for each of the rows (R, K), with C (K, K): (R,)."""
    if isinstance(spread, LowRank):
        low = (rows @ spread.factor.double()).square().sum(1)
        return low + rows.square() @ spread.diagonal.double()
    return ((rows @ spread.double()) * rows).sum(1)

"""Coherence: what the rows of one call have in common, which differs between calls and dominates sums over rows.

Moments are pooled over calls. Training makes the mean gradient over many steps small, but within one batch the errors
have a common direction, so that the products of input and output gradient add up. JointStats.coherent measures this:
over pairs of rows, the mean of (x.x')(g.g'), which determines the squared norm of a weight gradient. If it was not
counted, calls are assumed to differ only in their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.stats.site_stats import JointStats

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

"""What rows of one call have in common, which differs from call to call: it rules sums over the rows of a call.

Moments are pooled over calls. Training makes the mean gradient over many steps small, but within one batch
the errors lean one way, so that the products of input and output gradient add up. JointStats.coherent
tells how far: over pairs of rows, the mean of (x.x')(g.g'), which is what the squared norm of a weight gradient is made
of. Where it was not counted, calls are taken to differ in nothing but their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.stats.site_stats import JointStats

DIRECTIONS = 16  # leading directions of the inputs that a call may lean along
MOST = 0.5  # of the variance of a gradient's normal score that may be in common


@dataclass(frozen=True, slots=True)
class Coherence:
    """How the output gradients of one call follow its inputs in a way that changes from call to call.

    A batch's errors lean one way, which way changes with every step, and averages out of moments over many calls;
    within a call it adds up. It is drawn anew for each call: normal scores of the gradient get a part that is a random
    linear function of a constant and of the inputs' leading directions.
    """

    weights: Tensor  # (D + 1,) float32: of the constant and of D directions
    directions: Tensor  # (D, J) float32: from the inputs' scores to those directions, of unit variance

    def apply(self, scores: Tensor, inputs: int, factor: Tensor, generator: torch.Generator) -> Tensor:
        """Scores (J + I, rows), the first `inputs` of them the inputs', with the gradients' part of this call."""
        x, grad = scores[:inputs], scores[inputs:]
        leaders = torch.cat((torch.ones_like(x[:1]), self.directions @ x)) * self.weights[:, None]
        lean = factor[inputs:] @ torch.randn((factor.shape[1], self.weights.numel()), generator=generator)
        own = math.sqrt(1.0 - float(self.weights.square().sum()))
        return torch.cat((x, own * grad + lean @ leaders))


def missing(joint: JointStats, covariance: Tensor) -> float:
    """How much more pairs of rows agree within a call than the pooled moments say, relative to a row with itself.

    `covariance` (J + I, J + I) is that of joint.moments. Zero where nothing was counted.
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
    """The coherence that makes pairs of rows agree by `extra`, the mean of (x.x')(g.g') over that of |x|^2 |g|^2.

    `mean` and `deviation` (J,) are the inputs', `scores` (J, R) their factor in the latent. Directions count by their
    share of power. None where there is nothing to add.
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

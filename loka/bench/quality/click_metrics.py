"""Quality of predicted click probabilities: log loss, normalised entropy (NE) and AUC."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka.errors import InputError


def log_loss(logits: Tensor, target: Tensor) -> float:
    """Mean binary cross-entropy in nats of logits (R,) against clicks in {0, 1} (R,), in float64."""
    logits, target = _pair(logits, target)
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, target))


def base_entropy(target: Tensor) -> float:
    """Entropy in nats of the share of clicks: the log loss of predicting that share for every row.

    Raises InputError if all targets are equal: the entropy is 0.
    """
    share = float(target.double().mean())
    if not 0 < share < 1:
        raise InputError(f"normalised entropy needs clicks and non-clicks, but the share of clicks is {share:g}")
    return -share * math.log(share) - (1 - share) * math.log1p(-share)


def normalised_entropy(logits: Tensor, target: Tensor) -> float:
    """Log loss over the entropy of the base rate of the same rows (He et al., ADKDD 2014).

    1 is no better than predicting the base rate, 0 is perfect. Raises InputError for different shapes, for no rows,
    and if all targets are equal.
    """
    return log_loss(logits, target) / base_entropy(target)


def auc(scores: Tensor, target: Tensor) -> float:
    """Probability that a click scores above a non-click; ties count one half. Exact, in O(R log R).

    scores and target (clicks in {0, 1}) are (R,). Raises InputError as `normalised_entropy` does.
    """
    scores, target = _pair(scores, target)
    clicks = int(target.sum())
    others = len(target) - clicks
    if clicks == 0 or others == 0:
        raise InputError(f"AUC needs clicks and non-clicks, but there are {clicks} and {others}")
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)  # sorted: ties share a place
    before = count.cumsum(0) - count
    doubled_rank = 2 * before + count + 1  # of one row among ties, from 1; doubled to stay whole
    doubled_sum = int((doubled_rank[place] * target.long()).sum())
    return (doubled_sum / 2 - clicks * (clicks + 1) / 2) / (clicks * others)


def _pair(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64. Raises InputError unless they are non-empty vectors of one length and the target is 0 or 1."""
    if scores.dim() != 1 or scores.shape != target.shape or len(target) == 0:
        raise InputError(
            "scores and target must be two vectors of one length, at least 1, "
            f"not {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    target = target.double()
    if not bool(((target == 0) | (target == 1)).all()):
        raise InputError("target must hold only 0 (no click) and 1 (click)")
    return scores.double(), target

"""The change of NE by errors of the backward GEMMs, from what they do to the direction in which a model learns.

Rounding noise in gradients averages out over steps, like the noise between batches, and Adam undoes a common factor;
few bits alone do no harm. What harms is an error that is the same in every batch: saturated or lost gradients, by which
parameters learn something else or nothing. So the mean gradients without and with the error are compared,

    misalignment = 1 - <g, g'> / (|g| |g'|),

with products between different batches alone, in which noise has no part. They are weighted by 1 / rms of each
parameter's gradient over batches, so that |g|^2 is the progress of a step of Adam. Of what training has gained, a share
is taken for lost: all of it where the misalignment is 1, and proportionally little where it is small, so that single
GEMMs add up. The share is from trained models (`benchmarks.ne_calibration`), within a factor of about two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loka.probe.profile.profile import Interval
from loka.probe.sensitivity.gemm_errors import GemmErrors, SiteRoundings
from loka.probe.sensitivity.held_out import HeldOut

LOST = 0.15  # share of the gain that a small misalignment loses, for each 1 of it
UNSURE = 2.0  # the upper end of the interval, as a multiple of the mean
LARGEST = 1 << 24  # elements of a Parameter; larger ones, embedding tables, are left out

_Gradients = list[list[Tensor]]  # by Parameter, then by batch


class GradientBias:
    """The mean gradients of a model on held-out batches, against which those with an error are compared."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out = held_out
        candidates = [
            each for each in held_out.live.root.parameters() if each.requires_grad and each.numel() <= LARGEST
        ]
        native = self._gradients(candidates, {})
        used = [place for place, found in enumerate(native) if all(each is not None for each in found)]
        self._parameters = [candidates[place] for place in used]
        self._native: _Gradients = [[each for each in native[place] if each is not None] for place in used]
        self._weights = [_weights(found) for found in self._native]

    def misalignment(self, roundings: Mapping[str, SiteRoundings]) -> float:
        """0 where the error leaves the direction as it is, to 2; inf where a gradient is not finite."""
        found = self._gradients(self._parameters, roundings)
        before = both = after = 0.0
        for native, errors, weights in zip(self._native, found, self._weights, strict=True):
            changed = [torch.zeros_like(native[0]) if each is None else each for each in errors]
            before += _between_batches(native, native, weights)
            both += _between_batches(native, changed, weights)
            after += _between_batches(changed, changed, weights)
        if not math.isfinite(after):
            return math.inf
        if before <= 0:  # no mean gradient stands out of the noise: nothing can be misaligned
            return 0.0
        return 1 - max(-1.0, min(1.0, both / math.sqrt(before * after))) if after > 0 else 1.0

    def _gradients(
        self, parameters: Sequence[Tensor], roundings: Mapping[str, SiteRoundings]
    ) -> list[list[Tensor | None]]:
        given = self._held_out
        rows: list[Sequence[Tensor | None]] = []
        for inputs, target in given.batches:
            with GemmErrors(given.live, roundings):
                loss = given.loss(given.run(inputs), target)
            rows.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        return [[_dense(row[place]) for row in rows] for place in range(len(parameters))]


def change_by_misalignment(misalignment: float, gain_percent: float) -> Interval:
    """The change of NE in per cent; `gain_percent` is by how much training has lowered it so far, relative to now."""
    if not math.isfinite(misalignment):
        return Interval(math.inf, math.inf, math.inf)
    turned = min(1.0, max(0.0, misalignment))
    mean = max(0.0, gain_percent) * turned * max(LOST, turned)
    return Interval(mean, 0.0, UNSURE * mean)


def _dense(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad.to_dense() if grad.is_sparse else grad).detach().float()


def _weights(gradients: Sequence[Tensor]) -> Tensor:
    """1 / rms over batches of each element, 0 where all are zero."""
    rms = torch.stack([each.square() for each in gradients]).mean(0).sqrt()
    return torch.where(rms > 0, 1 / rms.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _between_batches(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor) -> float:
    """The mean over pairs of different batches of the weighted inner product."""
    count = len(a)
    sums = (torch.stack(list(a)).sum(0) * torch.stack(list(b)).sum(0) * weights).double().sum()
    own = torch.stack([(x * y * weights).double().sum() for x, y in zip(a, b, strict=True)]).sum()
    return float(sums - own) / (count * (count - 1))

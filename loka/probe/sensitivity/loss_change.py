"""The change of a loss by an error of the model's output, in parts that training does and does not remove.

An output z with an error dz changes the loss L by an even and an odd part:

- even, (L(z + dz) + L(z - dz)) / 2 - L(z): what the error costs whatever its sign, for a log loss about the mean of
  p (1 - p) dz^2 / 2. It needs no Hessian, and holds for errors that are not small;
- odd, (L(z + dz) - L(z - dz)) / 2: the error times what the model still predicts wrong. Its sign is another one in each
  training, so that it is no loss on average, but part of what one run differs by from another.

The mean of dz over samples, which comes from the rounding of the weights, is learned by a bias as long as the rounding
stays the same. Averaged weights round in another way than those that trained: then it costs its even part too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> scalar


@dataclass(frozen=True, slots=True)
class LossChange:
    """The parts of a change of the loss on one batch, in per cent of the loss."""

    varying: float  # even, by the error without its mean over samples
    even: float  # by the whole error
    odd: float  # by the whole error


@torch.no_grad()
def loss_change(loss: Loss, output: Tensor, with_error: Tensor, target: Tensor) -> LossChange:
    """The change of `loss` from `output` to `with_error`, both (samples, ...), as they came out of the model."""
    z = output.float()
    error = with_error.float() - z
    before = float(loss(output, target))

    def parts(error: Tensor) -> tuple[float, float]:
        up, down = (float(loss(each.to(output.dtype), target)) for each in (z + error, z - error))
        return 100 * ((up + down) / 2 - before) / before, 100 * (up - down) / 2 / before

    varying, _ = parts(error - error.mean(0, keepdim=True))
    return LossChange(varying, *parts(error))

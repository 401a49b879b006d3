"""The change of a loss by an error of the model's output, in parts that training does and does not remove.

An output z with an error dz, its mean over samples removed (a bias learns it), changes the loss L in two parts:

- even, (L(z + dz) + L(z - dz)) / 2 - L(z): what the error costs whatever its sign, for a log loss about the mean of
  p (1 - p) dz^2 / 2. It needs no Hessian, and holds for errors that are not small;
- odd, (L(z + dz) - L(z - dz)) / 2: the error times what the model still predicts wrong. Its sign is another one in each
  training, so that it is no loss on average, but part of what one run differs by from another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> scalar


@dataclass(frozen=True, slots=True)
class LossChange:
    """Both parts of a change of the loss on one batch, in per cent of the loss."""

    even: float
    odd: float


@torch.no_grad()
def loss_change(loss: Loss, output: Tensor, with_error: Tensor, target: Tensor) -> LossChange:
    """The change of `loss` from `output` to `with_error`, both (samples, ...), as they came out of the model."""
    z = output.float()
    error = with_error.float() - z
    error -= error.mean(0, keepdim=True)
    before, up, down = (float(loss(each.to(output.dtype), target)) for each in (z, z + error, z - error))
    return LossChange(100 * ((up + down) / 2 - before) / before, 100 * (up - down) / 2 / before)

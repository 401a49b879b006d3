"""Exponential moving average of a model's weights, which damps the noise at the end of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """After step t: average += (1 - decay) / (1 - decay^t) * (weight - average).

    This is the exponentially weighted mean of the weights after steps 1 to t, without the random initial weights.
    Decay 0 gives the weights themselves.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._average = [weight.detach().clone() for weight in self._weights]
        self._decay, self._step = decay, 0

    def copy_for(self, model: nn.Module) -> WeightAverage:
        """A copy of the average after its steps so far, which goes on with the weights of `model`, of the same kind."""
        copied = WeightAverage(model, self._decay)
        copied._average = [average.clone() for average in self._average]
        copied._step = self._step
        return copied

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of one more step to the average."""
        self._step += 1
        share = (1 - self._decay) / (1 - self._decay**self._step)
        torch._foreach_lerp_(self._average, self._weights, share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model holds the averaged weights; its own are restored after."""
        own = [weight.detach().clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)

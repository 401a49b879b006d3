"""State of a run beside its weights: their average, and where the other run of a pair goes on from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class SharedStart:
    """State of a run after `len(losses)` steps, from which the other run of a pair goes on. Tensors are copies.

    Weights drawn at random sit on a plateau, and roundings to FP8 decide by a few steps when a run leaves it: at the
    end NE differs by what the model learns in these steps, which can be far more than what FP8 costs.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    average: WeightAverage
    random: tuple[Tensor, tuple[Tensor, ...]]  # of the CPU and of each GPU
    losses: tuple[float, ...]
    samples: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage,
        losses: list[float],
        samples: int,
    ) -> SharedStart:
        """The state that a run is in now."""
        return cls(
            model=copy.deepcopy(dict(model.state_dict())),
            optimizer=copy.deepcopy(optimizer.state_dict()),
            average=average.copy_for(model),
            random=(torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all())),
            losses=tuple(losses),
            samples=samples,
        )

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> WeightAverage:
        """Set weights, optimiser and random numbers; gives the average, which goes on with the model's weights."""
        model.load_state_dict(self.model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        cpu, gpus = self.random
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus)
        return self.average.copy_for(model)

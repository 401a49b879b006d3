"""A run after its first steps, so that the other run of a pair goes on from there instead of from the first weights.

Weights drawn at random sit on a plateau, and roundings to FP8 decide by a few steps when a run leaves it: at the end
NE differs by what the model learns in these steps, which can be far more than what FP8 costs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.ema import WeightAverage


@dataclass(frozen=True, slots=True)
class SharedStart:
    """State of a run after `len(losses)` steps. Tensors are copies."""

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

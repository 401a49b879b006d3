"""Description of a training run in callables and numbers, so that measuring needs no policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.errors import InputError

Inputs = Any  # inputs of one call of the model: a tuple, a dict of keywords, or one Tensor
Batches = Callable[[int, int], Iterable[tuple[Inputs, Tensor]]]  # (batch_size, seed) -> (inputs, target) ...
Progress = Callable[[int, int | None], None]  # (samples done, samples in all or None if unknown)

OPTIMIZERS = ("adam", "adagrad", "sgd")
LARGEST_RATE = 1e30  # optimizers work in float32


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training job. Raises InputError for a number out of range or an unknown optimiser."""

    factory: Callable[[], nn.Module]
    batches: Batches
    test_batches: Batches  # must share no row with `batches`
    loss: Callable[[Tensor, Tensor], Tensor]  # (output, target) -> scalar
    batch_size: int
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    ema: float = 0.99  # decay per step of the averaged weights that are evaluated; 0 evaluates the last weights
    warmup: int = 50  # steps over which the learning rate rises to its value; without it training stalls at first
    steps: int | None = None  # None: one pass over the batches
    shared_steps: int = 0  # the first steps of a pair, unpatched: both runs go on from where they end
    test_batch_size: int = 4096
    device: str = "cpu"
    autocast: bool = False  # forward, loss and evaluation under torch.autocast to bfloat16

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer is {self.optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}")
        if not 0 < self.learning_rate <= LARGEST_RATE:
            raise InputError(f"learning_rate must be positive and at most {LARGEST_RATE:g}, not {self.learning_rate}")
        if not 0 <= self.ema < 1:
            raise InputError(f"ema must be at least 0 and below 1, not {self.ema}")
        for name, value in (("batch_size", self.batch_size), ("test_batch_size", self.test_batch_size)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if self.warmup < 0:
            raise InputError(f"warmup must be at least 0 steps, not {self.warmup}")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps must be at least 1, not {self.steps}")
        if self.shared_steps < 0:
            raise InputError(f"shared_steps must be at least 0, not {self.shared_steps}")
        if self.steps is not None and self.steps <= self.shared_steps:
            raise InputError(
                f"there are {self.steps} steps, and both runs share the first {self.shared_steps} (shared_steps), so "
                "that nothing is left to compare: train for more steps"
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        return self.learning_rate * min(1.0, step / (self.warmup + 1))

    def precision(self) -> AbstractContextManager[object]:
        """Context of forward, loss and evaluation: autocast or none."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16) if self.autocast else nullcontext()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Optimiser of the trainable parameters. Raises InputError if there are none."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise InputError("the model has no parameter that trains")
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.learning_rate, foreach=True)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=self.learning_rate, foreach=True)
        return torch.optim.SGD(parameters, lr=self.learning_rate, foreach=True)

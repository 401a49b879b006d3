"""Held-out batches of a live model, with which its errors are judged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.probe.capture.live_sites import LiveModel
from loka.probe.sensitivity.loss_change import Loss

Batch = tuple[Any, Tensor]  # inputs and target


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out batches of a live model, how to call it, and its loss."""

    live: LiveModel
    batches: Sequence[Batch]  # at least two
    run: Callable[[Any], Tensor]  # inputs -> output (samples, ...)
    loss: Loss

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The loss as the model is now, in evaluation mode: the mean over batches."""
        with evaluating(self.live.root):
            losses = [float(self.loss(self.run(inputs), target)) for inputs, target in self.batches]
        return math.fsum(losses) / len(losses)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode in Python: compiled parts of the model run eagerly, so that a mode sees them."""
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        model.train(was_training)

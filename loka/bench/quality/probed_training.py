"""Training loop of `loka probe`: the job's own steps, some of them watched by a Probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from loka.bench.quality.training import CHECK_EVERY, NonFiniteLossError, seeded
from loka.bench.quality.training_calls import (
    BATCHES,
    LOSS,
    TrainingCallError,
    backward,
    called,
    forward,
    movable,
    pairs,
    scalar,
)
from loka.bench.quality.training_job import Inputs, TrainingJob


class Stepped(Protocol):
    """Receiver of a call after each optimizer step."""

    def step(self) -> None:
        """Called after a step."""


@dataclass(slots=True)
class Steps:
    """Number of steps done, counted by the loop, so that it survives an interrupt."""

    done: int = 0


def train_watched(
    model: nn.Module,
    job: TrainingJob,
    batches: Iterable[tuple[Inputs, Tensor]],
    seed: int,
    probe: Stepped,
    steps: Steps,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Train `model`, which is on the job's device, in place on at most `job.steps` batches.

    `seed` sets the random numbers (dropout). Raises NonFiniteLossError at most CHECK_EVERY steps late, and InputError
    if there are no batches.
    """
    optimizer = job.make_optimizer(model)
    unread: list[Tensor] = []
    model.train()
    with seeded(seed, job.device):
        for inputs, target in islice(pairs(BATCHES, batches), job.steps):
            for group in optimizer.param_groups:
                group["lr"] = job.rate(steps.done + 1)
            optimizer.zero_grad(set_to_none=True)
            with job.precision():
                output = forward(BATCHES, model, inputs, job.device)
                loss = scalar(called(LOSS, job.loss, output, movable(target).to(job.device)))
            backward(loss)
            optimizer.step()
            probe.step()
            steps.done += 1
            unread.append(loss.detach())
            if len(unread) == CHECK_EVERY:
                _check(unread, steps.done)
            if progress is not None:
                progress(steps.done)
    _check(unread, steps.done)
    if not steps.done:
        raise TrainingCallError(BATCHES, "the training batches are empty")


def length(batches: Any) -> int | None:
    """Number of batches; None if they have no length."""
    try:
        return len(batches)
    except TypeError:
        return None


def _check(unread: list[Tensor], done: int) -> None:
    """Raise NonFiniteLossError at the first unread loss that is not finite; clear the list."""
    if not unread:
        return
    values = torch.stack(unread).float().cpu()
    bad = (~values.isfinite()).nonzero()
    if bad.numel():
        first = int(bad[0])
        raise NonFiniteLossError(done - len(unread) + first + 1, float(values[first]))
    unread.clear()

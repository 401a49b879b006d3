"""One batch of a policy's model, with the loss and the optimiser of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.bench.quality.policy_job import job_of
from loka.bench.quality.training_calls import BATCHES, LOSS, TrainingCallError, called, movable, pairs, scalar
from loka.bench.speed.steps import SEED
from loka.bench.speed.user_step import Example, tensors_of
from loka.errors import InputError
from loka.policy.policy import Policy
from loka.sites.build_model import BuiltModel
from loka.sites.callables import current_directory_importable

SYNTHETIC_RATE = 1e-4  # learning rate for a loss that means nothing

StepLoss = Callable[[Any], Tensor]  # outputs of the model -> scalar


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step reads. `loss` is the policy's, of the target that came with the example, or synthetic."""

    example: Example
    samples: int
    target: Tensor | None = None
    policy_loss: Callable[[Any, Tensor], Tensor] | None = None  # None: synthetic
    optimizer: str = "adam"
    learning_rate: float = SYNTHETIC_RATE

    @property
    def words(self) -> str:
        """The loss and the optimiser in words."""
        loss = "a synthetic loss" if self.policy_loss is None else "the policy's loss"
        return f"{loss}, {self.optimizer}"

    def loss_on(self, device: str) -> StepLoss:
        """The loss of outputs on a device. Raises the errors of training for a loss that is no scalar."""
        policy_loss = self.policy_loss
        if policy_loss is None or self.target is None:
            return synthetic_loss
        target = self.target.to(device)
        return lambda outputs: scalar(called(LOSS, policy_loss, outputs, target))


def synthetic_loss(outputs: Any) -> Tensor:
    """The sum of the mean squares of all outputs that depend on a parameter, in float32.

    Raises InputError if there are none.
    """
    found = [value.float().square().mean() for value in tensors_of(outputs) if value.requires_grad]
    if not found:
        raise InputError("no output of the model depends on its parameters; there is no training step to measure")
    return torch.stack(found).sum()


def sample_of(policy: Policy, built: BuiltModel, training: bool) -> StepSample:
    """The batch to measure: in training the first of the policy's `train` section, otherwise the model's own inputs.

    Raises InputError if a function of `train` cannot be used, or its first batch is smaller than the batch size.
    """
    batch = policy.model.batch_size
    if not training or policy.train is None:
        return StepSample(Example(built.args, built.kwargs), batch)
    job = job_of(policy, 1, "cpu", tested=False)
    with current_directory_importable():
        found = next(iter(pairs(BATCHES, called(BATCHES, job.batches, batch, SEED))), None)
    if found is None:
        raise TrainingCallError(BATCHES, "the training batches are empty")
    inputs, target = found[0], movable(found[1])
    if isinstance(target, Tensor) and target.dim() and target.shape[0] != batch:
        raise TrainingCallError(
            BATCHES, f"a batch of {batch} has {target.shape[0]} rows; measure at that size: --batch {target.shape[0]}"
        )
    return StepSample(_example(inputs), batch, target, job.loss, job.optimizer, job.learning_rate)


def _example(inputs: Any) -> Example:
    """The inputs of a training batch: positional arguments, keywords, or one tensor."""
    if isinstance(inputs, dict):
        return Example((), inputs)
    return Example(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})

"""A training job for a policy without batches and loss: example inputs, and labels drawn at random.

What it shows of weights and activations is true of the model as it is built. Gradients have the form that a click loss
gives them at the start of training, sigmoid(logit) - label, and the size of an average over the batch; what a trained
model's gradients look like, it cannot show. So a profile of it is marked, and plans say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loka.bench.model.whole_step import tensors_of
from loka.bench.quality.training_job import Inputs, TrainingJob
from loka.errors import InputError
from loka.plan.examine import Examined, inputs_of
from loka.sites.callables import find_callable
from loka.sites.example_inputs import ExampleInputs

BATCH = 1024  # samples in a step, at most: more show no more of a distribution, and take longer
RATE = 1e-4  # small: there is nothing to learn


def synthetic_job(examined: Examined, steps: int | None, device: str) -> TrainingJob:
    """A job of the policy's model on its example inputs; `steps` None: as long as a probe wants.

    Raises InputError where the factory or the inputs cannot be found.
    """
    policy, inputs = examined.policy, inputs_of(examined.policy, examined.built)

    def batches(batch_size: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        return _batches(inputs, batch_size, seed)

    return TrainingJob(
        factory=cast("Callable[[], nn.Module]", find_callable(policy.model.factory, "model.factory")[0]),
        batches=batches,
        test_batches=batches,
        loss=random_label_loss,
        batch_size=min(policy.model.batch_size, BATCH),
        learning_rate=RATE,
        steps=steps,
        device=device,
    )


def random_label_loss(output: Any, seed: Tensor) -> Tensor:
    """Binary cross-entropy of every element of every floating-point tensor in `output`, each as a logit, with labels of
    0 and 1 drawn by `seed`: a scalar of float32. Raises InputError where there is no such tensor.
    """
    logits = [each for each in tensors_of(output) if each.is_floating_point() and each.requires_grad]
    if not logits:
        raise InputError("the model's output has no floating-point tensor with a gradient: there is nothing to train")
    generator = torch.Generator().manual_seed(int(seed))
    losses = []
    for each in logits:
        labels = torch.randint(2, each.shape, generator=generator).to(each.device, torch.float32)
        losses.append(binary_cross_entropy_with_logits(each.float(), labels))
    return torch.stack(losses).mean()


def _batches(inputs: ExampleInputs, batch_size: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Example inputs, drawn anew for each batch, each with the seed of its labels."""
    number = seed << 32
    while True:
        args, kwargs = inputs(batch_size, number)
        yield kwargs or args, torch.tensor(number)
        number += 1

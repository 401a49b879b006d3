"""What is trained: a job in callables and numbers, of a policy, with its mods, or on example inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loka.bench.quality.heads import Head
from loka.bench.quality.training_calls import Inputs
from loka.errors import Code, InputError
from loka.model.callables import current_directory_importable, find_callable
from loka.model.inputs import tensors_in
from loka.mods.adapt import adapt
from loka.mods.adaptation import Adaptation
from loka.numerics.enums import Autocast
from loka.plan.examine import Examined, inputs_of
from loka.policy.policy import Policy

Batches = Callable[[int, int], Iterable[tuple[Inputs, Any]]]  # (batch_size, seed) -> (inputs, target) ...
Progress = Callable[[int, int | None], None]  # (samples done, samples in all or None if unknown)

SYNTHETIC_BATCH = 1024  # samples in a step, at most: more show no more of a distribution, and take longer
SYNTHETIC_RATE = 1e-4  # small: there is nothing to learn

DEFAULT_LEARNING_RATE = 1e-3  # of a policy


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training job. Raises InputError where the shared steps leave nothing to train."""

    factory: Callable[[], nn.Module]
    batches: Batches
    test_batches: Batches  # must share no row with `batches`
    loss: Callable[[Any, Any], Tensor]  # (output, target) -> scalar
    batch_size: int
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    ema: float = 0.99  # decay per step of the averaged weights that are evaluated; 0 evaluates the last weights
    warmup: int = 50  # steps over which the learning rate rises to its value; without it training stalls at first
    steps: int | None = None  # None: one pass over the batches
    shared_steps: int = 0  # the first steps of a pair, unpatched: both runs go on from where they end
    test_batch_size: int = 4096
    heads: tuple[Head, ...] = ()  # of the output and the target that are judged; none: both are one Tensor
    device: str = "cpu"
    autocast: bool = False  # forward, loss and evaluation under torch.autocast to bfloat16

    def __post_init__(self) -> None:
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


def job_of(policy: Policy, steps: int | None, device: str, tested: bool = True) -> TrainingJob:
    """The policy's job on `device`; `steps` None: as in the policy. Without `tested`, train.test may be missing.

    Raises InputError, with the place in the policy, if it has no train section or a callable cannot be found.
    """
    spec = policy.train
    if spec is None:
        held_out, instead = ', test: "package.module:name"', ""
        if not tested:
            held_out = ""
            instead = (
                ", or record a training loop of your own with loka.Probe (docs/probe.md), or, as weaker evidence, the "
                "model's example inputs: loka probe --synthetic"
            )
        raise InputError(
            f"{policy.where('')}: the policy has no train section; add "
            f'train: {{batches: "package.module:name", loss: "package.module:name"{held_out}}}, functions of '
            f"(batch_size, seed) and of (output, target){instead}",
            Code.MISSING,
        )
    if spec.test is None and tested:
        raise InputError(
            f"{policy.where('train')}: train.test is missing; name a function like batches, for rows that training "
            "does not see",
            Code.MISSING,
        )
    with current_directory_importable():
        factory = _find(policy, policy.model.factory, "model.factory")
        batches = _find(policy, spec.batches, "train.batches")
        loss = _find(policy, spec.loss, "train.loss")
        test = _find(policy, spec.test, "train.test") if tested and spec.test is not None else batches
    try:
        return TrainingJob(
            factory=factory,
            batches=batches,
            test_batches=test,
            loss=loss,
            batch_size=spec.batch_size or policy.model.batch_size,
            optimizer=spec.optimizer or "adam",
            learning_rate=spec.learning_rate or DEFAULT_LEARNING_RATE,
            ema=spec.ema or 0.0,
            autocast=spec.autocast is Autocast.BFLOAT16,
            heads=tuple(spec.heads or ()),
            steps=steps if steps is not None else spec.steps,
            shared_steps=(spec.shared_steps or 0) if tested else 0,  # of a pair; without test rows none is trained
            device=device,
        )
    except InputError as error:  # numbers that are fine alone, and not together
        raise InputError(f"{policy.where('train')}: {error}") from error


def _find(policy: Policy, spec: str, field: str) -> Callable[..., Any]:
    try:
        return cast("Callable[..., Any]", find_callable(spec, field)[0])
    except InputError as error:
        raise InputError(f"{policy.where(field)}: {error}") from error


def adapted_job(job: TrainingJob, adaptations: Sequence[Adaptation]) -> TrainingJob:
    """The job with a factory that also adapts the model; weights the mods keep equal those of the seed without mods."""
    if not adaptations:
        return job

    def factory() -> nn.Module:
        model = job.factory()
        adapt(model, adaptations)
        return model

    return replace(job, factory=factory)


def synthetic_job(examined: Examined, steps: int | None, device: str) -> TrainingJob:
    """A job of the policy's model on its example inputs, with labels drawn at random; `steps` None: as a probe wants.

    What it shows of weights and activations is true of the model as it is built. Gradients have the form that a click
    loss gives them at the start of training, sigmoid(logit) - label, and the size of an average over the batch; what a
    trained model's gradients look like, it cannot show. So a profile of it is marked, and plans say so.

    Raises InputError where the factory or the inputs cannot be found.
    """
    policy, inputs = examined.policy, inputs_of(examined.policy, examined.built)

    def batches(batch_size: int, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Example inputs, drawn anew for each batch, each with the seed of its labels."""
        for number in count(seed << 32):
            args, kwargs = inputs(batch_size, number)
            yield kwargs or args, torch.tensor(number)

    return TrainingJob(
        factory=cast("Callable[[], nn.Module]", find_callable(policy.model.factory, "model.factory")[0]),
        batches=batches,
        test_batches=batches,
        loss=random_label_loss,
        batch_size=min(policy.model.batch_size, SYNTHETIC_BATCH),
        learning_rate=SYNTHETIC_RATE,
        steps=steps,
        device=device,
    )


def random_label_loss(output: Any, seed: Tensor) -> Tensor:
    """Binary cross-entropy of every element of every floating-point tensor in `output`, each as a logit, with labels of
    0 and 1 drawn by `seed`: a scalar of float32. Raises InputError where there is no such tensor.
    """
    logits = [each for each in tensors_in(output) if each.is_floating_point() and each.requires_grad]
    if not logits:
        raise InputError(
            "the model's output has no floating-point tensor with a gradient: there is nothing to train", Code.MODEL
        )
    generator = torch.Generator().manual_seed(int(seed))
    losses = []
    for each in logits:
        labels = torch.randint(2, each.shape, generator=generator).to(each.device, torch.float32)
        losses.append(binary_cross_entropy_with_logits(each.float(), labels))
    return torch.stack(losses).mean()

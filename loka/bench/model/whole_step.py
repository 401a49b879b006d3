"""A step as a training or serving loop runs it: one batch, forward, loss, backward, optimiser; or the forward alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.training_calls import (
    BATCHES,
    LOSS,
    TrainingCallError,
    called,
    movable,
    pairs,
    samples_in,
    scalar,
)
from loka.bench.quality.training_job import job_of
from loka.bench.timing import SEED
from loka.dispatch import Patch
from loka.dispatch.bind.bind_warnings import fp8_not_expected
from loka.errors import InputError
from loka.model.build_model import BuiltModel
from loka.model.callables import call, current_directory_importable, find_callable
from loka.model.inputs import arguments, mapped, rebuild, tensors_in, to_device
from loka.policy.policy import Policy

SYNTHETIC_RATE = 1e-4  # learning rate for a loss that means nothing

StepLoss = Callable[[Any], Tensor]  # outputs of the model -> scalar


@dataclass(frozen=True, slots=True)
class Example:
    """The inputs of one call of a model, on its device."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self, device: str, dtype: torch.dtype, training: bool) -> Example:
        """A copy on `device`: floating-point tensors in `dtype`, requiring gradients as before if `training`.

        Other values move if they have a method `to`, as jagged tensors do.
        """

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value.to(device) if hasattr(value, "to") else rebuild(value, moved)
            if not value.is_floating_point():
                return value.detach().to(device)
            made = value.detach().to(device, dtype, copy=True)
            return made.requires_grad_(training and value.requires_grad)

        return Example(moved(self.args), moved(self.kwargs))

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [value for value in tensors_in((self.args, self.kwargs)) if value.requires_grad]


def real_model(policy: Policy, device: str) -> nn.Module:
    """The policy's model with weights of a fixed seed. Raises the InputErrors of building it for a plan."""
    with current_directory_importable():
        factory = find_callable(policy.model.factory, "model.factory")[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = call(factory, (), policy.model.factory, "model.factory")
    if not isinstance(model, nn.Module):
        raise InputError(f"model.factory: {policy.model.factory}() returned no nn.Module; return the model from it")
    return model.to(device)


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step reads. `loss` is the policy's, of the target that came with the example, or synthetic."""

    example: Example
    samples: int
    target: Any = None
    policy_loss: Callable[[Any, Any], Tensor] | None = None  # None: synthetic
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
        if policy_loss is None:
            return synthetic_loss
        target = to_device(self.target, device)
        return lambda outputs: scalar(called(LOSS, policy_loss, outputs, target))


def synthetic_loss(outputs: Any) -> Tensor:
    """The sum of the mean squares of all outputs that depend on a parameter, in float32.

    Raises InputError if there are none.
    """
    found = [value.float().square().mean() for value in tensors_in(outputs) if value.requires_grad]
    if not found:
        raise InputError("no output of the model depends on its parameters; there is no training step to measure")
    return torch.stack(found).sum()


def sample_of(policy: Policy, built: BuiltModel, training: bool, seed: int = SEED) -> StepSample:
    """The batch to measure: in training the first of the policy's `train` section, otherwise the model's own inputs.

    `seed`: of the batches.

    Raises InputError if a function of `train` cannot be used, or its first batch is smaller than the batch size.
    """
    batch = policy.model.batch_size
    if not training or policy.train is None:
        return StepSample(Example(built.args, built.kwargs), batch)
    job = job_of(policy, 1, "cpu", tested=False)
    with current_directory_importable():
        found = next(iter(pairs(BATCHES, called(BATCHES, job.batches, batch, seed))), None)
    if found is None:
        raise TrainingCallError(BATCHES, "the training batches are empty")
    inputs, target = found[0], movable(found[1])
    rows = samples_in(target)
    if rows is not None and rows != batch:
        raise TrainingCallError(BATCHES, f"a batch of {batch} has {rows} rows; measure at that size: --batch {rows}")
    example = Example(*arguments(built.module, inputs))
    return StepSample(example, batch, target, job.loss, job.optimizer, job.learning_rate)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step runs. `marks`: it tells torch.compile's CUDA graphs where it begins."""

    training: bool
    dtype: torch.dtype  # of the inputs
    autocast: bool  # to bfloat16
    marks: bool
    device: str  # cuda or cpu


class WholeStep:
    """One step of a model that runs as `called`; `owner` has its parameters, `patch` is its package's.

    A call only enqueues the step; it returns the loss in training, otherwise the outputs. The first call makes the
    optimisers, once it is known which gradients are sparse.
    """

    def __init__(
        self,
        called: Callable[..., Any],
        owner: nn.Module,
        sample: StepSample,
        settings: StepSettings,
        patch: Patch | None = None,
    ) -> None:
        self._called = called
        self._owner = owner
        self._sample = sample
        self._settings = settings
        self._patch = patch
        self._example = sample.example.fresh(settings.device, settings.dtype, settings.training)
        self._leaves = self._example.leaves
        self._loss = sample.loss_on(settings.device)
        self._optimizers: tuple[torch.optim.Optimizer, ...] | None = None

    def __call__(self) -> list[Tensor]:
        if self._settings.marks:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return [self._train()] if self._settings.training else self._infer()

    def verify(self) -> None:
        """Raise VerifyError unless every FP8 GEMM that is planned by its patch ran."""
        if self._patch is not None:
            with fp8_not_expected():
                self._patch.verify(backward=self._settings.training)

    @torch.no_grad()
    def _infer(self) -> list[Tensor]:
        with self._casting():
            return tensors_in(self._called(*self._example.args, **self._example.kwargs))

    def _train(self) -> Tensor:
        for optimizer in self._optimizers or ():
            optimizer.zero_grad(set_to_none=True)
        for leaf in self._leaves:
            leaf.grad = None
        with self._casting():
            outputs = self._called(*self._example.args, **self._example.kwargs)
            loss = self._loss(outputs if self._settings.autocast else in_float32(outputs))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizers is None:
            self._optimizers = optimizers_of(self._owner, self._sample, self._settings.device)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()

    def _casting(self) -> AbstractContextManager[object]:
        if not self._settings.autocast:
            return nullcontext()
        return torch.autocast(self._settings.device, torch.bfloat16)


def optimizers_of(owner: nn.Module, sample: StepSample, device: str) -> tuple[torch.optim.Optimizer, ...]:
    """The optimisers of a model that has its first gradients: the sample's, and SGD for what has sparse ones.

    Adam and SGD are fused; on a GPU Adam can be captured into a graph.
    """
    trained = [value for value in owner.parameters() if value.requires_grad]
    sparse = [value for value in trained if value.grad is not None and value.grad.is_sparse]
    dense = [value for value in trained if value.grad is None or not value.grad.is_sparse]
    made: list[torch.optim.Optimizer] = []
    if dense:
        made.append(_dense_optimizer(dense, sample, device))
    if sparse:
        made.append(torch.optim.SGD(sparse, lr=sample.learning_rate))
    return tuple(made)


def _dense_optimizer(parameters: Iterable[nn.Parameter], sample: StepSample, device: str) -> torch.optim.Optimizer:
    if sample.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=sample.learning_rate, fused=True, capturable=device == "cuda")
    if sample.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=sample.learning_rate, foreach=True)
    return torch.optim.SGD(parameters, lr=sample.learning_rate, fused=True)


def in_float32(outputs: Any) -> Any:
    """Nested outputs with floating-point tensors in float32, as losses want them of a model in bfloat16."""
    return mapped(outputs, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)

"""A step as a training or serving loop runs it: forward, loss, backward, optimiser; or the forward alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.model.step_sample import StepSample
from loka.bench.speed.user_step import tensors_of


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step runs. `marks`: it tells torch.compile's CUDA graphs where it begins."""

    training: bool
    dtype: torch.dtype  # of the inputs
    autocast: bool  # to bfloat16
    marks: bool
    device: str  # cuda or cpu


class WholeStep:
    """One step of a model that runs as `called`; `owner` has its parameters. A call only enqueues the step.

    The first call makes the optimisers, once it is known which gradients are sparse. A call returns the loss in
    training, otherwise the outputs.
    """

    def __init__(
        self, called: Callable[..., Any], owner: nn.Module, sample: StepSample, settings: StepSettings
    ) -> None:
        self._called = called
        self._owner = owner
        self._sample = sample
        self._settings = settings
        self._example = sample.example.fresh(settings.device, settings.dtype, settings.training)
        self._leaves = self._example.leaves
        self._loss = sample.loss_on(settings.device)
        self._optimizers: tuple[torch.optim.Optimizer, ...] | None = None

    def __call__(self) -> list[Tensor]:
        if self._settings.marks:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return [self._train()] if self._settings.training else self._infer()

    @torch.no_grad()
    def _infer(self) -> list[Tensor]:
        with self._casting():
            return tensors_of(self._called(*self._example.args, **self._example.kwargs))

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
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, Mapping):
        return {name: in_float32(value) for name, value in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(in_float32(value) for value in outputs)
    return outputs

"""One step of a user's model with any inputs and outputs: a general form of `steps`.

Training is the forward and the gradients of all parameters and of the inputs that require one, for a random gradient of
every output; inference is the forward without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.speed.steps import SEED, Step, output_gradient
from loka.errors import InputError
from loka.policy.policy import Policy
from loka.sites.callables import call, current_directory_importable, find_callable


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
                return value.to(device) if hasattr(value, "to") else value
            if not value.is_floating_point():
                return value.detach().to(device)
            made = value.detach().to(device, dtype, copy=True)
            return made.requires_grad_(training and value.requires_grad)

        return Example(_mapped(self.args, moved), _mapped(self.kwargs, moved))

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [value for value in tensors_of((self.args, self.kwargs)) if value.requires_grad]


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


def user_step(called: Callable[..., object], example: Example, training: bool, owner: nn.Module) -> Step:
    """The step of a model that runs as `called`; `owner` has its parameters.

    Training returns the outputs, then the gradients of tensors that some output depends on; inference returns the
    outputs. Raises InputError in training if no output requires a gradient.
    """

    def outputs() -> list[Tensor]:
        return tensors_of(called(*example.args, **example.kwargs))

    if not training:

        @torch.no_grad()
        def inference() -> Sequence[Tensor]:
            return outputs()

        return inference
    leaves = [*example.leaves, *(value for value in owner.parameters() if value.requires_grad)]
    grads = [output_gradient(value) for value in outputs() if value.requires_grad]
    if not grads:
        raise InputError("no output of the model depends on its parameters; there is no training step to measure")

    def training_step() -> Sequence[Tensor]:
        made = outputs()
        differentiable = [value for value in made if value.requires_grad]
        found = torch.autograd.grad(differentiable, leaves, grads, allow_unused=True)
        return [*(value.detach() for value in made), *(value for value in found if value is not None)]

    return training_step


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in tensors_of(item)]
    if isinstance(value, tuple | list):
        return [found for item in value for found in tensors_of(item)]
    return []


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_mapped(item, function) for item in value)
    return function(value)

"""What the integrations share: apply, verify and a guard, each at its moment of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from loka.dispatch.guard.guard import Guard
from loka.dispatch.patch import Patch
from loka.errors import InputError


class BoundTraining:
    """Binds the model before a trainer wraps it, verifies the first step, and runs a guard if asked.

    Args:
        apply: `apply` of the generated package, or another function of the model that returns a Patch.
        model: Dotted name of the planned model inside of the module that the trainer is given; "" if it is that itself.
        guard: Arguments of `loka.Guard` other than the model and the patch, as {"loss": loss, "every": 1000}; None: no
            guard. Its `loss` is called with the planned model.

    Attributes:
        patch: What `apply` returned; None before. The model stays bound after the training: `patch.remove()`.
        guard: The guard of the training that runs or ran last; None before, and without one.
    """

    def __init__(
        self, apply: Callable[[nn.Module], Patch], model: str = "", guard: Mapping[str, Any] | None = None
    ) -> None:
        if not callable(apply):
            raise InputError(f"apply must be the generated package's function, as clicks.apply, not {apply!r}")
        self._apply = apply
        self._name = model
        self._options = guard
        self._model: nn.Module | None = None
        self._unverified = False
        self._saved: dict[str, Any] = {}
        self.patch: Patch | None = None
        self.guard: Guard | None = None

    def state_dict(self) -> dict[str, Any]:
        """The guard's state, for a checkpoint; {} without a guard. The model's own state_dict needs nothing of LoKA."""
        return self._saved if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the guard go on from a checkpoint; {} changes nothing. Raises InputError as `Guard.load_state_dict`."""
        self._saved = state_dict
        if self.guard is not None and state_dict:
            self.guard.load_state_dict(state_dict)

    def _bind(self, holder: nn.Module) -> None:
        """Apply to the planned model; it stays bound where it was bound by this object before."""
        try:
            model = holder.get_submodule(self._name)
        except AttributeError:
            inside = ", ".join(name for name, _ in holder.named_children())
            raise InputError(
                f"{type(self).__name__}: a {type(holder).__name__} has no module {self._name!r}: `model` names the "
                f"one that was planned (it has {inside or 'none'})"
            ) from None
        if model is not self._model:
            self.patch = self._apply(model)
            self._model, self.guard, self._saved = model, None, {}

    def _start(self, log: Callable[[int, dict[str, float]], object] | None = None) -> None:
        """Compare the ranks and make the guard, when the model is wrapped and its weights are loaded."""
        patch, model = self._bound()
        patch.verify_ranks()
        self._unverified = True
        if self._options is not None:
            saved = self.state_dict()
            self.guard = Guard(model, patch, **{"log": log, **self._options})
            self.load_state_dict(saved)

    def _stepped(self) -> None:
        """Verify after the first step."""
        if self._unverified:
            self._unverified = False
            self._bound()[0].verify()

    def _bound(self) -> tuple[Patch, nn.Module]:
        if self.patch is None or self._model is None:
            raise InputError(f"{type(self).__name__}: the trainer was made without it, so the model is not bound")
        return self.patch, self._model

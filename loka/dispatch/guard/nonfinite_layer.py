"""Search for the layer that makes the first NaN or infinity, a kept one too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.dispatch.bound_state import BoundModule
from loka.dispatch.guard.runs import Loss, OwnRun, floating, is_recomputation
from loka.mods.structure import plain_name

BATCH = "the batch"


@dataclass(slots=True)
class _LayerCall:
    """Flags of one call of a layer, on the device: True where all is finite."""

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_grads: list[Tensor] = field(default_factory=list)
    output_grads: list[Tensor] = field(default_factory=list)


class _Flags:
    """Hooks on all layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: list[_LayerCall] = []  # in the order in which layers were done
        self.backward: list[_LayerCall] = []  # in the order in which gradients of inputs came
        self._running: list[_LayerCall] = []
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._hooks += self._watch(plain_name(name), module)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            if is_recomputation():
                return
            seen = _LayerCall(name)
            self._running.append(seen)
            for tensor in floating((args, kwargs)):
                seen.inputs.append(_finite(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._arrived(seen, grad))  # type: ignore[no-untyped-call]

        def left(module: nn.Module, args: Any, out: Any) -> None:
            if is_recomputation():
                return
            seen = self._running.pop()
            for tensor in floating(out):
                seen.outputs.append(_finite(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: seen.output_grads.append(_finite(grad)))  # type: ignore[no-untyped-call]
            self.forward.append(seen)

        return module.register_forward_pre_hook(entered, with_kwargs=True), module.register_forward_hook(left)

    def _arrived(self, seen: _LayerCall, grad: Tensor) -> None:
        if not seen.input_grads:
            self.backward.append(seen)
        seen.input_grads.append(_finite(grad))


def first_nonfinite(
    model: nn.Module, bound: Sequence[BoundModule], loss: Loss, batch: Any, batch_tensors: Sequence[Tensor]
) -> tuple[str, str] | None:
    """The name of the layer that makes the first value that is not finite, and what that is.

    A layer counts if all that it is given is finite; None if there is no such layer. `BATCH` if it is not finite. For a
    run inside of `undisturbed`.
    """
    flags = _Flags(model)
    try:
        own = OwnRun(bound)
        with own.watching():
            own.backward(loss(model, batch))  # on all ranks: with FSDP2 they gather weights in it
    finally:
        flags.remove()
    if not _all([_finite(tensor) for tensor in batch_tensors if tensor.is_floating_point()]):
        return BATCH, "not all of its numbers are finite"
    for seen in flags.forward:
        if _all(seen.inputs) and not _all(seen.outputs):
            return seen.name, _made(model, seen.name)
    candidates = [seen for seen in flags.backward if _all(seen.output_grads) and not _all(seen.input_grads)]
    if not candidates:
        return None
    name = candidates[0].name  # that of a layer inside of it comes at the same time
    inner = [seen.name for seen in candidates if seen.name.startswith(f"{name}." if name else "")]
    return max([name, *inner], key=lambda each: each.count(".") + bool(each)), "the gradient of its input"


def _made(model: nn.Module, name: str) -> str:
    module = {plain_name(each): found for each, found in model.named_modules()}[name]
    wrong = [own for own, parameter in module.named_parameters() if not _all([_finite(parameter.detach())])]
    return f"its output; {' and '.join(wrong)} had such values before" if wrong else "its output"


def _finite(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        # Of a DTensor this rank's part: all of it would be a collective, which ranks that found nothing never join.
        return torch.isfinite(tensor.to_local() if hasattr(tensor, "to_local") else tensor).all()


def _all(flags: Sequence[Tensor]) -> bool:
    return all(bool(flag) for flag in flags)

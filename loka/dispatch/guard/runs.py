"""The two runs of a check: the model by its own GEMMs, and its bound modules in FP8, each by itself.

In the second run the values between the modules are those of the first: outputs on their way forward, gradients of
outputs and inputs on their way back; and so is what a module hands to a bound one inside of it, as a merged GEMM of a
forward does to the layers behind it. So what differs at a module was made in it, no error of another is in it, and one
run names every module at fault. Gradients are asked for by torch.autograd.grad: no `.grad` is touched, and none of the
hooks that wait for one runs (DDP's reducer, optimizers in the backward).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from loka.dispatch.bind.check_model import shown
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.guard.verdicts import INPUT_GRADIENT, OUTPUT, VECTORS, Figure, difference
from loka.errors import InputError

_REENTRANT = (
    "a checkpoint with use_reentrant=True gives no gradients of single tensors: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)

_OLD_GRAPH = (
    "the loss reads a tensor of the last training step, as one that a hook keeps: hooks do not run in a check, unless "
    "the guard is made with hooks=True"
)

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(slots=True)
class ModuleCall:
    """One call of a bound module: tensors of its inputs and outputs that take part in the backward."""

    inputs: list[GradientEdge] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # values of the inputs, inside of another bound module
    outputs: list[GradientEdge | None] = field(default_factory=list)  # None: needs no gradient
    values: list[Tensor] = field(default_factory=list)  # of the outputs
    output_grads: list[Tensor | None] = field(default_factory=list)
    input_grads: list[Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class ModuleRun:
    """What a run saw of one bound module."""

    bound: BoundModule
    calls: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # as they are inside of the forward, also with FSDP2
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)


class WatchedRun(ABC):
    """Hooks on bound modules during one forward, and the gradients after it."""

    def __init__(self, bound: Sequence[BoundModule]) -> None:
        self.modules = {each.name: ModuleRun(each) for each in bound}
        self._running: list[ModuleRun] = []  # the innermost last

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward and backward: the hooks are in place."""
        hooks: list[RemovableHandle] = []
        try:
            for run in self.modules.values():
                hooks += self._hooks(run)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, run: ModuleRun) -> tuple[RemovableHandle, RemovableHandle]:
        def entered(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if is_recomputation() else self._enter(run, module, args, kwargs)

        def left(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            if not is_recomputation():
                self._running.pop()
            return self._leave(run, out)

        before = run.bound.module.register_forward_pre_hook(entered, with_kwargs=True)
        return before, run.bound.module.register_forward_hook(left, with_kwargs=True)

    def _enter(self, run: ModuleRun, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give the module's inputs nodes of their own, so that its part of their gradients is known."""
        if not torch.is_grad_enabled() and module.training and any(each.requires_grad for each in module.parameters()):
            raise InputError(
                f"guard: {shown(run.bound.name)} ran without gradients in `loss`, so that none can be compared: take "
                f"torch.no_grad() away; {_REENTRANT}"
            )
        call, around = ModuleCall(), self._running[-1] if self._running else None
        self._running.append(run)

        def tap(value: Any) -> Any:
            if around is not None and _is_floating(value):
                value = self._given(run, around, value)
            if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
                return value
            own = self._input(run, len(call.inputs), value)
            call.inputs.append(get_gradient_edge(own))
            return own

        run.calls.append(call)
        if not run.parameters:
            run.parameters = dict(_parameters(run.bound))
        return tree_map(tap, args), tree_map(tap, kwargs)

    def _input(self, run: ModuleRun, number: int, value: Tensor) -> Tensor:
        return value.view_as(value)

    @abstractmethod
    def _given(self, run: ModuleRun, around: ModuleRun, value: Tensor) -> Tensor:
        """An input of a module that is called in the forward of another bound one, or what takes its place."""

    @abstractmethod
    def _leave(self, run: ModuleRun, out: Any) -> Any:
        """The module's output, or what takes its place."""


class OwnRun(WatchedRun):
    """The run by the modules' own forwards: keeps outputs and gradients."""

    def _given(self, run: ModuleRun, around: ModuleRun, value: Tensor) -> Tensor:
        run.calls[-1].given.append(value.detach().clone())
        return value

    def _leave(self, run: ModuleRun, out: Any) -> Any:
        if is_recomputation():
            return
        call = run.calls[-1]
        for tensor in floating(out):
            # A copy: a layer that follows may work in place.
            call.values.append(tensor.detach().clone())
            call.outputs.append(get_gradient_edge(tensor) if tensor.requires_grad else None)

    def backward(self, loss: Tensor) -> None:
        """Fill in the gradients of inputs, outputs and parameters."""
        wanted: list[Any] = []
        for run in self.modules.values():
            for call in run.calls:
                wanted += [*call.inputs, *(edge for edge in call.outputs if edge is not None)]
            wanted += run.parameters.values()
        found = gradients(loss, wanted)
        for run in self.modules.values():
            for call in run.calls:
                call.input_grads = [next(found) for _ in call.inputs]
                call.output_grads = [None if edge is None else next(found) for edge in call.outputs]
            run.gradients = {name: next(found) for name in run.parameters}


class Fp8Run(WatchedRun):
    """The run in FP8 with the tensors of an `OwnRun` between the modules; gathers `figures` of what differs."""

    def __init__(self, bound: Sequence[BoundModule], own: OwnRun) -> None:
        super().__init__(bound)
        self._own = own

    def _given(self, run: ModuleRun, around: ModuleRun, value: Tensor) -> Tensor:
        calls, call = self._own.modules[run.bound.name].calls, run.calls[-1]
        call.given.append(value)
        expected = calls[len(run.calls) - 1].given if len(run.calls) <= len(calls) else []
        if len(call.given) > len(expected):
            return value
        own = expected[len(call.given) - 1]
        around.figures.append(difference(OUTPUT, value.detach(), own))
        # The gradient is the other run's by `_input` already.
        return _Instead.apply(value, own, lambda arrived: arrived)  # type: ignore[no-untyped-call,no-any-return]

    def _input(self, run: ModuleRun, number: int, value: Tensor) -> Tensor:
        """An input whose gradient, once it is seen, gives way to that of the other run."""
        calls = self._own.modules[run.bound.name].calls
        grads = calls[len(run.calls) - 1].input_grads if len(run.calls) <= len(calls) else []
        before = value.view_as(value)
        if number < len(grads) and (grad := grads[number]) is not None:
            before.register_hook(lambda arrived: grad.to(arrived.dtype))  # type: ignore[no-untyped-call]
        return before.view_as(before)

    def _leave(self, run: ModuleRun, out: Any) -> Any:
        calls = self._own.modules[run.bound.name].calls
        again = is_recomputation()
        number = 0 if again else len(run.calls) - 1
        if number >= len(calls) or (again and len(calls) > 1):  # which of several calls is computed again is not known
            return out
        expected = iter(zip(calls[number].values, calls[number].output_grads, strict=True))

        def replaced(tensor: Any) -> Any:
            if not _is_floating(tensor):
                return tensor
            value, grad = next(expected)
            if not again:
                run.figures.append(difference(OUTPUT, tensor.detach(), value))
            return _Instead.apply(  # type: ignore[no-untyped-call]
                tensor, value, lambda arrived: torch.zeros_like(arrived) if grad is None else grad
            )

        leaves, structure = tree_flatten(out)
        return tree_unflatten([replaced(leaf) for leaf in leaves], structure)

    def backward(self, loss: Tensor) -> None:
        """Add the figures of the gradients of inputs and parameters."""
        wanted: list[Any] = []
        for run in self.modules.values():
            wanted += [edge for call in run.calls for edge in call.inputs]
            wanted += run.parameters.values()
        found = gradients(loss, wanted)
        for name, run in self.modules.items():
            own = self._own.modules[name]
            for call, expected in zip(run.calls, own.calls, strict=False):
                for _, value in zip(call.inputs, expected.input_grads, strict=False):
                    _add(run.figures, INPUT_GRADIENT, next(found), value)
            for parameter, tensor in run.parameters.items():
                label = f"gradient of {parameter}" if tensor.dim() > 1 else VECTORS
                _add(run.figures, label, next(found), own.gradients[parameter])


class _Instead(torch.autograd.Function):
    """A tensor of the other run in the place of this one's, and its gradient in the place of what arrives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.grad = grad
        ctx.dtype = tensor.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grad(grad).to(ctx.dtype), None, None


def gradients(loss: Tensor, wanted: Sequence[Any]) -> Iterator[Tensor | None]:
    """Gradients of a loss by tensors and edges; None for those that it does not depend on."""
    tensors = [each for each in wanted if isinstance(each, GradientEdge) or each.requires_grad]
    try:
        found = iter(torch.autograd.grad(loss, tensors, allow_unused=True) if tensors else ())
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise InputError(f"guard: {_REENTRANT}") from error
        if "a second time" in str(error):
            raise InputError(f"guard: {_OLD_GRAPH}") from error
        raise
    return iter([next(found) if isinstance(each, GradientEdge) or each.requires_grad else None for each in wanted])


def is_recomputation() -> bool:
    """True inside of a backward: activation checkpointing runs a forward again."""
    return bool(torch._C._current_graph_task_id() != -1)


def floating(values: Any) -> list[Tensor]:
    """The floating-point tensors in a module's arguments or outputs, in order."""
    return [leaf for leaf in tree_flatten(values)[0] if _is_floating(leaf)]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _add(figures: list[Figure], label: str, found: Tensor | None, expected: Tensor | None) -> None:
    if expected is not None:
        figures.append(difference(label, torch.zeros_like(expected) if found is None else found, expected))


def _parameters(bound: BoundModule) -> Iterator[tuple[str, Tensor]]:
    """The parameters that a generated forward reads."""
    for name, _ in bound.counters.binding.shapes:
        yield name, bound.module.get_parameter(name)


@contextmanager
def undisturbed(model: nn.Module, hooks: bool = False) -> Iterator[None]:
    """Context in which a model may run: eagerly, with gradients; buffers and random numbers are as before after it.

    Each such context starts from the same random numbers, so that dropout is equal in all of them. `hooks`: run the
    user's hooks too.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device for device in devices if device.index is not None]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if not hooks:
            stack.enter_context(_without_hooks(model))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):  # around a part of the model
                stack.enter_context(module.no_sync())
        try:
            torch.set_autocast_cache_enabled(False)  # casts of weights would be those of another graph
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(value)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Context without the user's hooks of modules, parameters, and all modules of the process.

    They come back in their dictionaries, which handles and compiled code know, and in their order.
    """
    places = [getattr(module, name) for module in model.modules() for name in _HOOKS]
    places += [getattr(torch_modules, f"_global{name}") for name in _HOOKS]
    taken = [(place, {key for key, hook in place.items() if not _is_torchs(hook)}) for place in places]
    taken += [(each._backward_hooks, set(each._backward_hooks)) for each in model.parameters() if each._backward_hooks]
    before = [dict(place) for place, _ in taken]
    try:
        for place, users in taken:
            for key in users:
                del place[key]
        yield
    finally:
        for (place, users), hooks in zip(taken, before, strict=True):
            if users:
                left = dict(place)
                place.clear()
                place.update({key: hook for key, hook in hooks.items() if key in users or key in left} | left)


def _is_torchs(hook: Any) -> bool:
    """True for a hook that torch has put there: FSDP2 gathers weights in one, `prune` computes them."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None)).partition(".")[0] == "torch"

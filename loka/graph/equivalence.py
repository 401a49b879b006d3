"""The equivalence check: the printed forward, with nothing replaced, must compute the same as the original.

Both run side by side on copies that start equal, through training and evaluation, every example, with and without
autocast to bfloat16. Compared, bit for bit: outputs, gradients of inputs and Parameters, inputs that were modified in
place, buffers, Parameters, the random state, and Python attributes. The canonical form must compute the same up to
rounding, and its results are contiguous where the module's own are.

Gradients of Parameters are as large as the model, and take most of the time: they are compared for the first batch size
alone, bit for bit in training and up to rounding in evaluation; those of inputs always. Under autocast a CPU takes up
to forty times as long for gradients as in float32: they are compared once, in training, at the first batch size.
Outputs are also compared without gradients. A quick check compares outputs and state, without gradients and autocast:
for a forward whose only use is the time that it would take.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from loka.errors import InputError
from loka.graph.capture.captured import map_tree
from loka.graph.capture.undisturbed import unchanged
from loka.graph.differences import compare_leaves, compare_state, largest_magnitude, scattered
from loka.graph.expression import text_of
from loka.graph.guards import any_fails
from loka.graph.ir import CannotTraceError, ForwardIR
from loka.graph.trace.examples import ExampleCall, Examples, copy_tree, quiet
from loka.model.callables import message_of

_OTHER_ARGUMENTS = "InputError: other arguments"  # of a guard that fails
_ROUNDING_OF_FLOAT64 = 1e-9  # relative to the largest value
_ROUNDING = 1e-4  # relative to the largest value, for a GEMM summed in another order; larger for Parameters in bfloat16


class Backward(Enum):
    """Gradients of a run."""

    NONE = "none"
    INPUTS = "inputs"
    ALL = "all"  # of Parameters too

    @classmethod
    def of(
        cls, call: ExampleCall, examples: Examples, quick: bool, weights: bool = True, autocast: bool = False
    ) -> Backward:
        """The gradients to compare for a call: of inputs, and of Parameters too if `weights`, for the first batch size.

        Under autocast those of inputs alone are not compared.
        """
        everything = weights and call.batch == examples.calls[0].batch
        if quick or (autocast and not everything):
            return cls.NONE
        return cls.ALL if everything else cls.INPUTS


def difference(
    module: nn.Module, forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module], quick: bool = False
) -> str | None:
    """The first difference between the printed forward and the module's own, in words; None where there is none.

    `copied` makes a copy of the module. The module's mode and torch's and Python's random states are restored.
    """
    with unchanged(module):
        return _compare_all(forward, examples, copied, quick)


@quiet()
def rounding_difference(
    module: nn.Module,
    forward: ForwardIR,
    examples: Examples,
    copied: Callable[[], nn.Module],
    quick: bool = False,
    contiguous: bool = False,
) -> str | None:
    """The first difference beyond rounding between a rewritten forward and the module's own, in words, or None.

    Compares outputs, gradients (not if `quick`) and the random state, in training and evaluation, without autocast.
    With `contiguous`, outputs must be so where the module's own are.
    """
    for training in (True, False):
        found = _up_to_rounding(module, forward, examples, copied, quick, contiguous, training)
        if found is not None:
            return f"rewritten, it {found}"
    return None


@quiet()
def float64_difference(forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module]) -> str | None:
    """The first difference between outputs in float64: what rounding of float32 hides, as another eps of a norm.

    None for a module that does not run in float64. Neither may cast on the way. Random states are restored.
    """
    ours, theirs = (_in_float64(copied()) for _ in range(2))
    if ours is None or theirs is None:
        return None
    with_forward(theirs, forward)
    with unchanged(ours):
        for training in (True, False):
            ours.train(training)
            theirs.train(training)
            for call in examples.calls:
                wide = ExampleCall(call.batch, *(tree_map(_widened, each) for each in (call.args, call.kwargs)))
                a, b = (_run(each, wide, autocast=False, backward=Backward.NONE) for each in (ours, theirs))
                kinds = {x.dtype for x in a.outputs if isinstance(x, torch.Tensor) and x.is_floating_point()}
                if a.error is not None or kinds != {torch.float64}:
                    return None
                found = _compare(a, b, rounding=_ROUNDING_OF_FLOAT64)
                if found is not None:
                    return f"in float64, it {found} {_when(training, False, call)}"
        return None


class NormsInFloat32(TorchFunctionMode):
    """Layer norms return float32, as under autocast on cuda; on the CPU they keep the dtype of what they read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.float() if func is nn.functional.layer_norm else made


def keeps_dtypes(forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module]) -> bool:
    """True if a forward's outputs have the dtypes of the module's own under autocast, too."""
    ours, theirs = copied(), with_forward(copied(), forward)
    for call in examples.calls:
        with unchanged(ours), NormsInFloat32():
            a, b = (_run(m, call, autocast=True, backward=Backward.NONE) for m in (ours, theirs))
        kinds = [[x.dtype if isinstance(x, torch.Tensor) else None for x in each.outputs] for each in (a, b)]
        if a.error is None and b.error is None and kinds[0] != kinds[1]:
            return False
    return True


@quiet()
def outputs_differ(
    ours: nn.Module, theirs: nn.Module, call: ExampleCall, autocast: bool = False, gradients: bool = True
) -> str | None:
    """The first difference beyond rounding between what two modules return in a call, in words; None without one.

    A call that both refuse, or that the second refuses for a guard, is no difference; under autocast to bfloat16, nor
    is one that the first refuses. Random states are restored.
    """
    with unchanged(ours), unchanged(theirs):
        a, b = (_run(each, call, autocast, Backward.NONE, gradients) for each in (ours, theirs))
    if b.error is not None and (a.error is not None or b.error == _OTHER_ARGUMENTS):
        return None
    if autocast and a.error is not None:
        return None
    return _compare(a, b, rounding=8 * torch.finfo(torch.bfloat16).eps if autocast else _ROUNDING)


def source(forward: ForwardIR) -> str:
    """Python source of the forward, which raises InputError where a guard fails."""
    lines = [f"def forward({', '.join(('self', *forward.arguments))}):"]
    if forward.guards:
        lines += [f"    if {any_fails(forward.guards)}:", "        raise dispatch.InputError('other arguments')"]
    lines += [f"    {statement.text()}" for statement in forward.statements]
    return "\n".join([*lines, f"    return {text_of(forward.result)}", ""])


def with_forward(module: nn.Module, forward: ForwardIR) -> nn.Module:
    """The module with its class changed to one whose forward is the printed text."""
    scope: dict[str, Any] = {"torch": torch, "dispatch": SimpleNamespace(InputError=InputError)}
    exec(compile(source(forward), f"<forward of {forward.owner!r}>", "exec"), scope)  # noqa: S102 - own text
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": scope["forward"]})
    return module


def _compare_all(forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module], quick: bool) -> str | None:
    ours, theirs = copied(), with_forward(copied(), forward)
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        for autocast in (False,) if quick else (False, True):
            for call in examples.calls:
                backward = Backward.of(call, examples, quick, training, autocast)
                a, b = (_run(m, call, autocast, backward) for m in (ours, theirs))
                if a.error is not None and not autocast:
                    return f"the module cannot be run on its examples ({a.error})"
                found = _compare(a, b) or (compare_state(ours, theirs) if call is examples.calls[-1] else None)
                if found is not None:
                    return f"traced, it {found} {_when(training, autocast, call)}"
                del a, b  # not kept beside those of the next call
    # They are equal and in evaluation: no other copies are needed.
    a, b = (_run(m, examples.calls[0], False, Backward.NONE, gradients=False) for m in (ours, theirs))
    found = _compare(a, b)
    return None if found is None else f"traced, it {found} {_when(False, False, examples.calls[0])} without gradients"


def _in_float64(module: nn.Module) -> nn.Module | None:
    """A module of float32 as one of float64, with tensors of its own; None for one that has other dtypes, or cannot."""
    held = (*module.parameters(), *module.buffers())
    if any(x.dtype != torch.float32 for x in held if x.is_floating_point()):
        return None
    try:
        return copy.deepcopy(module).double()
    except Exception:  # noqa: BLE001 - the user's `__deepcopy__` or `_apply` can raise anything
        return None


def _widened(value: Any) -> Any:
    is_wide = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_wide else value


def _up_to_rounding(
    module: nn.Module,
    forward: ForwardIR,
    examples: Examples,
    copied: Callable[[], nn.Module],
    quick: bool,
    contiguous: bool,
    training: bool,
) -> str | None:
    """The first difference of a forward from the module's own beyond rounding, and when it shows."""
    coarsest = max((torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point()), default=0.0)
    with unchanged(module):
        ours, theirs = copied(), with_forward(copied(), forward)
        ours.train(training)  # not chained: a model's own train() may return nothing
        theirs.train(training)
        for call in examples.calls:
            backward = Backward.of(call, examples, quick)
            a, b = (_run(m, call, autocast=False, backward=backward) for m in (ours, theirs))
            found = _compare(a, b, rounding=max(_ROUNDING, 8 * coarsest))
            found = scattered(a.outputs, b.outputs) if found is None and contiguous else found
            if found is not None:
                return f"{found} {_when(training, False, call)}"
    return None


def _when(training: bool, autocast: bool, call: ExampleCall) -> str:
    mode = "training" if training else "evaluation"
    return f"in {mode} at batch {call.batch}" + (" under bfloat16 autocast" if autocast else "")


@dataclass(frozen=True, slots=True)
class _Outcome:
    outputs: tuple[object, ...] = ()
    inputs: tuple[object, ...] = ()
    gradients: tuple[tuple[str, torch.Tensor | None], ...] = ()
    random: tuple[torch.Tensor, object] | None = None
    error: str | None = None


def _run(module: nn.Module, call: ExampleCall, autocast: bool, backward: Backward, gradients: bool = True) -> _Outcome:
    torch.default_generator.manual_seed(0)  # not torch.manual_seed, which also seeds GPUs, or queues it with a stack
    random.seed(0)
    leaves: list[torch.Tensor] = []
    args, kwargs = copy_tree(call.args), copy_tree(call.kwargs)
    if gradients:
        args, kwargs = _with_leaves(args, leaves), _with_leaves(kwargs, leaves)
    named = [(f"input {i}", leaf) for i, leaf in enumerate(leaves)] if backward is not Backward.NONE else []
    if backward is Backward.ALL:
        named += [(f"'{name}'", p) for name, p in module.named_parameters() if p.requires_grad]
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    try:
        with torch.set_grad_enabled(gradients):
            with context:
                output = module(*args, **kwargs)
            state = torch.get_rng_state(), random.getstate()
            outputs = tuple(_leaves(output))
            made = _gradients(outputs, [tensor for _, tensor in named])
    except Exception as error:  # noqa: BLE001 - a forward can raise anything; both sides must raise the same
        return _Outcome(error=f"{type(error).__name__}: {message_of(error)}")
    names = [name for name, _ in named]
    return _Outcome(outputs, tuple(_leaves((args, kwargs))), tuple(zip(names, made, strict=True)), state)


def _with_leaves(value: Any, leaves: list[torch.Tensor]) -> Any:
    """The same tree with float tensors as non-leaves that need a gradient, so that they can be modified in place."""

    def needing_gradient(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        leaves.append(leaf.requires_grad_())
        return leaf.clone()

    return map_tree(value, needing_gradient)


def _gradients(outputs: tuple[object, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    floats = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not floats or not tensors:
        return [None] * len(tensors)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.dtype) for x in floats]
    return list(torch.autograd.grad(floats, tensors, weights, allow_unused=True))


def _leaves(value: object) -> Iterator[object]:
    """The tensors and plain values of an output, and the types of its containers."""
    if isinstance(value, tuple | list):
        yield type(value).__qualname__, len(value)
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield type(value).__qualname__, tuple(map(repr, value))
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | torch.device | None):
        yield value
    elif hasattr(value, "__dict__"):
        yield type(value).__qualname__, tuple(vars(value))
        for item in vars(value).values():
            yield from _leaves(item)
    else:
        raise CannotTraceError(f"returns a {type(value).__qualname__}, which cannot be compared")


def _same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.layout == y.layout == torch.strided and x.dtype == y.dtype and torch.equal(x, y)


def _compare(a: _Outcome, b: _Outcome, rounding: float = 0.0) -> str | None:
    if a.error is not None or b.error is not None:
        return None if a.error == b.error else f"raises {b.error}" if b.error else f"does not raise {a.error}"
    found = compare_leaves(a.outputs, b.outputs, rounding)
    if found is not None:
        return f"gives other outputs ({found})"
    found = compare_leaves(a.inputs, b.inputs, rounding)
    if found is not None:
        return f"leaves its inputs otherwise ({found})"
    largest = max((largest_magnitude(x) for _, x in a.gradients if x is not None), default=0.0) if rounding else 0.0
    for (name, x), (_, y) in zip(a.gradients, b.gradients, strict=True):
        if x is not None and y is not None and _same_values(x, y):
            continue  # with whichever strides: torch promises none for gradients
        found = compare_leaves((x,), (y,), rounding, largest)
        if found is not None:
            return f"gives another gradient for {name} ({found})"
    if a.random is not None and b.random is not None and not _same_random(a.random, b.random):
        return "draws other random numbers"
    return None


def _same_random(a: tuple[torch.Tensor, object], b: tuple[torch.Tensor, object]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1]

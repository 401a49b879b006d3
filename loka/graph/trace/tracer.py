"""Traces the owners of a model: examples are captured once, and layers that are alike are traced once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from loka.errors import InputError, LokaError
from loka.graph.ir import ForwardIR, Refused
from loka.graph.patterns.owners import RegionScope
from loka.graph.source import forward_source_hash, is_simple
from loka.graph.trace.examples import Examples, ModelInputs, capture_examples, form_of
from loka.graph.trace.trace import trace_forward
from loka.model.callables import describe_error

BATCHES = (5, 8)  # samples in the two runs that capture examples: small, different, and more than one
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(slots=True)
class Tracer:
    """Traces owners of one model. `inputs(batch)` gives the model's arguments at a batch size.

    `quick`: forwards are compared by their outputs alone.
    """

    model: nn.Module
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    quick: bool = False
    _examples: dict[str, Examples | Refused] = field(default_factory=dict)
    _traced: dict[object, ForwardIR | Refused] = field(default_factory=dict)

    def capture(self, owners: Collection[str]) -> None:
        """Run the model to capture the calls of some modules; those captured before are skipped."""
        new = [owner for owner in owners if owner not in self._examples]
        if not new:
            return
        try:
            batches = {batch: ModelInputs(*self.inputs(batch)) for batch in BATCHES}
            self._examples |= capture_examples(self.model, new, batches)
        except InputError as error:
            self._examples |= {owner: Refused(owner, f"its inputs cannot be captured: {error}") for owner in new}
        except Exception as error:  # noqa: BLE001 - a forward can raise anything
            reason = f"running the model on {' and '.join(map(str, BATCHES))} samples raised {describe_error(error)}"
            self._examples |= {owner: Refused(owner, reason) for owner in new}

    def examples(self, owner: str) -> Examples:
        """The captured calls of a traced module. Raises LokaError if it was never traced."""
        found = self._examples.get(owner)
        if not isinstance(found, Examples):
            raise LokaError(f"{owner!r} was never traced. This is a fault in LoKA: please report it.")
        return found

    def __call__(self, scope: RegionScope) -> ForwardIR | Refused:
        """The forward of one owner, or the reason why it cannot be traced."""
        self.capture([scope.owner])
        module, examples = self.model.get_submodule(scope.owner), self._examples[scope.owner]
        if isinstance(examples, Refused):
            return examples
        key = _fingerprint(module, scope, examples)
        known = self._traced.get(key) if key is not None else None
        if known is not None:
            return replace(known, owner=scope.owner)
        traced = trace_forward(module, scope.owner, examples, scope.inline, scope.sites, self.quick)
        if key is not None:
            self._traced[key] = traced
        return traced


def _fingerprint(module: nn.Module, scope: RegionScope, examples: Examples) -> object | None:
    """Key that is equal for modules with the same straight-line forward; None where that cannot be decided.

    It has their source, the plain attributes of every module in them, shapes and dtypes of Parameters and buffers,
    their calls, and the scope.
    """
    try:
        source = forward_source_hash(module, scope.inline)
    except OSError:
        return None
    parts = []
    for name, child in module.named_modules():
        attributes = {key: value for key, value in vars(child).items() if key not in _INTERNAL}
        if not all(map(is_simple, attributes.values())):
            return None
        hooks = (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)
        if any(hooks):
            return None
        parts.append((name, type(child), child.training, tuple(sorted(map(repr, attributes.items()))), _forms(child)))
    calls = tuple(repr((call.batch, form_of(call.args), form_of(call.kwargs))) for call in examples.calls)
    return (source, tuple(parts), _ties(module), calls, scope.inline, scope.sites)


def _ties(module: nn.Module) -> tuple[str, ...]:
    """For each name of a module or tensor, the first name of the same object."""
    modules, tensors = module.named_modules(remove_duplicate=False), module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    firsts: dict[int, str] = {}
    return tuple(firsts.setdefault(id(thing), name) for name, thing in (*modules, *tensors, *buffers))


def _forms(module: nn.Module) -> tuple[object, ...]:
    held: Mapping[str, Any] = module._parameters | module._buffers
    return tuple(
        (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, id(type(tensor))))
        for name, tensor in held.items()
    )

"""Traces the owners of a model: examples are captured once, and layers that are alike are traced once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from loka.errors import InputError, LokaError
from loka.graph.fake_module import likeness
from loka.graph.ir import ForwardIR, Refused
from loka.graph.patterns.owners import RegionScope
from loka.graph.source import has_hooks
from loka.graph.trace.examples import Examples, ModelInputs, capture_examples, form_of
from loka.graph.trace.trace import trace_forward
from loka.model.callables import describe_error

BATCHES = (5, 8)  # samples in the two runs that capture examples: small, different, and more than one


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
        key = _key(module, scope, examples)
        known = self._traced.get(key) if key is not None else None
        if known is not None:
            return replace(known, owner=scope.owner)
        traced = trace_forward(module, scope.owner, examples, scope.inline, scope.sites, self.quick)
        if key is not None:
            self._traced[key] = traced
        return traced


def _key(module: nn.Module, scope: RegionScope, examples: Examples) -> object | None:
    """Key that is equal for modules with the same forward, calls and scope; None where that cannot be decided."""
    alike = likeness(module)
    if alike is None or any(map(has_hooks, module.modules())):
        return None
    calls = tuple(repr((call.batch, form_of(call.args), form_of(call.kwargs))) for call in examples.calls)
    return alike, calls, scope.inline, scope.sites

"""Sizes of computed tensors that follow from the shapes of a module's arguments, whatever the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from loka.graph.trace.call_values import EntryValues, Values
from loka.graph.trace.examples import ExampleCall

Shape = tuple[int | None, ...]  # None is a dimension that differs between calls
GivenShapes = Mapping[str, Shape]  # of tensors that are given to a module, by the names of their nodes


class FixedSizes:
    """Finds by torch's symbolic shapes which sizes of a trace no call changes whose arguments have the known shapes."""

    def __init__(self, module: nn.Module, calls: Sequence[ExampleCall]) -> None:
        self._module, self._calls = module, calls
        self._runs: tuple[_Run, ...] = ()  # made at the first question: torch's symbols take a while

    def given_shapes(self, node: fx.Node, values: Values) -> GivenShapes | None:
        """The shapes of what is given to the module from which a value follows, `values` being those in all calls.

        None where it does not: the first dimension may differ between calls, and the value must be the same for all
        sizes of it, from 1. Ask outside of the trace.
        """
        entry = EntryValues(self._module, self._calls)
        given: dict[str, Values] = {}
        waiting, seen = [node], {node}
        while waiting:
            here = waiting.pop()
            known = None if here.op == "get_attr" else entry.of(here)
            if known is not None and all(isinstance(value, Tensor) for value in known):
                given[here.name] = known
            elif here.op == "placeholder" or (here.op == "call_module" and not self._is_torch(str(here.target))):
                return None
            else:
                waiting += [each for each in here.all_input_nodes if each not in seen]
                seen.update(here.all_input_nodes)
        shapes = {name: _common(tensors) for name, tensors in given.items()}
        if any(not shape or None in shape[1:] for shape in shapes.values()):
            return None
        ordered = [each for each in node.graph.nodes if each in seen]
        self._runs = self._runs or (_Run(self._module, symbolic=True), _Run(self._module, symbolic=False))
        try:
            found = [run.value(ordered, given, shapes) for run in self._runs]
        except Exception:  # noqa: BLE001 - operations on fake tensors can raise anything: nothing is known then
            return None
        return shapes if all(_fact(each) == _fact(value) is not None for each in found for value in values) else None

    def _is_torch(self, child: str) -> bool:
        return type(self._module.get_submodule(child)).__module__.startswith("torch.nn.")


class _Run:
    """Fake values of the operations of a trace, for a symbolic number of rows of what is given, or for one row."""

    def __init__(self, module: nn.Module, symbolic: bool) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbolic = symbolic
        self._sizes: dict[tuple[int, ...], Any] = {}  # a symbol for each size of the first dimension
        self._values: dict[str, Any] = {}  # by names of nodes, which are the same in every trace of a module
        self._of = fx.Interpreter(module, graph=fx.Graph())

    def value(self, nodes: Sequence[fx.Node], given: Mapping[str, Values], shapes: GivenShapes) -> object:
        """The value of the last of some nodes, which are in the order of the trace; None if it is a symbol's.

        Also where torch has taken the symbol for a number.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._mode:
            for node in nodes:
                if node.name not in self._values and node.name in given:
                    self._values[node.name] = self._given(given[node.name], shapes[node.name])
                elif node.name not in self._values:
                    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self._values[n.name])
                    self._values[node.name] = getattr(self._of, node.op)(node.target, args, kwargs)
        return None if self._shapes.guards else self._values[nodes[-1].name]

    def _given(self, values: Values, shape: Shape) -> Tensor:
        first = self._rows(tuple(value.shape[0] for value in values)) if shape[0] is None else shape[0]
        return torch.empty((first, *shape[1:]), dtype=values[0].dtype, device=values[0].device)  # type: ignore[arg-type]

    def _rows(self, sizes: tuple[int, ...]) -> Any:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        if not self._symbolic:
            return 1
        if sizes not in self._sizes:
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            rows = torch.empty(max(sizes), device="meta")
            self._sizes[sizes] = self._mode.from_tensor(rows, symbolic_context=context).shape[0]
        return self._sizes[sizes]


def _common(values: Sequence[Tensor]) -> Shape:
    """The shape of all tensors, with None for a dimension in which they differ; () where they have other dimensions."""
    shapes = [tuple(value.shape) for value in values]
    if len(set(map(len, shapes))) > 1:
        return ()
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))


def _fact(value: object) -> int | None:
    """What a test asks of a value: a number or a truth itself, the length of a shape; None for what has symbols."""
    if isinstance(value, tuple):
        return len(value)
    return value if type(value) in (int, bool) else None  # type: ignore[return-value]

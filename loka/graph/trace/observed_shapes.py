"""Shapes of the locals of a traced forward, observed on its examples."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from loka.graph.capture.undisturbed import unchanged
from loka.graph.equivalence import with_forward
from loka.graph.expression import Call, local, locals_in
from loka.graph.ir import ForwardIR, Shape, Statement
from loka.graph.trace.examples import Examples, copy_tree

_PAIRS = frozenset({"add", "mul"})


def observed_shapes(forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module]) -> Mapping[str, Shape]:
    """The shape of each argument and target that is a tensor; a name that is set twice is left out.

    `copied` makes a copy of the owner. The forward must have passed the equivalence check, so that it runs on the
    examples.
    """
    targets = [statement.target for statement in forward.statements if statement.target != "_"]
    once = [target for target in dict.fromkeys(targets) if targets.count(target) == 1]
    seen: list[dict[str, Shape]] = []
    for values in observed_values(forward, once, examples, copied, autocast=False):
        seen.append({name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)})
    return {name: shape for name in seen[0] if name not in targets or name in once if (shape := _common(name, seen))}


def observed_values(
    forward: ForwardIR, names: Sequence[str], examples: Examples, copied: Callable[[], nn.Module], autocast: bool
) -> Iterator[dict[str, object]]:
    """The arguments of each example call, and the locals of these names, in evaluation.

    A copy may share children with its original, whose modes are restored.
    """
    owner = copied()
    signature = inspect.signature(owner.forward)
    targets = {step.target for step in forward.statements}
    names = [name for name in names if name in targets and name not in signature.parameters]
    shown = with_forward(owner, replace(forward, result=tuple(map(local, names))))
    shown._forward_hooks = OrderedDict()  # the owner's hooks expect its result, and this forward returns all its locals
    with unchanged(shown), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        shown.eval()
        for call in examples.calls:
            args, kwargs = copy_tree(call.args), copy_tree(call.kwargs)
            values = {**signature.bind(*args, **kwargs).arguments}
            yield values | dict(zip(names, shown(*args, **kwargs), strict=True))


def with_even_statements(forward: ForwardIR, shapes: Mapping[str, Shape]) -> ForwardIR:
    """The forward with `columns` set for each sum and product whose locals all have the result's shape."""
    marked = (replace(step, columns=_columns(step, shapes)) for step in forward.statements)
    return replace(forward, statements=tuple(marked))


def _columns(statement: Statement, shapes: Mapping[str, Shape]) -> int | None:
    value, shape = statement.value, shapes.get(statement.target)
    if statement.op not in _PAIRS or statement.call is not None or not isinstance(value, Call) or shape is None:
        return None
    read = locals_in(value)
    is_pair = len(read) == len(value.args) == 2 and not value.kwargs
    return shape[-1] or 0 if is_pair and all(shapes.get(name) == shape for name in read) else None


def _common(name: str, seen: Sequence[Mapping[str, Shape]]) -> Shape:
    """The shape common to all calls, None where a dimension differs; () where the number of dimensions differs."""
    shapes = [shapes.get(name, ()) for shapes in seen]
    if len({len(shape) for shape in shapes}) > 1:
        return ()
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))

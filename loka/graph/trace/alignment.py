"""Whether two captures of one forward are the same operations, and where they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from loka.graph.capture.captured import Captured, line_of, place_in
from loka.graph.capture.sources import Source

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as"})


def operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call")]


def aligned(whole: Captured, other: Captured) -> dict[fx.Node, fx.Node] | None:
    """The operation of another capture for each of one, if they are the same ones; constants may differ.

    A cast of the first that would do nothing in the other has its operand there.
    """
    theirs = iter(operations(other.graph))
    found: dict[fx.Node, fx.Node] = {}

    def form(value: Any, sources: Mapping[fx.Node, Source]) -> Any:
        """What tells an operand: its node in the other capture, or its source."""
        if isinstance(value, fx.Node):
            value, sources = (found[value], other.sources) if value in found else (value, sources)
            if value.op == "get_attr":
                return value.target
            return sources[value].text if value in sources else value
        if isinstance(value, tuple | list):
            return [form(item, sources) for item in value]
        if isinstance(value, dict):
            return [(key, form(item, sources)) for key, item in value.items()]
        if isinstance(value, slice):
            return [form(each, sources) for each in (value.start, value.stop, value.step)]
        return type(value).__name__

    met = next(theirs, None)
    for node in operations(whole.graph):
        alike = met is not None and (node.op, node.target) == (met.op, met.target)
        ours = form((node.args, node.kwargs), whole.sources)
        if alike and met is not None and ours == form((met.args, met.kwargs), other.sources):
            found[node], met = met, next(theirs, None)
        elif (same := _uncast(node, found, whole, other)) is not None:
            found[node] = same
        else:
            return None
    return found if met is None else None


def _uncast(cast: fx.Node, found: Mapping[fx.Node, fx.Node], whole: Captured, other: Captured) -> fx.Node | None:
    """What a cast reads, in another capture where it has the dtype already; None for any other operation."""
    if cast.op != "call_method" or cast.target not in _CASTS or not isinstance(cast.args[0], fx.Node):
        return None
    source, made = cast.args[0], cast.meta.get("example_value")
    if source in whole.sources:
        same = next((n for n, each in other.sources.items() if each.text == whole.sources[source].text), None)
    else:
        same = found.get(source)
    value = same.meta.get("example_value") if same is not None else None
    if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor):
        return None
    return same if (value.dtype, value.device) == (made.dtype, made.device) else None


def place_of_difference(a: Captured, b: Captured) -> str:
    """The user's line of the first operation that only one of two captures has."""
    for x, y in zip(operations(a.graph), operations(b.graph), strict=False):
        if (x.op, x.target) != (y.op, y.target):
            line = line_of(x) or line_of(y)
            return place_in(*line) if line is not None else ""
    longer = max((operations(each.graph) for each in (a, b)), key=len)
    shorter = min(len(operations(each.graph)) for each in (a, b))
    line = line_of(longer[shorter]) if len(longer) > shorter else None
    return place_in(*line) if line is not None else ""


def placeholder_value(captured: Captured, source: Source) -> Any:
    """The value of a source in a capture; None where it does not read it."""
    return next((n.meta.get("example_value") for n, each in captured.sources.items() if each.text == source.text), None)

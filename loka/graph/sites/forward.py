"""A forward of a model as a graph of torch's functions, whether torch has read it or a run has written it.

Nodes have in `meta`: `example_value`, fake or real; of placeholders `origin`; of others `owner` and `caller`, the
qualified names of the module whose forward calls it and of the one that called that; of products, norms and activations
`place`; and `transformed` if a transform of torch.func is active. A tensor that is changed in place stays one value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from loka.graph.sites.sizes import Symbols


@dataclass(frozen=True, slots=True)
class Origin:
    """What a placeholder is: a Parameter or a buffer, by its first qualified name, an input, or something else."""

    parameter: str | None = None
    buffer: str | None = None
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The line of the model's code that calls a function, and the reason if no call in it can be patched."""

    file: str = ""
    line: int = 0
    opaque: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A forward in one mode."""

    graph: fx.Graph
    outputs: tuple[Any, ...]  # tensors that it returns, as nodes have them
    called: frozenset[str]  # modules whose forward runs
    symbols: Symbols  # of sizes; {} where these are numbers


def names_of(model: nn.Module) -> Iterator[tuple[Tensor, Origin]]:
    """Each Parameter and buffer with its names, the first one first."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield parameter, Origin(parameter=name)
    for name, buffer in model.named_buffers():
        yield buffer, Origin(buffer=name)


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that a node calls, and its arguments."""
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), node.target), args, kwargs
    if node.target is getattr:
        return getattr(Tensor, str(args[1])).__get__, args[:1], {}
    return node.target, args, kwargs

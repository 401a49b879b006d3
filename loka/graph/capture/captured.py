"""What a capture gives: the graph of a forward, and everything that it depends on."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from loka.errors import LokaError
from loka.graph.capture.sources import Source

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_FRAME = re.compile(r'File "(.+?)", line (\d+)')  # in the stack of a node


class CannotCaptureError(LokaError):
    """A forward that torch cannot read as one graph; the message is torch's explanation, with the line."""

    lines: tuple[tuple[str, int], ...] = ()  # file and line of each of the user's functions on the way, innermost last


@dataclass(frozen=True, slots=True)
class Read:
    """A plain value that the graph has as a constant, or that decided what is in it."""

    source: Source
    kind: str  # Dynamo's name of the guard: CONSTANT_MATCH, BOOL_FALSE, TYPE_MATCH, ...


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes of the arguments under which the graph is the forward: "x.shape[0] > 5"."""

    text: str
    place: str  # the user's line that relies on it, "at models.py:44 'if x.size(0) > 5:'"; "" where it is not known


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A forward as torch has read it.

    The graph's placeholders are Parameters, buffers, other tensors, and sizes; `sources` says what each is. Nodes have
    fake values (`example_value`), the stack of modules (`modules_around`) and the user's line (`stack_trace`) in
    `meta`. A call of a leaf is a `call_module` node with the leaf's path as its target. `result` is what the forward
    returns, with nodes in the place of tensors and of sizes; None where it was not asked for.
    """

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]  # of the graph's get_attr nodes: tensors made of plain numbers
    sources: Mapping[fx.Node, Source]
    reads: tuple[Read, ...]
    conditions: tuple[Condition, ...]
    result: Any = None


def map_tree(value: Any, function: Callable[[Any], Any]) -> Any:
    """A value with each leaf of its dicts, lists, tuples and dataclasses replaced."""
    if isinstance(value, Source):
        return function(value)
    if isinstance(value, dict):
        held = copy.copy(value)
        held.update((key, map_tree(item, function)) for key, item in value.items())
        return held
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tree(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tree(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for each in dataclasses.fields(value):  # one may be frozen, and its class may compute in its constructor
            object.__setattr__(made, each.name, map_tree(getattr(value, each.name), function))
        return made
    return function(value)


def modules_around(node: fx.Node) -> tuple[str, ...]:
    """Paths of the modules in whose forwards a node was made, outermost first, relative to the captured module."""
    modules: tuple[str, ...] = node.meta["modules"]
    return modules


def line_of(node: fx.Node) -> tuple[str, int] | None:
    """File and line in the user's code of what made a node; None where torch did."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, int(line)) for file, line in found if not is_of_torch(file)]
    return own[-1] if own else None


def place_in(filename: str, line: int) -> str:
    """A line of the user's code, as text: "at models.py:44 'y = x + 1'"."""
    code = linecache.getline(filename, line).strip()
    return f"at {Path(filename).name}:{line} '{code}'" if code else f"at {Path(filename).name}:{line}"


def is_of_torch(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE)) or filename.startswith("<")

"""The arguments of a call as a literal, from which fake ones like them are made where nothing but torch is there.

Tensors, plain values, tuples, lists, dicts and dataclasses are known; anything else is refused.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loka.graph.capture.captured import CannotCaptureError
from loka.graph.fake_module import FakeModules
from loka.graph.source import in_script, qualified

_PLAIN = (bool, int, str, bytes, type(None))
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def described(one: Arguments, other: Arguments) -> str:
    """The arguments of a call and of the same call at another batch size, as one literal.

    A tensor is ("tensor", "float32", ((5, 8), 16)): its dtype, and its sizes, two where they differ. Raises
    CannotCaptureError for what has no literal.
    """
    return repr((_form(one[0], other[0], "arguments"), _form(dict(one[1]), dict(other[1]), "arguments")))


def _form(one: Any, other: Any, name: str) -> Any:
    if type(one) in _PLAIN:
        return one
    if type(one) is float:
        return one if math.isfinite(one) else ("float", repr(one))
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.ndim != other.ndim or one.layout is not torch.strided:
            raise CannotCaptureError(f"its {name} differ in kind from one batch size to another")
        sizes = tuple(a if a == b else (a, b) for a, b in zip(one.shape, other.shape, strict=True))
        return "tensor", str(one.dtype).removeprefix("torch."), sizes
    if isinstance(one, torch.dtype):
        return "dtype", str(one).removeprefix("torch.")
    if type(one) is not type(other):
        raise CannotCaptureError(f"its {name} differ in type from one batch size to another")
    kind = type(one)
    if isinstance(one, dict | list | tuple) and (len(one) != len(other) or (kind is dict and [*one] != [*other])):
        raise CannotCaptureError(f"its {name} differ in number or names from one batch size to another")
    if kind is dict and all(type(key) in _PLAIN for key in one):
        return "dict", tuple((key, _form(one[key], other[key], name)) for key in one)
    if isinstance(one, list | tuple):
        items = tuple(_form(a, b, name) for a, b in zip(one, other, strict=True))
        if kind in (tuple, list):
            return kind.__name__, items
        if hasattr(one, "_fields"):
            return "named", qualified(kind), items
    if dataclasses.is_dataclass(one):
        names = [each.name for each in dataclasses.fields(one)]
        held = tuple((each, _form(getattr(one, each), getattr(other, each), name)) for each in names)
        return "dataclass", qualified(kind), held
    raise CannotCaptureError(f"among its {name} is a {qualified(kind)}, which a package cannot describe")


def described_results(observed: Mapping[str, tuple[Any, Any]]) -> tuple[tuple[str, str], ...]:
    """What children were observed to return in two calls, each as a literal; only what has one is there."""
    found: list[tuple[str, str]] = []
    for path, (one, other) in sorted(observed.items()):
        with contextlib.suppress(CannotCaptureError):
            found.append((path, repr(_form(one, other, "results"))))
    return tuple(found)


def results_of(text: str, fakes: FakeModules) -> tuple[Any, Any]:
    """Fakes of what a child returned in two calls, by its literal."""
    form = ast.literal_eval(text)
    return _made(form, fakes), _made(form, fakes, which=1)


def inputs_of(text: str, fakes: FakeModules) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fake arguments by a text of `described`; sizes that differ between batch sizes may become symbols.

    Raises CannotCaptureError for a class that this process has not loaded.
    """
    args, kwargs = (_made(form, fakes) for form in ast.literal_eval(text))
    return args, kwargs


def _made(form: Any, fakes: FakeModules, which: int = 0) -> Any:
    """What a literal is of; `which` of two sizes its tensors have."""
    if not isinstance(form, tuple):
        return form
    kind, *held = form
    if kind == "tensor":
        dtype, sizes = held
        made = fakes.tensor(
            tuple(size[which] if isinstance(size, tuple) else size for size in sizes), getattr(torch, dtype)
        )
        if made.is_floating_point():  # as behind another layer: it needs a gradient, and may be changed in place
            made = made.requires_grad_().clone()
        for dimension, size in enumerate(sizes):
            if isinstance(size, tuple):
                torch._dynamo.maybe_mark_dynamic(made, dimension)
        return made
    if kind == "float":
        return float(held[0])
    if kind == "dtype":
        return getattr(torch, held[0])
    if kind == "dict":
        return {key: _made(item, fakes, which) for key, item in held[0]}
    if kind == "dataclass":
        cls = _class(held[0])
        made = object.__new__(cls)
        for name, item in held[1]:
            object.__setattr__(made, name, _made(item, fakes, which))
        return made
    items = [_made(item, fakes, which) for item in held[-1]]
    return _class(held[0])(*items) if kind == "named" else (tuple(items) if kind == "tuple" else items)


def _class(name: str) -> Any:
    """A class by its qualified name, which `described` found."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        homes = [sys.modules.get(".".join(parts[:end]))]
        homes += [module for key, module in list(sys.modules.items()) if in_script(key)]
        for home in homes:
            found: Any = home
            for part in parts[end:]:
                found = getattr(found, part, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
                return found
    raise CannotCaptureError(f"its arguments hold a {name}, which is not imported here")

"""Attribute values as text: values that a forward could distinguish have different texts.

Imports only torch and the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace

import torch
from torch import nn

from loka.graph.source import is_foreign, module_name, qualified

_LONGEST = 120  # characters; a longer text is cut to its beginning and a hash of all of it
_MOST = 1000  # nested values in one value
_DEEPEST = 6
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.Size})
_PRINTED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CALLABLE = (type, FunctionType, BuiltinFunctionType, MethodType, functools.partial)


class ValueTexts:
    """Texts of the values that the modules of one owner hold.

    A module or tensor of the owner has the first of its names as text, as generated code reads it by that name.
    `script` is the name of the script that runs, for texts as of its module imported.
    """

    def __init__(self, owner: nn.Module, script: str = "") -> None:
        self._owner, self._script = owner, script
        self._names: dict[int, str] | None = None
        self._left = _MOST

    def text(self, value: object) -> str:
        """A value as text, cut where it is long."""
        self._left = _MOST
        text = self._text(value, _DEEPEST)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... (sha256 {_digest(text)})"

    def name_of(self, value: nn.Module | torch.Tensor) -> str | None:
        """The first name of a module or tensor in the owner; None where it has none."""
        if self._names is None:
            owner = self._owner
            held = (*owner.named_modules(), *owner.named_parameters(), *owner.named_buffers())
            self._names = {id(thing): name for name, thing in reversed(held)}
        return self._names.get(id(value))

    def _text(self, value: object, depth: int) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        self._left -= 1
        if depth == 0 or self._left < 0:
            return "..."
        if isinstance(value, Enum):
            return f"{self._type(value)}.{value.name}"
        if isinstance(value, torch.Tensor | nn.Module):
            return self._held(value)
        if isinstance(value, _PRINTED):
            return str(value)
        if isinstance(value, tuple | list | set | frozenset | dict):
            return self._items(value, depth)
        if isinstance(value, _CALLABLE):
            return self._callable(value, depth)
        return self._type(value) + self._content(value, depth)

    def _held(self, value: nn.Module | torch.Tensor) -> str:
        name = self.name_of(value)
        if name is not None:
            return f"the {'tensor' if isinstance(value, torch.Tensor) else 'module'} {name!r}"
        return tensor_text(value) if isinstance(value, torch.Tensor) else f"a {self._type(value)}"

    def _items(self, value: Collection[object], depth: int) -> str:
        kind = "" if type(value) in (tuple, list, set, frozenset, dict) else self._type(value)
        if isinstance(value, dict):
            pairs = (f"{self._text(key, depth - 1)}: {self._text(item, depth - 1)}" for key, item in value.items())
            return f"{kind}{{{', '.join(pairs)}}}"
        texts = [self._text(item, depth - 1) for item in value]
        if isinstance(value, set | frozenset):
            return f"{kind}{{{', '.join(sorted(texts))}}}"
        if isinstance(value, list):
            return f"{kind}[{', '.join(texts)}]"
        return f"{kind}({', '.join(texts)}{',' if len(texts) == 1 else ''})"

    def _callable(self, value: object, depth: int) -> str:
        if isinstance(value, functools.partial):
            given = {str(place): item for place, item in enumerate(value.args)} | value.keywords
            return f"partial {self._text(value.func, depth - 1)}{self._named(given, depth)}"
        if isinstance(value, MethodType):
            return f"{self._text(value.__func__, depth - 1)} of {self._text(value.__self__, depth - 1)}"
        if isinstance(value, FunctionType) and not is_foreign(value.__module__):
            outside = {**defaults_of(value), **closure_of(value)}
            content = self._named(outside, depth) if outside else ""
            return f"{qualified(value, self._script)}{content} (source {source_digest(value.__code__)})"
        name = str(getattr(value, "__qualname__", "")).removeprefix("_VariableFunctionsClass.")
        return f"{module_name(getattr(value, '__module__', None), self._script) or 'torch'}.{name}"

    def _type(self, value: object) -> str:
        return qualified(type(value), self._script)

    def _content(self, value: object, depth: int) -> str:
        """Text of an object's content; "" for torch's and the standard library's own types."""
        for kind in (int, float, str, bytes):
            if isinstance(value, kind):
                return f"({kind.__repr__(value)})"
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return f"({getattr(value, 'dtype', '')}, {_digest(repr(getattr(value, 'shape', '')))}, {_bytes(value)})"
        if is_dataclass(value):
            return self._named({field.name: getattr(value, field.name, None) for field in fields(value)}, depth)
        if isinstance(value, SimpleNamespace) or not is_foreign(type(value).__module__):
            return self._named(getattr(value, "__dict__", {}), depth)
        return ""

    def _named(self, values: Mapping[str, object], depth: int) -> str:
        return f"({', '.join(f'{name}={self._text(value, depth - 1)}' for name, value in values.items())})"


def tensor_text(tensor: torch.Tensor) -> str:
    """Text of a tensor that is read in each call: only its shape."""
    return f"a tensor {tuple(tensor.shape)}"


def is_data(value: object) -> bool:
    """True for a value whose text shows its content: plain data, collections, objects of a user's class."""
    if isinstance(value, (torch.Tensor, nn.Module, *_CALLABLE)):
        return False
    known = isinstance(value, (*_PLAIN, *_PRINTED, Enum, tuple, list, set, frozenset, dict))
    return known or not is_foreign(type(value).__module__)


def defaults_of(function: FunctionType) -> dict[str, object]:
    """The defaults of a function's arguments, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


def closure_of(function: FunctionType) -> dict[str, object]:
    """Values of a function's closure variables, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                found[name] = cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
    return found


@functools.lru_cache(maxsize=1024)
def source_digest(code: CodeType) -> str:
    """Short hash of a function's source; of its names where there is no source."""
    # The end position distinguishes two functions in one line.
    ends = [(line, column) for _, line, _, column in code.co_positions() if line is not None and column is not None]
    line, column = max(ends, default=(code.co_firstlineno, 0))
    try:
        return _digest(f"{inspect.getsource(code)}{line - code.co_firstlineno}:{column}")
    except OSError:
        return _digest(repr((code.co_names, code.co_varnames)))


def _bytes(value: object) -> str:
    return hashlib.sha256(value.tobytes()).hexdigest()[:16]  # type: ignore[attr-defined]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]

"""Record of everything a traced forward read: children and their order, attributes, constants from outside.

A generated forward is valid for every model in which these are the same. Imports only torch and the standard library,
as the comparison runs on the training machine.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType

import torch
from torch import nn

from loka.graph.source import (
    definition,
    functions_named,
    functions_of,
    is_foreign,
    live_floats,
    module_name,
    names_in,
    operators_of,
    qualified,
)
from loka.graph.value_text import ValueTexts, closure_of, defaults_of, is_data, source_digest, tensor_text

LIVE = "float"  # text of a float that the generated forward reads in each call, whatever its value
PRESENT = "a module"  # text of a child that was read but not called
NAMESPACE = "__dict__"  # name for a read of all attributes at once
SOURCE = "source "  # prefix of the text of a method; a hash of its source follows
_TYPE_TESTS = frozenset({"isinstance", "issubclass", "type"})
_TABLES = {"_parameters", "_buffers"}  # read where a forward iterates over all of them
_OURS = "loka_"  # prefix of the buffers that LoKA adds to a bound module
_OWN = frozenset(vars(nn.Module())) - _TABLES  # attributes of every module


@dataclass(frozen=True, slots=True)
class Reads:
    """Record of what a forward read from modules with equal values."""

    modules: tuple[str, ...]  # paths below the owner; "" is the owner itself
    type: str  # "torch.nn.modules.normalization.LayerNorm"
    # Names of the children of a container, in order; their number where they are "0", "1", ...; None where the forward
    # did not look.
    holds: int | tuple[str, ...] | None = None
    values: tuple[tuple[str, str], ...] = ()  # attributes, each with its value as text: ("eps", "1e-05")


class NoValue(Enum):
    """Stands for an attribute without a value of its own."""

    OF_CLASS = "of the class"  # a method or property: its source is compared, and its reads are recorded
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Traced:
    """Modules and attributes read during a trace. Modules are named by their paths below the owner."""

    names: Mapping[str, Collection[str]]  # attributes read from each module
    expanded: Collection[str]  # modules whose floats are read live, whether or not their forward was called
    inlined: Collection[str]  # children whose forward is part of the generated one
    called: Collection[str]  # children that the generated forward calls as modules
    relied: Collection[str] = ()  # called children that, by their type, always return a new tensor


def reads_of(owner: nn.Module, traced: Traced) -> tuple[Reads, ...]:
    """The record of one trace, with the owner's current values."""
    order = {path: place for place, (path, _) in enumerate(owner.named_modules())}
    children = {path: owner.get_submodule(path) for path in ("", *traced.names, *traced.inlined, *traced.called)}
    asking = [path for path in ("", *traced.inlined) if _asks_for_types(children[path])]
    asked_of = {path for path in traced.called if any(not outer or path.startswith(f"{outer}.") for outer in asking)}
    typed = {*traced.inlined, *traced.relied, *asked_of}
    reader = _ForwardReader(owner, traced)
    found: dict[tuple[str, int | tuple[str, ...] | None, tuple[tuple[str, str], ...]], list[str]] = {}
    for path in sorted(children, key=order.__getitem__):
        child, names = children[path], traced.names.get(path, ())
        key = (
            qualified(type(child)),
            held_by(child) if _looks_inside(child, names) else None,
            reader.values(path, child),
        )
        if key[1:] != (None, ()) or path in typed:
            found.setdefault(key, []).append(path)
    return tuple(Reads(tuple(alike), *key) for key, alike in found.items())


class _ForwardReader:
    """Text of the attributes read from each module, except those recorded elsewhere."""

    def __init__(self, owner: nn.Module, traced: Traced) -> None:
        self._traced, self._texts = traced, ValueTexts(owner)
        children = {path: owner.get_submodule(path) for path in traced.names}
        self._read = {path for path, names in traced.names.items() if _tells(children[path], names)}

    def values(self, path: str, child: nn.Module) -> tuple[tuple[str, str], ...]:
        """Names and texts for one module."""
        names = self._traced.names.get(path, ())
        live = live_floats(child, functions_of(child)) if path in ("", *self._traced.expanded) else ()
        found = {name: method_text(child, name) for name in self._methods(path, child)}
        for name in _meant(child, names):
            text = LIVE if name in live else self._value(path, name, attribute_of(child, name))
            found |= {name: text} if text else {}
        return tuple(sorted(found.items()))

    def _value(self, path: str, name: str, value: object) -> str:
        here = f"{path}.{name}".lstrip(".")
        if not isinstance(value, torch.Tensor | nn.Module) or self._texts.name_of(value) != here:
            return value_text(value, self._texts)
        if isinstance(value, nn.Module):
            return "" if here in {*self._read, *self._traced.inlined, *self._traced.called} else PRESENT
        # Shapes of the owner's and inlined children's Parameters are recorded in the binding.
        shaped = isinstance(value, nn.Parameter) and path in ("", *self._traced.inlined)
        return "" if shaped else tensor_text(value)

    def _methods(self, path: str, child: nn.Module) -> Iterator[str]:
        """Methods whose source is not covered by the hash of the owner's forward."""
        inlined = ("", *self._traced.inlined)
        yield from operators_of(child) if path in (*inlined, *self._read) else ()
        if path not in inlined:
            names = set(self._traced.names.get(path, ())) - vars(nn.Module).keys()
            own = (name for name in names if attribute_of(child, name) is NoValue.OF_CLASS)
            yield from (name for name in own if functions_named(child, name))


def value_text(value: object, texts: ValueTexts) -> str:
    """Text of a value returned by `attribute_of`."""
    return value.value if isinstance(value, NoValue) else texts.text(value)


def method_text(module: nn.Module, name: str) -> str:
    """Hash of the source of a method and of the functions it calls."""
    digests = (source_digest(function.__code__) for function in functions_named(module, name))
    return SOURCE + hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def _meant(child: nn.Module, names: Collection[str]) -> set[str]:
    """The names read from a module that determine the forward beyond its source."""
    found = set(names)
    if NAMESPACE in found:
        found |= {*vars(child), *child._parameters, *child._buffers}
    if _looks_inside(child, found):
        found |= {*child._modules}
    for table in _TABLES & found:
        found |= {*getattr(child, table)}
    own = found - _OWN - {_held_in(child)}
    return {name for name in own if attribute_of(child, name) is not NoValue.OF_CLASS}


def _asks_for_types(module: nn.Module) -> bool:
    return any(_TYPE_TESTS & names_in(function) for function in functions_of(module))


def _tells(child: nn.Module, names: Collection[str]) -> bool:
    """True if reading these names of a module determines the forward beyond its source."""
    return _looks_inside(child, names) or bool(_meant(child, names))


def _looks_inside(module: nn.Module, names: Collection[str]) -> bool:
    """True if a forward that read these names iterated over the module's children."""
    return _held_in(module) in names or "_modules" in names or NAMESPACE in names


def _held_in(module: nn.Module) -> str:
    """The attribute in which a torch container keeps its items."""
    if isinstance(module, nn.ParameterList):
        return "_size"
    return "_keys" if isinstance(module, nn.ParameterDict) else "_modules"


def held_by(module: nn.Module) -> int | tuple[str, ...]:
    """Names of a container's items, in order; their number where they are "0", "1", ..."""
    if isinstance(module, nn.ParameterList):
        return len(module)
    names = tuple(map(str, module.keys() if isinstance(module, nn.ParameterDict) else module._modules))
    return len(names) if all(name == str(place) for place, name in enumerate(names)) else names


def attribute_of(module: nn.Module, name: str) -> object:
    """Value of a module's attribute, read without running code; for the Parameter and buffer tables, their names."""
    if name in _TABLES:
        return tuple(each for each in getattr(module, name) if not each.startswith(_OURS))
    for held in (vars(module), module._parameters, module._modules, module._buffers):
        if name in held:
            return held[name]
    for base in type(module).__mro__:
        if name in vars(base):
            value = vars(base)[name]
            return NoValue.OF_CLASS if base in (nn.Module, object) or hasattr(type(value), "__get__") else value
    return NoValue.OF_CLASS if name.startswith("__") and name.endswith("__") else NoValue.ABSENT


def constants_of(owner: nn.Module, inlined: Collection[str], read: Iterable[Reads]) -> tuple[tuple[str, str], ...]:
    """Names from outside the model that a forward may read, each with its value as text.

    These are global variables, those of imported modules, closure variables, and defaults that are not literals.
    """
    functions = _functions(owner, inlined, read)
    literal = {f"{name} of {qualified(function)}" for function in functions for name in _literals(function)}
    found = outside_values(owner, inlined, read)
    texts = ValueTexts(owner)
    return tuple((key, texts.text(value)) for key, value in sorted(found.items()) if key not in literal)


def outside_values(
    owner: nn.Module, inlined: Collection[str], read: Iterable[Reads], script: str = ""
) -> dict[str, object]:
    """Values of the names from outside that the functions of a forward use, including literal defaults.

    `read` is the record of the owner's modules, `inlined` names the children whose forward was traced, `script` is the
    name of the script that runs.
    """
    found: dict[str, object] = {}
    for function in _functions(owner, inlined, read):
        home = module_name(function.__module__, script) or ""
        found |= _globals(home, function.__globals__, names_in(function), set())
        own = {**closure_of(function), **defaults_of(function)}
        found |= {f"{name} of {qualified(function, script)}": value for name, value in own.items()}
    return {key: value for key, value in found.items() if is_data(value)}


def _globals(home: str, scope: Mapping[str, object], names: Collection[str], seen: set[str]) -> dict[str, object]:
    """Values of the given names in a file's globals, and in the modules imported under such a name."""
    seen.add(home)
    found: dict[str, object] = {}
    for name in names:
        value = scope.get(name)
        if not isinstance(value, ModuleType):
            found |= {f"{home}.{name}": value} if name in scope and not name.startswith("__") else {}
        elif value.__name__ not in seen and not is_foreign(value.__name__):
            found |= _globals(value.__name__, vars(value), names, seen)
    return found


def _functions(owner: nn.Module, inlined: Collection[str], read: Iterable[Reads]) -> Iterable[FunctionType]:
    """The functions that a traced forward may call, each once."""
    found = [function for path in ("", *inlined) for function in functions_of(owner.get_submodule(path))]
    for reads in read:
        for name in [name for name, text in reads.values if text.startswith(SOURCE)]:
            for path in reads.modules:
                found += functions_named(owner.get_submodule(path), name)
    return dict.fromkeys(found)


def _literals(function: FunctionType) -> Iterator[str]:
    """Arguments of a function with literal defaults, which its source shows."""
    found = definition(function)
    if found is None:
        return
    made = found.args
    plain = [*made.posonlyargs, *made.args]
    pairs = [*zip(plain[len(plain) - len(made.defaults) :], made.defaults, strict=True)]
    pairs += [(arg, default) for arg, default in zip(made.kwonlyargs, made.kw_defaults, strict=True) if default]
    for argument, default in pairs:
        parts = [part for part in ast.walk(default) if isinstance(part, ast.Name | ast.Attribute | ast.Call)]
        if not parts:
            yield argument.arg

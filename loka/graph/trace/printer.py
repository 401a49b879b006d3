"""Names for traced operations in Python: constants, attribute paths, functions under their public names, variables.

All of it becomes code, so nothing is copied from a model unchecked: names must be identifiers or are repr'd, and
constants are printed only for known types.
"""

from __future__ import annotations

import builtins
import cmath
import keyword
import math
import re
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import fx, nn

from loka.graph.expression import Arg, Call, Constant, Ref, RefKind, text_of
from loka.graph.ir import CannotTraceError

RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, *keyword.softkwlist}
    | {"self", "torch", "dispatch", "kernels", "modules", "Tensor", "Any", "ctx"}
)  # not allowed as names of variables
HIDING = frozenset({"self", "torch", "dispatch", "kernels", "modules", "getattr", "slice", "float", "complex", "abs"})
# not allowed as names of arguments: the text of the forward, or of the file around it, uses these names

_SINGLETONS = (torch.dtype, torch.layout, torch.memory_format)
_NAMESPACES = {
    "torch": torch, "torch.nn.functional": torch.nn.functional, "torch.special": torch.special,
    "torch.linalg": torch.linalg, "torch.fft": torch.fft,
}  # fmt: skip


class TrainingFlag:
    """Stands for `self.training` in a traced argument: True in the training trace, False in the other."""


def is_identifier(name: str) -> bool:
    """True if a name can be used in the text of a method: plain ASCII, no keyword, not mangled by a class body."""
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name) and not name.startswith("__")


def constant(value: object) -> str:
    """A constant as Python. Raises CannotTraceError for types whose repr is not known to be safe code."""
    return text_of(argument(value, {}, ""))


def attribute(root: nn.Module, path: str) -> str:
    """The expression on `self` for a dotted path below a module: `self.fmb[0].weight`, `self.towers["user"].scale`.

    Names that are not identifiers are reached through get_submodule, get_parameter, get_buffer or getattr, repr'd.
    """
    text, value = "self", root
    for name in path.split(".") if path else ():
        text += _step(value, name)
        value = getattr(value, name)
    return text


def _step(parent: object, name: str) -> str:
    if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ParameterList) and name.isdecimal():
        keys = list(parent._modules) if not isinstance(parent, nn.ParameterList) else None
        if keys is None or keys[int(name) : int(name) + 1] == [name]:
            return f"[{int(name)}]"
    if isinstance(parent, nn.ModuleDict | nn.ParameterDict) and name in parent:
        return f"[{_quoted(name)}]"
    if is_identifier(name):
        return f".{name}"
    if isinstance(parent, nn.Module):
        for getter, held in (
            ("get_submodule", parent._modules),
            ("get_parameter", parent._parameters),
            ("get_buffer", parent._buffers),
        ):
            if name in held:
                return f".{getter}({_quoted(name)})"
    raise CannotTraceError(f"attribute {name!r} has no name that could be printed")


def _quoted(name: str) -> str:
    """A string literal, in double quotes where no escape is needed."""
    return f'"{name}"' if re.fullmatch(r"[\w .:/-]*", name, re.ASCII) else repr(name)


@lru_cache(maxsize=1)
def _public_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for namespace, module in _NAMESPACES.items():
        for name in sorted(vars(module)):
            thing = getattr(module, name)
            if is_identifier(name) and not name.startswith("_") and callable(thing):
                names.setdefault(id(thing), f"{namespace}.{name}")
    return names


def public_name(function: object) -> str:
    """ "torch.nn.functional.layer_norm" for a function of torch; raises CannotTraceError for any other."""
    found = _public_names().get(id(function))
    if found is not None:
        return found
    own = str(getattr(function, "__name__", ""))
    if getattr(function, "__module__", "") == "torch._C._nn" and hasattr(torch.nn.functional, own):
        return f"torch.nn.functional.{own}"
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        parts = str(function).replace("::", ".").split(".")
        if all(is_identifier(part) for part in parts):
            return ".".join(["torch.ops", *parts])
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function))
    raise CannotTraceError(f"calls '{name}', which is no public function of torch")


def variable(hint: str, taken: set[str]) -> str:
    """A free lower-case identifier close to `hint`, numbered if taken; adds it to `taken`."""
    plain = "_".join(re.findall(r"[A-Za-z0-9]+", hint)).lower()[:40] or "value"
    plain = f"v_{plain}" if plain[0].isdigit() else plain
    name, number = plain, 0
    while name in taken or name in RESERVED:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name)
    return name


def argument(value: object, refs: Mapping[fx.Node, Ref], training: str) -> Arg:
    """An argument of a traced operation; `training` is the expression that a flag stands for.

    Raises CannotTraceError for a constant that cannot be printed.
    """
    if isinstance(value, fx.Node):
        return refs[value]
    if isinstance(value, TrainingFlag):
        return Ref(RefKind.ATTRIBUTE, training)
    if type(value) is tuple or isinstance(value, torch.Size):
        return tuple(argument(each, refs, training) for each in value)
    if type(value) is list:
        return Call("list", tuple(argument(each, refs, training) for each in value))
    if type(value) is dict:
        pairs = ((argument(key, refs, training), argument(item, refs, training)) for key, item in value.items())
        return Call("dict", tuple(pairs))
    if isinstance(value, slice):
        return Call("slice", tuple(argument(each, refs, training) for each in (value.start, value.stop, value.step)))
    return _plain(value)


def _plain(value: object) -> Arg:
    if value is None or isinstance(value, bool) or type(value) in (int, str) or _is_finite(value):
        return value  # type: ignore[return-value]
    if value is ... or type(value) is bytes or (type(value) is complex and cmath.isfinite(value)):
        return Constant("..." if value is ... else repr(value))
    if type(value) is float:
        return Constant(f'float("{value!r}")')
    if isinstance(value, _SINGLETONS):
        return Constant(str(value))
    if isinstance(value, torch.device):
        return Constant(f"torch.device({str(value)!r})")
    raise CannotTraceError(f"a constant of type {type(value).__module__}.{type(value).__qualname__} cannot be printed")


def _is_finite(value: object) -> bool:
    return type(value) is float and math.isfinite(value)

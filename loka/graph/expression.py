"""Expressions of a forward: operations on its locals and on attributes of its module, as nodes of torch.fx have them.

They are frozen, hashable and part of plans. `text_of` is the one place that makes Python of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Union

from typing_extensions import TypeAliasType  # of pydantic and torch; in `typing` from Python 3.12 on


class RefKind(StrEnum):
    """What a name in an expression stands for."""

    LOCAL = "local"  # a variable of the forward: an argument or an earlier target
    ATTRIBUTE = "attribute"  # an expression on self: "self.fmb[0].weight"
    PRODUCT = "product"  # the product of a site's GEMM, of which the expression is a view


@dataclass(frozen=True, slots=True)
class Ref:
    """A name in an expression. `text` is Python that LoKA has built, never copied from a model."""

    kind: RefKind
    text: str

    def is_of(self, parameter: str) -> bool:
        """True if it is the Parameter of this expression, or a part or a view of it."""
        return self.text == parameter or self.text.startswith((f"{parameter}[", f"{parameter}."))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that JSON has no type for, as Python: "torch.float32", "..."."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: `target` called with these arguments.

    The target is a function of torch ("torch.cat"), a child ("self.fmb[0]"), a method of the first argument
    (".reshape"), one of Python's operators ("operator.add", "operator.getitem"), "getattr", an "if" of a condition and
    its two values, or what makes a "list", a "dict" of pairs or a "slice".
    """

    target: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()


Arg = TypeAliasType("Arg", Union[bool, int, float, str, Ref, Constant, Call, "tuple[Arg, ...]", None])

PRODUCT = Ref(RefKind.PRODUCT, "product")

INFIX: Mapping[str, str] = {
    "operator.add": "+", "operator.sub": "-", "operator.mul": "*", "operator.truediv": "/", "operator.floordiv": "//",
    "operator.mod": "%", "operator.pow": "**", "operator.matmul": "@", "operator.and_": "&", "operator.or_": "|",
    "operator.xor": "^", "operator.lshift": "<<", "operator.rshift": ">>", "operator.eq": "==", "operator.ne": "!=",
    "operator.lt": "<", "operator.le": "<=", "operator.gt": ">", "operator.ge": ">=",
}  # fmt: skip
PREFIX: Mapping[str, str] = {"operator.neg": "-", "operator.pos": "+", "operator.invert": "~"}


def local(name: str) -> Ref:
    """A variable of the forward."""
    return Ref(RefKind.LOCAL, name)


def method(value: Arg, name: str, *args: Arg, **kwargs: Arg) -> Call:
    """A method of a tensor: `value.name(*args, **kwargs)`."""
    return Call(f".{name}", (value, *args), tuple(kwargs.items()))


def function(name: str, *args: Arg, **kwargs: Arg) -> Call:
    """A function of torch.nn.functional."""
    return Call(f"torch.nn.functional.{name}", args, tuple(kwargs.items()))


def expression_of(parameter: str) -> str:
    """A Parameter in a forward, by its path: self.fmb[3].weight."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parameter.split("."))


def refs_in(*values: Arg) -> tuple[Ref, ...]:
    """The names that expressions read, each once, in order."""
    return tuple(dict.fromkeys(each for value in values for each in _refs(value)))


def _refs(value: Arg) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Call):
        for each in (*value.args, *(item for _, item in value.kwargs)):
            yield from _refs(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from _refs(each)


def locals_in(*values: Arg) -> tuple[str, ...]:
    """The names of the locals that expressions read, each once, in order."""
    return tuple(each.text for each in refs_in(*values) if each.kind is RefKind.LOCAL)


def mapped(value: Arg, change: Callable[[Ref], Arg]) -> Arg:
    """An expression with something else for each of its names."""
    if isinstance(value, Ref):
        return change(value)
    if isinstance(value, Call):
        kwargs = tuple((name, mapped(each, change)) for name, each in value.kwargs)
        return replace(value, args=tuple(mapped(each, change) for each in value.args), kwargs=kwargs)
    if isinstance(value, tuple):
        return tuple(mapped(each, change) for each in value)
    return value


def items_of(value: Arg) -> tuple[Arg, ...]:
    """The items of a tuple or list; of anything else, itself."""
    if isinstance(value, Call) and value.target == "list":
        return value.args
    return value if isinstance(value, tuple) else (value,)


def of_product(view: Arg, product: Arg) -> Arg:
    """A view of a product, for a product that is computed so."""
    return mapped(view, lambda ref: product if ref == PRODUCT else ref)


def writes(value: Arg) -> bool:
    """True for a call that is asked to write into a tensor: `inplace=True`, `out=y`."""
    kwargs = value.kwargs if isinstance(value, Call) else ()
    return any(name == "out" or (name, each) == ("inplace", True) for name, each in kwargs)


def text_of(value: Arg, name: Callable[[Ref], str] = lambda ref: ref.text) -> str:
    """An expression as Python; `name` gives the text of each name in it."""
    if isinstance(value, Ref):
        return name(value)
    if isinstance(value, Constant):
        return value.text
    if isinstance(value, tuple):
        return _sequence([text_of(each, name) for each in value], "()")
    return _call(value, name) if isinstance(value, Call) else repr(value)


def _call(value: Call, name: Callable[[Ref], str]) -> str:
    target, args = value.target, value.args
    if target in INFIX:
        return f"{_side(args[0], name)} {INFIX[target]} {_side(args[1], name)}"
    if target in PREFIX:
        return f"{PREFIX[target]}{_side(args[0], name)}"
    if target == "operator.getitem":
        return f"{_atom(args[0], name)}[{_index(args[1], name)}]"
    if target == "getattr":
        return f"{_atom(args[0], name)}.{args[1]}"
    if target == "if":
        condition, then, otherwise = (text_of(each, name) for each in args)
        return f"{then} if {condition} else {otherwise}"
    if target == "list":
        return _sequence([text_of(each, name) for each in args], "[]")
    if target == "dict":
        pairs = (each for each in args if isinstance(each, tuple))
        return "{" + ", ".join(f"{text_of(key, name)}: {text_of(item, name)}" for key, item in pairs) + "}"
    callee, given = (_atom(args[0], name) + target, args[1:]) if target.startswith(".") else (target, args)
    named = (f"{key}={text_of(item, name)}" for key, item in value.kwargs)
    return f"{callee}({', '.join((*(text_of(each, name) for each in given), *named))})"


def _sequence(items: list[str], brackets: str) -> str:
    comma = "," if brackets == "()" and len(items) == 1 else ""
    return f"{brackets[0]}{', '.join(items)}{comma}{brackets[1]}"


def _index(value: Arg, name: Callable[[Ref], str]) -> str:
    """What stands in square brackets."""
    if isinstance(value, tuple) and value:
        return _sequence([_slice(each, name) for each in value], "()")[1:-1]
    return _slice(value, name)


def _slice(value: Arg, name: Callable[[Ref], str]) -> str:
    if not isinstance(value, Call) or value.target != "slice":
        return text_of(value, name)
    start, stop, step = ("" if each is None else text_of(each, name) for each in value.args)
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _atom(value: Arg, name: Callable[[Ref], str]) -> str:
    """What stands before a dot or a bracket."""
    text = text_of(value, name)
    is_operator = isinstance(value, Call) and value.target in (*INFIX, *PREFIX, "if")
    return f"({text})" if is_operator or not isinstance(value, Ref | Call | str | tuple) else text


def _side(value: Arg, name: Callable[[Ref], str]) -> str:
    """One side of an operator."""
    text = text_of(value, name)
    return f"({text})" if text.startswith("-") or (isinstance(value, Call) and value.target in (*INFIX, "if")) else text

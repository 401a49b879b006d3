"""Guards of a straight-line forward: conditions on its arguments, and loops and branches taken as planned.

A generated forward checks the conditions where it starts; a call that meets one of them otherwise runs the module's
own forward. Loops were unrolled and branches taken as planned, which every call checks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sized
from typing import Any, TypeVar

from loka.errors import InputError

Items = TypeVar("Items", bound=Sized)
Value = TypeVar("Value")
Named = TypeVar("Named", bound=Mapping[Any, Any])


def checked_length(items: Items, count: int) -> Items:
    """Return the list, tuple or Tensor unchanged. Raises InputError unless it has `count` items, as when planned."""
    if len(items) != count:
        raise InputError(
            f"a loop of this model was planned over {count} items and meets {len(items)}: run loka generate again, "
            "with model.inputs as the model is called"
        )
    return items


def checked_keys(items: Named, *keys: str | int) -> Named:
    """Return the dict unchanged. Raises InputError unless it has these keys in this order, as when planned."""
    if tuple(items) != keys:
        planned, met = (", ".join(map(repr, names)) or "none" for names in (keys, items))
        raise InputError(
            f"a loop of this model was planned over the keys {planned} and meets {met}: run loka generate again, with "
            "model.inputs as the model is called"
        )
    return items


def checked_branch(value: Value, planned: Value) -> Value:
    """Return the value unchanged. Raises InputError unless it is the one by which a branch was planned."""
    if value != planned:
        raise InputError(
            f"a branch of this model was planned for {planned} and meets {value}: run loka generate again, with "
            "model.inputs as the model is called"
        )
    return value


# Their names in generated code.
NAMES = {
    checked_length: "dispatch.checked_length",
    checked_keys: "dispatch.checked_keys",
    checked_branch: "dispatch.checked_branch",
}


# Without the orders: of a NaN, neither `x < 1` nor `x >= 1` is true.
_OPPOSITES: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip


def negated(condition: str) -> str:
    """The opposite of a condition, as Python: "mask is not None" for "mask is None"."""
    node = ast.parse(condition, mode="eval").body
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITES:
            return ast.unparse(ast.Compare(node.left, [_OPPOSITES[type(operator)]], node.comparators))
        case ast.UnaryOp(op=ast.Not()):
            return ast.unparse(node.operand)
    return ast.unparse(ast.UnaryOp(ast.Not(), node))


def any_fails(guards: Iterable[str]) -> str:
    """A condition that is true where one of the guards is false: "mask is not None or x.dim() != 3"."""
    return " or ".join(map(negated, guards))

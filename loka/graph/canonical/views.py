"""Orders of axes: what a statement that only moves the axes of a tensor makes of them."""

from __future__ import annotations

import ast

from loka.graph.ir import Statement
from loka.graph.patterns.norm import literal

_SWAPS = ("transpose", "swapaxes", "swapdims")
_MOVES = ("movedim", "moveaxis")
_PLAIN = ("contiguous",)  # the same values in another layout of memory
_NAMES = frozenset({*_SWAPS, *_MOVES, *_PLAIN, "permute", "T", "mT", "t"})


def expression(statement: Statement) -> ast.expr | None:
    """A statement's expression, with operand i as the name `operand_i`; None where it is none."""
    names = [f"operand_{number}" for number in range(len(statement.operands))]
    try:
        return ast.parse(statement.template.format(*names), mode="eval").body
    except (SyntaxError, ValueError, IndexError, KeyError):
        return None


def called(node: ast.expr) -> tuple[str, list[ast.expr]] | None:
    """The name of a function of torch, or of a tensor's method, and its arguments, the tensor first.

    An attribute (`x.mT`) is a method without arguments. None for other expressions, and for keywords but those of last
    arguments (`dims`, `dim0` and `dim1`, `other`, `mat2`): with `input` named, the order would be another.
    """
    if isinstance(node, ast.Attribute):
        return node.attr, [node.value]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if any(keyword.arg not in ("dims", "dim0", "dim1", "other", "mat2") for keyword in node.keywords):
        return None
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    owner = ast.unparse(node.func.value)
    if owner in ("torch", "torch.nn.functional"):
        return node.func.attr, given
    return node.func.attr, [node.func.value, *given]


def only_moves_axes(statement: Statement) -> bool:
    """True for a view that moves axes of one tensor, without a check of its arguments."""
    node = expression(statement)
    parts = None if node is None else called(node)
    return parts is not None and parts[0] in _NAMES and len(statement.operands) == 1


def moved_axes(node: ast.expr, dimensions: int) -> tuple[ast.expr, tuple[int, ...]] | None:
    """What a view moves: its tensor, and for each axis of the result the tensor's; None for another expression.

    `dimensions` is the number of dimensions of both.
    """
    parts = called(node)
    if parts is None or not parts[1]:
        return None
    name, (tensor, *given) = parts
    if name == "einsum":
        order = _renamed(literal(tensor), dimensions) if len(given) == 1 else None
        return None if order is None else (given[0], order)
    order = _order(name, [literal(each) for each in given], dimensions)
    return None if order is None else (tensor, order)


def _order(name: str, given: list[object], dimensions: int) -> tuple[int, ...] | None:
    axes = list(range(dimensions))
    if name in _PLAIN and not given:
        return tuple(axes)
    if (name in ("T", "t") and dimensions == 2) or name == "mT":
        given, name = [-2, -1], "transpose"
    if name == "permute":
        order = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
        numbers = [each % dimensions for each in order if type(each) is int]
        return tuple(numbers) if sorted(numbers) == axes and len(order) == dimensions else None
    if len(given) != 2 or not all(type(each) is int and -dimensions <= each < dimensions for each in given):
        return None
    a, b = (each % dimensions for each in given if isinstance(each, int))
    if name in _SWAPS:
        axes[a], axes[b] = axes[b], axes[a]
        return tuple(axes)
    if name in _MOVES:
        axes.insert(b, axes.pop(a))
        return tuple(axes)
    return None


def _renamed(equation: object, dimensions: int) -> tuple[int, ...] | None:
    """The order of a view written as `torch.einsum("bnd->bdn", x)`."""
    before, _, after = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    if not before.isalpha() or len(before) != dimensions or len(set(before)) != dimensions:
        return None
    return tuple(before.index(label) for label in after) if sorted(before) == sorted(after) else None

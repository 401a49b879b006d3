"""Orders of axes: what a statement that only moves the axes of a tensor makes of them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from loka.graph.canonical.layout import Size, is_fixed
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


class CannotEmitError(Exception):
    """A value that no statement of ours makes: the forward stays as it was traced."""


def _sizes(shape: Sequence[Size]) -> list[str]:
    varying = [place for place, size in enumerate(shape) if not is_fixed(size)]
    if len(varying) > 1:
        raise CannotEmitError
    return ["-1" if place in varying else str(size[0]) for place, size in enumerate(shape)]


def reshape_text(shape: Sequence[Size], to: Sequence[Size]) -> str:
    """The text of a view from one shape to another."""
    one = (1,) * len((*shape, *to)[0])
    if shape and (*shape[:-1], one, *shape[-1:]) == tuple(to):  # one block
        return f"{{0}}.unflatten(-1, (1, {_sizes(shape[-1:])[0]}))"
    if to and (one, *to) == tuple(shape):
        return "{0}.squeeze(0)"
    if (*to, one) == tuple(shape) and to:
        return "{0}.flatten(-2)"
    if to and (*to[:-1], one, *to[-1:]) == tuple(shape):
        return "{0}.flatten(-2)"
    lead = 0
    while lead < min(len(shape), len(to)) and shape[lead] == to[lead]:
        lead += 1
    tail = 0
    while tail < min(len(shape), len(to)) - lead and shape[-1 - tail] == to[-1 - tail]:
        tail += 1
    before, after = len(shape) - lead - tail, len(to) - lead - tail
    whole = tail == 0  # the last dimensions: counted from the end, as patterns read them
    if after == 1 and before > 1:
        return f"{{0}}.flatten({-before})" if whole else f"{{0}}.flatten({lead}, {lead + before - 1})"
    if before == 1 and after > 1 and sum(not is_fixed(size) for size in to[lead : lead + after]) < 2:
        return f"{{0}}.unflatten({-1 if whole else lead}, ({', '.join(_sizes(to[lead : lead + after]))}))"
    return f"{{0}}.reshape({', '.join(_sizes(to))})"


def permutation_text(order: Sequence[int]) -> str:
    moved = [place for place, each in enumerate(order) if place != each]
    if tuple(order) == (1, 0):
        return "{0}.t()"
    if len(moved) == 2:
        return f"{{0}}.transpose({moved[0]}, {moved[1]})"
    return f"{{0}}.permute({', '.join(map(str, order))})"

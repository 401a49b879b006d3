"""Guards of a straight-line forward: conditions on its arguments and attributes.

A generated forward checks them where it starts; a call that meets one of them otherwise runs the module's own forward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

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

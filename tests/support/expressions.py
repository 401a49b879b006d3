"""Expressions of forwards from Python text and back, for tests: "torch.cat([{0}, {1}], 1)" of two names."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from loka.graph.expression import PRODUCT, Arg, Call, Constant, Ref, local, refs_in, text_of
from loka.graph.ir import SiteCall, Statement

_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.MatMult: "matmul", ast.Pow: "pow",
    ast.FloorDiv: "floordiv", ast.USub: "neg",
}  # fmt: skip
_COMPARISONS = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq"}


def expression(template: str, operands: Sequence[Ref] = ()) -> Arg:
    """The expression of a text; `{0}`, `{1}`, ... are the operands, and other bare names are locals."""
    names = {f"operand_{place}": ref for place, ref in enumerate(operands)}
    return _arg(ast.parse(template.format(*names) if names else template, mode="eval").body, names)


def statement(target: str, op: str, template: str, operands: Sequence[Ref] = (), call: SiteCall | None = None,
              note: str = "") -> Statement:  # fmt: skip
    """A statement whose value is a text with these operands."""
    return Statement(target, op, expression(template, operands), call, note)


def site_call(
    site: str, operands: Sequence[Ref], x: str, weight: str, bias: str | None = None, out: str = "{0}"
) -> SiteCall:
    """A site's call whose parts are texts with these operands; `out` is one with the product."""
    parts = [expression(each, operands) for each in (x, weight)]
    return SiteCall(site, *parts, None if bias is None else expression(bias, operands), expression(out, (PRODUCT,)))


def template(step: Statement) -> str:
    """The text of a statement's value with numbers in the place of names."""
    refs = refs_in(step.value)
    return text_of(step.value, lambda ref: f"{{{refs.index(ref)}}}")


def _arg(node: ast.expr, names: dict[str, Ref]) -> Arg:
    def inner(*nodes: ast.expr) -> tuple[Arg, ...]:
        return tuple(_arg(each, names) for each in nodes)

    match node:
        case ast.Name(name):
            return names.get(name, local(name))
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)):
            return -value
        case ast.UnaryOp(op, value):
            return Call(f"operator.{_OPERATORS[type(op)]}", inner(value))
        case ast.Tuple(items):
            return inner(*items)
        case ast.List(items):
            return Call("list", inner(*items))
        case ast.BinOp(left, op, right):
            return Call(f"operator.{_OPERATORS[type(op)]}", inner(left, right))
        case ast.Compare(left, [op], [right]):
            return Call(f"operator.{_COMPARISONS[type(op)]}", inner(left, right))
        case ast.Subscript(value, index):
            return Call("operator.getitem", inner(value, index))
        case ast.Slice():
            ends = (node.lower, node.upper, node.step)
            return Call("slice", tuple(None if each is None else _arg(each, names) for each in ends))
        case ast.Call(func, args, keywords):
            named = tuple((str(each.arg), _arg(each.value, names)) for each in keywords)
            if _reads(func) and isinstance(func, ast.Attribute):
                return Call(f".{func.attr}", inner(func.value, *args), named)
            return Call(ast.unparse(func), inner(*args), named)
        case ast.Attribute(value, name) if _reads(node):
            return Call("getattr", (*inner(value), name))
    text = ast.unparse(node)  # of what is no operation
    for name, ref in names.items():
        text = text.replace(name, ref.text)
    return Constant(f"({text})" if isinstance(node, ast.IfExp) else text)


def _reads(node: ast.expr) -> bool:
    """True if a local or an operand is in an expression."""
    return any(isinstance(each, ast.Name) and each.id not in ("torch", "self") for each in ast.walk(node))

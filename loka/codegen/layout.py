"""Python in the layout of `ruff format`, on one line: templates wrap what is too long for it (loka.templating.wrap).

Covers what generated code needs: expressions without lambdas and comprehensions, in statements of one expression.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence

from loka.errors import LokaError

_BINARY: dict[type[ast.operator], tuple[str, int]] = {
    ast.BitOr: ("|", 6),
    ast.BitXor: ("^", 7),
    ast.BitAnd: ("&", 8),
    ast.LShift: ("<<", 9),
    ast.RShift: (">>", 9),
    ast.Add: ("+", 10),
    ast.Sub: ("-", 10),
    ast.Mult: ("*", 11),
    ast.MatMult: ("@", 11),
    ast.Div: ("/", 11),
    ast.FloorDiv: ("//", 11),
    ast.Mod: ("%", 11),
    ast.Pow: ("**", 13),
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_UNARY: dict[type[ast.unaryop], tuple[str, int]] = {
    ast.Not: ("not ", 4),
    ast.UAdd: ("+", 12),
    ast.USub: ("-", 12),
    ast.Invert: ("~", 12),
}
_IF, _COMPARISON, _POWER, _PRIMARY = 1, 5, 13, 15


def literal(value: object) -> str:
    """Strings, numbers, None and tuples of them as Python. Raises LokaError for other types."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        return tuple_of([literal(item) for item in value])
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise LokaError(f"no literal for {type(value).__name__}")


def quoted(text: str) -> str:
    """A string literal in ASCII, with the quotes that need fewer escapes."""
    body = text.encode("unicode_escape", "surrogatepass").decode("ascii")
    quote = "'" if body.count('"') > body.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote


def call(function: str, arguments: Iterable[str]) -> str:
    """`function(arguments)`."""
    return f"{function}({', '.join(arguments)})"


def tuple_of(items: Sequence[str]) -> str:
    """`(items)`; a tuple of one has its comma."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def parse(text: str) -> ast.expr:
    """Parse one expression. Raises LokaError for anything else."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LokaError(f"cannot render {text[:200]!r}: {error}. This is a fault in LoKA: please report it.") from error


def formatted(text: str) -> str:
    """An expression in this layout. Raises LokaError for anything else."""
    return expression_text(parse(text))


def expression_text(node: ast.expr) -> str:
    """A parsed expression as text."""
    return _flat(node)[0]


def _called(node: ast.Call) -> str:
    match node:
        case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name))], keywords=[]) if (
            name.isidentifier() and name.isascii()
        ):
            return expression_text(ast.Attribute(owner, name, ast.Load()))
    given = [expression_text(arg) for arg in node.args]
    named = [("**" if each.arg is None else f"{each.arg}=") + expression_text(each.value) for each in node.keywords]
    return call(_nested(node.func, _PRIMARY), given + named)


def _nested(node: ast.expr, binds: int) -> str:
    """Text of a subexpression, in brackets if it binds less tightly than `binds`."""
    text, own = _flat(node)
    return text if own >= binds else f"({text})"


def _flat(node: ast.expr) -> tuple[str, int]:
    """An expression on one line, and its precedence."""
    match node:
        case ast.Name(id=name):
            return name, _PRIMARY
        case ast.Constant(value=value):
            return _constant(value)
        case ast.Attribute(value=owner, attr=name):
            return f"{_owner(owner)}.{name}", _PRIMARY
        case ast.Subscript(value=owner, slice=index):
            return f"{_owner(owner)}[{_index(index)}]", _PRIMARY
        case ast.Call():
            return _called(node), _PRIMARY
        case ast.Tuple(elts=elements):
            return tuple_of([expression_text(item) for item in elements]), _PRIMARY
        case ast.List(elts=elements):
            return f"[{', '.join(expression_text(item) for item in elements)}]", _PRIMARY
        case ast.Dict(keys=keys, values=values):
            pairs = [
                ("**" if key is None else _flat(key)[0] + ": ") + _flat(value)[0]
                for key, value in zip(keys, values, strict=True)
            ]
            return "{" + ", ".join(pairs) + "}", _PRIMARY
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(left, op, right)
        case ast.UnaryOp(op=op, operand=operand):
            sign, binds = _UNARY[type(op)]
            power = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Pow)
            return sign + _nested(operand, _PRIMARY if power else binds), binds
        case ast.Compare(left=left, ops=ops, comparators=rights):
            text = _nested(left, _COMPARISON + 1)
            for op_, right in zip(ops, rights, strict=True):
                text += f" {_COMPARE[type(op_)]} {_nested(right, _COMPARISON + 1)}"
            return text, _COMPARISON
        case ast.BoolOp(op=op, values=values):
            word, binds = (" and ", 3) if isinstance(op, ast.And) else (" or ", 2)
            # `and` inside `or` gets brackets for readability.
            return word.join(_nested(value, 4) for value in values), binds
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"{_nested(body, 2)} if {_nested(test, 2)} else {_nested(other, _IF)}", _IF
        case ast.Starred(value=value):
            return "*" + _nested(value, 6), _PRIMARY
    raise LokaError(f"cannot render a {type(node).__name__} in a forward. This is a fault in LoKA: please report it.")


def _constant(value: object) -> tuple[str, int]:
    if isinstance(value, str):
        return quoted(value), _PRIMARY
    if isinstance(value, bytes):
        return "b" + quoted(value.decode("latin-1")), _PRIMARY
    if value is None or value is Ellipsis or isinstance(value, bool):
        return "..." if value is Ellipsis else repr(value), _PRIMARY
    if isinstance(value, int | float | complex) and math.isfinite(abs(value)):
        return repr(value), _PRIMARY
    raise LokaError(f"cannot render the constant {value!r} in a forward. This is a fault in LoKA: please report it.")


def _owner(node: ast.expr) -> str:
    """Text of the object before a dot or an index; a number gets brackets."""
    text = _nested(node, _PRIMARY)
    return f"({text})" if isinstance(node, ast.Constant) and not isinstance(node.value, str) else text


def _index(node: ast.expr) -> str:
    match node:
        case ast.Tuple(elts=[_, *_] as elements) if not any(isinstance(item, ast.Starred) for item in elements):
            return ", ".join(_index(item) for item in elements) + ("," if len(elements) == 1 else "")
        case ast.Slice(lower=lower, upper=upper, step=step):
            parts = [lower, upper] if step is None else [lower, upper, step]
            simple = all(part is None or _is_simple(part) for part in parts)
            return _slice([None if part is None else _flat(part)[0] for part in parts], simple)
    return _flat(node)[0]


def _slice(parts: Sequence[str | None], simple: bool) -> str:
    """Text of a slice; colons are spaced if a bound is more than a name or a number: x[a + 1 :]."""
    if simple:
        return ":".join(part or "" for part in parts)
    text = parts[0] or ""
    for part in parts[1:]:
        text += " :" if text and text[-1] != ":" else ":"
        text += f" {part}" if part else ""
    return text


def _is_simple(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_simple(node.operand)
    return isinstance(node, ast.Name | ast.Constant)


def _binary(left: ast.expr, op: ast.operator, right: ast.expr) -> tuple[str, int]:
    sign, binds = _BINARY[type(op)]
    if binds == _POWER:
        chained = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Pow)
        hug = _hugs_power(left) and not isinstance(left, ast.UnaryOp) and (chained or _hugs_power(right))
        return f"{_nested(left, binds + 1)}{'**' if hug else ' ** '}{_nested(right, 12)}", binds
    return f"{_nested(left, binds)} {sign} {_nested(right, binds + 1)}", binds


def _hugs_power(node: ast.expr) -> bool:
    """True for operands that ruff puts next to `**` without spaces: names, attributes, numbers, and these signed."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd | ast.Invert) and _hugs_power(node.operand)
    while isinstance(node, ast.Attribute):
        node = node.value
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and isinstance(node.value, int | float))

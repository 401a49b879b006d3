"""Python in the layout of `ruff format`, so that generating code needs no formatter.

Covers what generated code needs: expressions without lambdas and comprehensions, in statements of one expression. What
does not fit on a line is broken at its outermost bracket: the arguments of a call go on one line if they fit;
otherwise, and for tuples and lists, there is one item a line with a trailing comma, which ruff keeps.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.errors import LokaError
from loka.templating.wrap import wrap_statement

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


@dataclass(frozen=True, slots=True)
class Code:
    """An expression: text without a break, or with `items` the text up to a bracket and the items inside."""

    text: str  # "x.shape", or "torch.cat(" or "modules=("
    items: tuple[Code, ...] = ()
    close: str = ""  # ")"
    comma: bool = False  # a tuple of one keeps its comma on one line

    def flat(self) -> str:
        """The expression as one line."""
        if not self.items:
            return self.text + self.close
        inside = ", ".join(item.flat() for item in self.items)
        return f"{self.text}{inside}{',' if self.comma else ''}{self.close}"


def lay_out(before: str, code: Code, after: str, indent: int) -> str:
    """`before code after` at `indent` columns, broken if longer than a line; without a final newline."""
    return "\n".join(wrap_statement(" " * indent + before + code.flat() + after))


def literal(value: object) -> Code:
    """Strings, numbers, None and tuples of them as Python. Raises LokaError for other types."""
    if isinstance(value, str):
        return Code(quoted(value))
    if isinstance(value, tuple):
        items = tuple(literal(item) for item in value)
        return Code("(", items, ")", comma=len(items) == 1)
    if value is None or isinstance(value, bool | int | float):
        return Code(repr(value))
    raise LokaError(f"no literal for {type(value).__name__}")


def quoted(text: str) -> str:
    """A string literal in ASCII, with the quotes that need fewer escapes."""
    body = text.encode("unicode_escape", "surrogatepass").decode("ascii")
    quote = "'" if body.count('"') > body.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote


def call(function: str, arguments: Iterable[Code]) -> Code:
    """`function(arguments)`."""
    return Code(function + "(", tuple(arguments), ")")


def parse(text: str) -> ast.expr:
    """Parse one expression. Raises LokaError for anything else."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LokaError(f"cannot render {text[:200]!r}: {error}. This is a fault in LoKA: please report it.") from error


def code_of(node: ast.expr) -> Code:
    """A parsed expression as Code."""
    match node:
        case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name))], keywords=[]) if (
            name.isidentifier() and name.isascii()
        ):
            return code_of(ast.Attribute(owner, name, ast.Load()))
        case ast.Call(func=function, args=args, keywords=keywords):
            items = [code_of(arg) for arg in args] + [_keyword(keyword) for keyword in keywords]
            return call(_nested(function, _PRIMARY), items)
        case ast.Tuple(elts=[]):
            return Code("()")
        case ast.Tuple(elts=elements):
            return Code("(", tuple(code_of(item) for item in elements), ")", comma=len(elements) == 1)
        case ast.List(elts=elements):
            return Code("[", tuple(code_of(item) for item in elements), "]")
    return Code(_flat(node)[0])


def named(name: str, value: Code) -> Code:
    """A keyword argument: `name=value`."""
    return Code(f"{name}={value.text}", value.items, value.close, value.comma)


def _keyword(keyword: ast.keyword) -> Code:
    value = code_of(keyword.value)
    return (
        Code("**" + value.text, value.items, value.close, value.comma)
        if keyword.arg is None
        else named(keyword.arg, value)
    )


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
        case ast.Call() | ast.Tuple() | ast.List():
            return code_of(node).flat(), _PRIMARY
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

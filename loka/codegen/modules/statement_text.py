"""Text of straight-line statements: renamed locals, FP8 linears in place of GEMMs, long expressions split up."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from loka.codegen.layout import expression_text, parse
from loka.codegen.names import Names, is_plain_variable, variable_name
from loka.errors import LokaError
from loka.graph.ir import RefKind, SiteCall, Statement
from loka.templating.wrap import WIDTH

# Names a printed statement may read besides its operands: modules, `dispatch` and builtins.
_GLOBALS = frozenset({"torch", "math", "operator"})
_DISPATCH = "dispatch"
_BUILTINS = frozenset(
    {"abs", "bool", "complex", "float", "getattr", "int", "len", "max", "min", "slice", "tuple"}
    | {"callable", "dict", "hasattr", "isinstance", "list", "str", "type"}
)


class NameScope:
    """Names of one generated function: local of the traced text -> name in the generated text."""

    def __init__(self, arguments: Iterable[str] = ()) -> None:
        arguments = tuple(arguments)
        self.names = Names(arguments)
        self.local: dict[str, str] = {name: name for name in arguments}

    def define(self, target: str) -> str:
        """The generated name of a target: its own if it is a plain variable and free."""
        if target not in self.local:
            plain = is_plain_variable(target)
            self.local[target] = self.names.unique(target if plain else variable_name(target, "value"))
        return self.local[target]

    def read(self, name: str) -> str:
        """The generated name of a local. Raises LokaError if it is not defined yet."""
        if name not in self.local:
            raise LokaError(
                f"a traced forward reads {name!r} before it is set. This is a fault in LoKA: please report it."
            )
        return self.local[name]


def used_later(statements: Sequence[Statement], result: str) -> set[str]:
    """The locals that any statement or the result reads."""
    used = {node.id for node in ast.walk(parse(result)) if isinstance(node, ast.Name)}
    for statement in statements:
        used |= {ref.text for ref in statement.operands if ref.kind is RefKind.LOCAL}
    return used


def operand_texts(statement: Statement, scope: NameScope, attributes: Mapping[str, str]) -> list[str]:
    """The statement's operands in generated names.

    `attributes`: expression on self -> parameter, for an outlined function; others stay unchanged.
    """
    return [
        scope.read(ref.text) if ref.kind is RefKind.LOCAL else attributes.get(ref.text, ref.text)
        for ref in statement.operands
    ]


def expression(statement: Statement, texts: Sequence[str]) -> str:
    """The statement's expression, unchanged except for names."""
    return checked(statement.template.format(*texts), texts)


def linear_call(site_call: SiteCall, texts: Sequence[str]) -> SiteCall:
    """The call with its operands' expressions, with their changes of view; `out` stays a template over the product."""
    bias = None if site_call.bias is None else site_call.bias.format(*texts)
    return replace(site_call, x=site_call.x.format(*texts), weight=site_call.weight.format(*texts), bias=bias)


def checked(text: str, operands: Iterable[str] = ()) -> str:
    """`text`, laid out. Raises LokaError if it reads names other than its operands', modules and builtins."""
    node = parse(text)
    allowed = _GLOBALS | _BUILTINS | {_DISPATCH} | {part.id for op in operands for part in _names(parse(op))}
    for name in _names(node):
        if name.id not in allowed:
            raise LokaError(
                f"cannot render {text[:200]!r}: {name.id!r} is unknown. This is a fault in LoKA: please report it."
            )
    return expression_text(node)


def globals_of(text: str) -> set[str]:
    """The permitted modules that `text` reads."""
    return {name.id for name in _names(parse(text))} & _GLOBALS


def renamed(text: str, scope: NameScope) -> str:
    """An expression over locals, such as a forward's result, in generated names."""
    node = parse(text)
    for name in _names(node):
        if name.id in scope.local:
            name.id = scope.local[name.id]
    return expression_text(node)


def _names(node: ast.expr) -> list[ast.Name]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Name)]


def assignment(target: str | None, code: str, indent: int, scope: NameScope) -> list[str]:
    """`target = code`; an unused target (None) leaves the call alone, or assigns to `_`.

    An expression that is too long for a line and cannot be broken at its last bracket becomes several statements.
    """
    before = f"{target} = " if target is not None else "" if isinstance(parse(code), ast.Call) else "_ = "
    lines: list[str] = []
    if len(before) + len(code) + indent > WIDTH and not _opens_well(code):
        lines, code = _taken_apart(code, indent, scope)
    return [*lines, " " * indent + before + code]


def returned(code: str, indent: int, scope: NameScope) -> list[str]:
    """`return code`, split up like an assignment."""
    margin = " " * indent
    if len(f"{margin}return {code}") <= WIDTH:
        return [f"{margin}return {code}"]
    *parts, last = assignment("result", code, indent, scope)
    return [*parts, last, f"{margin}return result"] if parts else [last.replace("result = ", "return ", 1)]


def _opens_well(code: str) -> bool:
    """True if the last bracket is the only one, which is where ruff would break the line."""
    match parse(code):
        case ast.Call(func=function, args=args, keywords=keywords) if args or keywords:
            return not any(bracket in expression_text(function) for bracket in "([")
        case ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_]):
            return True
    return False


def _taken_apart(code: str, indent: int, scope: NameScope) -> tuple[list[str], str]:
    """Statements for the outermost parts of an expression, in order of evaluation, and the rest of it."""
    node = parse(code)
    lines: list[str] = []

    def part(inner: ast.expr) -> ast.expr:
        if isinstance(inner, ast.Name | ast.Constant):
            return inner
        name = scope.names.unique("part")
        lines.extend(assignment(name, expression_text(inner), indent, scope))
        return ast.Name(name, ast.Load())

    _replace_parts(node, part)
    return lines, expression_text(node)


def _replace_parts(node: ast.expr, part: Callable[[ast.expr], ast.expr]) -> None:
    match node:
        case ast.BinOp():
            node.left, node.right = part(node.left), part(node.right)
        case ast.UnaryOp():
            node.operand = part(node.operand)
        case ast.IfExp():
            node.test = part(node.test)
        case ast.Compare():
            node.left, node.comparators = part(node.left), [part(right) for right in node.comparators]
        case ast.Call(func=ast.Attribute() as method) if not _is_path(method):
            method.value = part(method.value)
        case ast.Attribute() | ast.Subscript() if not _is_path(node):
            node.value = part(node.value)


def _is_path(node: ast.expr) -> bool:
    """True for a dotted name, possibly with constant indices, which computes nothing."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)

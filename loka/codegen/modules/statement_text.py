"""Text of straight-line statements: renamed locals, FP8 linears in place of GEMMs, long expressions split up."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loka.codegen.layout import expression_text, parse
from loka.codegen.names import Names, is_plain_variable, variable_name
from loka.errors import LokaError
from loka.graph.expression import Arg, Ref, RefKind, locals_in, of_product, refs_in, text_of
from loka.graph.ir import SiteCall, Statement
from loka.templating.wrap import WIDTH

# Names a printed statement may read besides its operands: modules, `dispatch` and builtins.
_GLOBALS = frozenset({"torch", "math", "operator"})
_DISPATCH = "dispatch"
_INDEX = re.compile(r"\[(\d+)\]")
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
        self._unbound: dict[str, str] = {}  # expression of a Parameter -> name of the tuple of its slices

    def unbind(self, parameter: str) -> str:
        """The name of a Parameter's slices along its first dimension, through which they are read from now on."""
        self._unbound[parameter] = self.names.unique(variable_name(parameter, "slices"))
        return self._unbound[parameter]

    def define(self, target: str) -> str:
        """The generated name of a target: its own if it is a plain variable and free."""
        if target not in self.local:
            plain = is_plain_variable(target)
            self.local[target] = self.names.unique(target if plain else variable_name(target, "value"))
        return self.local[target]

    def text(self, ref: Ref) -> str:
        """The text of a name in an expression. Raises LokaError for a local that is not defined yet."""
        if ref.kind is RefKind.LOCAL:
            return self.read(ref.text)
        of = next((each for each in self._unbound if slice_of(ref.text, each) is not None), None)
        return ref.text if of is None else self._unbound[of] + ref.text.removeprefix(of)

    def read(self, name: str) -> str:
        """The generated name of a local. Raises LokaError if it is not defined yet."""
        if name not in self.local:
            raise LokaError(
                f"a traced forward reads {name!r} before it is set. This is a fault in LoKA: please report it."
            )
        return self.local[name]


def slice_of(text: str, parameter: str) -> int | None:
    """The index of the slice of a Parameter that an expression begins with: 2 of "self.w[2].t()"; None for others."""
    found = _INDEX.match(text.removeprefix(parameter)) if text.startswith(parameter) else None
    return None if found is None else int(found[1])


def used_later(statements: Sequence[Statement], result: Arg) -> set[str]:
    """The locals that any statement or the result reads."""
    return {name for statement in statements for name in _read(statement)}.union(locals_in(result))


def _read(statement: Statement) -> list[str]:
    return [ref.text for ref in statement.operands if ref.kind is RefKind.LOCAL]


def expression(value: Arg, name: Callable[[Ref], str], others: Iterable[str] = ()) -> str:
    """An expression with this text for each of its names, laid out.

    Raises LokaError if it reads anything else but `others`, modules and builtins.
    """
    return checked(text_of(value, name), [*map(name, refs_in(value)), *others])


@dataclass(frozen=True, slots=True)
class LinearText:
    """A site's call as Python, with its changes of view; the view of its product comes after (`view_text`)."""

    x: str
    weight: str
    bias: str | None


def linear_text(call: SiteCall, name: Callable[[Ref], str]) -> LinearText:
    """A site's call with this text for each of its names."""
    bias = None if call.bias is None else text_of(call.bias, name)
    return LinearText(text_of(call.x, name), text_of(call.weight, name), bias)


def view_text(view: Arg, product: str) -> str:
    """A view of the product that has this name, laid out."""
    return checked(text_of(of_product(view, Ref(RefKind.LOCAL, product))), [product])


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

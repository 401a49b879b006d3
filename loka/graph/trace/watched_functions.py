"""Lets a tracer answer the tests of a forward, such as `mask is None` and `isinstance(x, Tensor)`, and see its calls.

Python asks no traced value when it evaluates `is`, `isinstance` or `len`, nor does torch in `torch.zeros`. While a
forward is traced, the functions that it may call therefore run in a form in which these are calls of the tracer.
torch.fx has a rewriter of the same kind for `assert` (torch/fx/experimental/rewriter.py).
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import fx, nn

from loka.graph.source import definition

_NAME = "loka_tests"  # under which a watched function finds the tracer, in its globals
_CALLS = frozenset({"isinstance", "hasattr", "callable", "type", "len", "range"})
# Functions that make a tensor without being given one: traced values among their arguments would be errors, and without
# any the tensor would be a constant.
_FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
)
_ASSERTS = frozenset({"_assert", "_check"})
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class Tests(Protocol):
    """Receives the tests of watched functions. Each method stands for the test of its name."""

    def enter(self, filename: str, line: int) -> None:
        """A watched function is entered, or one side of an `if` in it; `line` is its first."""

    def test_is(self, left: Any, right: Any) -> bool: ...
    def test_in(self, value: Any, items: Any) -> bool: ...
    def test_isinstance(self, value: Any, types: Any) -> bool: ...
    def test_hasattr(self, value: Any, name: str) -> bool: ...
    def test_callable(self, value: Any) -> bool: ...
    def test_type(self, value: Any) -> type: ...
    def test_len(self, value: Any) -> Any: ...
    def test_range(self, *bounds: Any) -> range: ...

    def test_assert(self, value: Any, *message: Any) -> None:
        """`torch._assert(value, message)` or `torch._check(value, message)`."""

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of `torch.zeros`, or of another function that makes a tensor."""


@contextmanager
def watched(functions: Iterable[FunctionType], tests: Tests) -> Iterator[None]:
    """While active, the functions report their tests to `tests`. A function without readable source stays as it is."""
    before: dict[FunctionType, CodeType] = {}
    scopes: dict[int, dict[str, Any]] = {}
    try:
        for function in dict.fromkeys(functions):
            code = _watched_code(function)
            if code is not None:
                before[function] = function.__code__
                function.__code__ = code
                scopes[id(function.__globals__)] = function.__globals__
        for scope in scopes.values():
            scope[_NAME] = tests
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code
        for scope in scopes.values():
            scope.pop(_NAME, None)


def _watched_code(function: FunctionType) -> CodeType | None:
    """The code of a function with its tests as calls; None where it cannot be made."""
    code, made = function.__code__, definition(function)
    if made is None:
        return None
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    has_torch = "torch" not in local and function.__globals__.get("torch") is torch
    _Rewriter(code.co_filename, _CALLS - local - function.__globals__.keys(), has_torch).visit(made)
    entry = _entry(code.co_filename, code.co_firstlineno)
    if isinstance(made, ast.Lambda):
        made.body = ast.Subscript(ast.Tuple([entry.value, made.body], ast.Load()), ast.Constant(1), ast.Load())
    else:
        made.decorator_list = []
        made.body.insert(0, entry)
    inside = ast.fix_missing_locations(_in_its_scopes(made, function.__qualname__, code.co_freevars))
    compiled = compile(inside, code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    found = [each for each in _codes(compiled) if each.co_name == code.co_name]
    if not found or found[0].co_freevars != code.co_freevars:
        return None
    return found[0].replace(co_firstlineno=code.co_firstlineno)


def _in_its_scopes(made: ast.FunctionDef | ast.Lambda, name: str, free: Iterable[str]) -> ast.Module:
    """The function, of this qualified name, in a class of its own class's name and in a function with its closure.

    So private names and super() mean the same.
    """
    inner: ast.stmt = ast.Expr(made) if isinstance(made, ast.Lambda) else made
    body = inner
    holder = name.split(".")[-2:-1]
    if holder and holder[0].isidentifier():
        body = ast.parse(f"class {holder[0]}:\n    pass").body[0]
        body.body = [inner]  # type: ignore[attr-defined]
    around = ast.parse(f"def loka_closure({', '.join(each for each in free if each != '__class__')}):\n    pass")
    around.body[0].body = [body]  # type: ignore[attr-defined]
    return around


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


class _Rewriter(ast.NodeTransformer):
    """Replaces tests by calls of the tracer. `names` are the built-in functions to replace."""

    def __init__(self, filename: str, names: Set[str], has_torch: bool) -> None:
        self._filename, self._names, self._has_torch = filename, names, has_torch

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        for side in (node.body, node.orelse):
            if side:
                side.insert(0, _entry(self._filename, side[0].lineno))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
            return node
        method = "test_is" if isinstance(node.ops[0], ast.Is | ast.IsNot) else "test_in"
        test = _report(method, node.left, node.comparators[0])
        found = ast.UnaryOp(ast.Not(), test) if isinstance(node.ops[0], ast.IsNot | ast.NotIn) else test
        return ast.copy_location(found, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Name) and called.id in self._names and _is_test(node, called.id):
            return ast.copy_location(_report(f"test_{called.id}", *node.args), node)
        if self._has_torch and isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch":
            if called.attr == "is_tensor":
                tensor = ast.Attribute(called.value, "Tensor", ast.Load())
                return ast.copy_location(_report("test_isinstance", *node.args, tensor), node)
            if called.attr in _ASSERTS and not node.keywords:
                return ast.copy_location(_report("test_assert", *node.args), node)
            if called.attr in _FACTORIES:
                made = _report("make", called, *node.args)
                made.keywords = node.keywords
                return ast.copy_location(made, node)
        return node


def _entry(filename: str, line: int) -> ast.Expr:
    return ast.Expr(_report("enter", ast.Constant(filename), ast.Constant(line)))


def _is_test(node: ast.Call, name: str) -> bool:
    """False for a call of `type` that makes a class."""
    return not node.keywords and (name != "type" or len(node.args) == 1)


def _report(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(_NAME, ast.Load()), method, ast.Load()), list(arguments), [])


@contextmanager
def traced_limits() -> Iterator[None]:
    """While a forward is traced, torch.finfo and torch.iinfo take a traced dtype; torch's own refuse a proxy."""
    originals = torch.finfo, torch.iinfo
    torch.finfo, torch.iinfo = (_traced(each) for each in originals)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.finfo, torch.iinfo = originals  # type: ignore[misc]


def _traced(limits: Callable[..., Any]) -> Callable[..., Any]:
    def limits_of(*args: Any, **kwargs: Any) -> Any:
        proxy = next((each for each in (*args, *kwargs.values()) if isinstance(each, fx.Proxy)), None)
        if proxy is None:
            return limits(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", limits, args, kwargs)

    return limits_of


class ReadLog:
    """Records the attributes that a forward reads from its modules while it is traced, including missing ones."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, set[str]] = {}
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._listening = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While active, reads are recorded from `listen` on, except inside `unheard`."""
        before = vars(nn.Module).get("__getattribute__")
        own = before or object.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            if self._listening:
                self._note(module, name)
            return own(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self._listening = False
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]

    def listen(self) -> None:
        """Starts recording: the forward is about to run."""
        self._listening = True

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Reads of the tracer itself, which are not recorded."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    def _note(self, module: nn.Module, name: str) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        if name == "__dict__" and sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__:
            return  # torch's own look-up of a child, Parameter or buffer, which is recorded under its own name
        self.names.setdefault(path, set()).add(name)

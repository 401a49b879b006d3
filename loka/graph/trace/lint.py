"""Checks a forward's source for behaviour that a trace would lose silently.

The equivalence check compares behaviour on two batches and misses what these do not show: a checkpoint block, a float
that a schedule changes later. Only functions that the forward enters are checked.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType

import torch
from torch import nn

from loka.graph.ir import ForwardIR, RefKind, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import ACTIVATIONS, ELEMENTWISE, NORM_MODULES, NORMS
from loka.graph.source import built_in_floats, closure_of, definition, functions_of, has_hooks, live_floats
from loka.graph.trace.in_place import SUMS, sum_out_of_place

_LABELS = {"record_function", "range", "annotate"}  # with-blocks that only label a profile
_DECORATORS = {"override", "staticmethod", "classmethod", "property", "cached_property", "abstractmethod", "final"}
_HOST_READS = {"item", "tolist", "numpy"}
_STATE_QUERIES = {
    "is_grad_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype",
    "is_inference_mode_enabled", "is_inference", "is_compiling", "is_tracing",
}  # fmt: skip
_STORING_CALLS = {"setattr", "delattr", "__setattr__", "__delattr__", "register_buffer", "register_parameter"}
_CONTAINER_WRITES = {
    "append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault", "add", "remove", "discard",
}  # fmt: skip
_IMPURE_MODULES = {"random", "time", "os", "datetime", "uuid", "secrets", "numpy.random"}


def unreadable(module: nn.Module) -> str | None:
    """The first function that a module's forward may call and whose source cannot be read, in words; None if none."""
    unread = (function for function in functions_of(module) if definition(function) is None)
    return next((f"the source of '{function.__qualname__}' cannot be read" for function in unread), None)


def lint(module: nn.Module, entered: Collection[tuple[str, int]]) -> str | None:
    """The first construct in the source of a module's forward that a trace would lose; None where there is none.

    `entered` are the functions that the forward ran, and the sides of its branches, by file and first line of their
    code; others are not checked.
    The text names the line: "block under 'torch.no_grad()' at models.py:12 'with torch.no_grad():'". torch.nn modules
    are not linted: the equivalence check covers torch's own forwards.
    """
    functions = functions_of(module)
    live = live_floats(module, functions)
    for function in functions:
        tree = definition(function) if code_place(function) in entered else None
        found = next(_Linter(function, tree, module, live).findings(entered), None) if tree is not None else None
        if found is not None:
            return f"{found[0]} {place(function, found[1])}"
    return None


def code_place(function: FunctionType) -> tuple[str, int]:
    """File and first line of a function's code."""
    return function.__code__.co_filename, function.__code__.co_firstlineno


def place(function: FunctionType, line: int) -> str:
    """The text "at models.py:44 'if x.size(0) > 1024'" for a line (1-based, of the file)."""
    return place_in(function.__code__.co_filename, line)


def place_in(filename: str, line: int) -> str:
    """The same, from a file's name."""
    text = linecache.getline(filename, line).strip().rstrip(":")
    return f"at {os.path.basename(filename)}:{line} '{text}'"


def training_reads(modules: Iterable[nn.Module]) -> str:
    """The first line that reads `.training`, as `place` gives it; "" where there is none."""
    for module in modules:
        for function in functions_of(module):
            tree = definition(function)
            for node in ast.walk(tree) if tree is not None else ():
                if isinstance(node, ast.Attribute) and node.attr == "training":
                    return place(function, node.lineno)
    return ""


class _Linter:
    """Walks one function; `module` is the value of its first argument, if it is a method."""

    def __init__(
        self, function: FunctionType, tree: ast.FunctionDef | ast.Lambda, module: nn.Module, live: tuple[str, ...]
    ) -> None:
        self.function, self.tree, self.module, self.live = function, tree, module, live
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self.self_name = arguments[0].arg if arguments and self._is_method() else None

    def _is_method(self) -> bool:
        if isinstance(self.tree, ast.Lambda):
            return any(self.function is value for base in type(self.module).__mro__ for value in vars(base).values())
        name, kind = self.function.__name__, type(self.module)
        if isinstance(inspect.getattr_static(kind, name, None), staticmethod | classmethod):
            return False
        return any(
            inspect.unwrap(getattr(value, "fget", None) or value) is self.function
            for base in kind.__mro__
            for value in [vars(base).get(name)]
            if value is not None
        )

    def findings(self, entered: Collection[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Descriptions of the constructs found on the sides of branches that were entered, each with its line."""
        filename = self.function.__code__.co_filename
        held = next((name for name, value in closure_of(self.function).items() if isinstance(value, nn.Module)), None)
        if held is not None:  # copies of the model, of which it has none, are traced and compared
            yield f"'{self.function.__name__}' reads the module '{held}' of the function around it", self.tree.lineno
        for decorator in [] if isinstance(self.tree, ast.Lambda) else self.tree.decorator_list:
            if _last(decorator) not in _DECORATORS and not ast.unparse(decorator).startswith("torch.jit."):
                yield f"decorator '{ast.unparse(decorator)}'", decorator.lineno
        for statement in [self.tree.body] if isinstance(self.tree, ast.Lambda) else self.tree.body:
            for node in _in_order(statement, lambda side: (filename, side[0].lineno) in entered):
                for what in self._check(node):
                    yield what, getattr(node, "lineno", self.tree.lineno)

    def _check(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if _last(item.context_expr) not in _LABELS:
                    yield f"block under '{ast.unparse(item.context_expr)}'"
        elif isinstance(node, ast.Try | ast.TryStar):
            yield "try block"
        elif isinstance(node, ast.Match):
            yield "match on a value"
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield f"{type(node).__name__.lower()} variable"
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete | ast.For | ast.NamedExpr):
            yield from self._stores(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Attribute | ast.Name):
            yield from self._read(node)

    def _stores(
        self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete | ast.For | ast.NamedExpr
    ) -> Iterator[str]:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        for target in targets:
            for part in ast.walk(target):
                stored = isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store | ast.Del)
                if stored and (isinstance(part, ast.Attribute) or self._chain(part) is not None):
                    yield f"attribute '{ast.unparse(part)}' is written"

    def _call(self, node: ast.Call) -> Iterator[str]:
        name = _last(node.func)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in {"checkpoint", "checkpoint_sequential"}:
            yield "activation checkpointing"
        elif receiver is not None and name in _HOST_READS and not self._is_module(node.func):
            yield f"a tensor is read on the host (.{name})"
        elif name in _STATE_QUERIES:
            yield f"the forward asks '{ast.unparse(node.func)}'"
        elif name in _STORING_CALLS and (receiver is None or self._chain(receiver) is not None or name[0] == "_"):
            yield f"attribute written by '{name}'"
        elif name == "print" and receiver is None:
            yield "print"
        elif receiver is not None and name == "forward" and not _is_super(receiver):
            yield f"'{ast.unparse(node.func)}' is called past the module's hooks"
        elif receiver is not None and name in _CONTAINER_WRITES:
            chain = self._chain(receiver)
            if chain and not isinstance(self._value(chain), torch.Tensor | nn.Module):
                yield f"attribute '{ast.unparse(receiver)}' is changed"

    def _read(self, node: ast.Attribute | ast.Name) -> Iterator[str]:
        chain = self._chain(node)
        if chain:
            value = self._value(chain)
            known = (*self.live, *built_in_floats(self.module))
            checked = len(chain) > 1 and _is_of_torch(self._value(chain[:-1]))  # compared on binding (`reads`)
            if isinstance(value, float) and not checked and not (len(chain) == 1 and chain[0] in known):
                yield f"float attribute '{ast.unparse(node)}' would be frozen"
            if isinstance(value, list | dict | set) and _holds_float(value):
                yield f"the floats in '{ast.unparse(node)}' would be frozen"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            value = self.function.__globals__.get(node.id)
            owner = getattr(value, "__self__", None)
            home = value.__name__ if isinstance(value, ModuleType) else type(owner).__module__
            if home in _IMPURE_MODULES:
                yield f"'{node.id}' gives other values in each call"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.random", "numpy.random"}:
            yield "numpy's random numbers"

    def _is_module(self, node: ast.AST) -> bool:
        chain = self._chain(node)
        return bool(chain) and isinstance(self._value(chain or ()), nn.Module)

    def _chain(self, node: ast.AST) -> tuple[str, ...] | None:
        """("cfg", "scale") for self.cfg.scale or self.cfg[0].scale; () for self; None where it does not start there."""
        names: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            names.append(node.attr if isinstance(node, ast.Attribute) else "[]")
            node = node.value
        if self.self_name is None or not isinstance(node, ast.Name) or node.id != self.self_name:
            return None
        return tuple(reversed(names))

    def _value(self, chain: tuple[str, ...]) -> object:
        """The current value of the chain; None where it cannot be read without running code."""
        value: object = self.module
        for name in chain:
            if isinstance(value, nn.Module) and (name in value._parameters or name in value._buffers):
                value = value._parameters.get(name, value._buffers.get(name))
            elif isinstance(value, nn.Module) and name in value._modules:
                value = value._modules[name]
            else:
                value = inspect.getattr_static(value, name, None)
        return value


def _is_of_torch(value: object) -> bool:
    """True for a torch.nn module of torch's own, such as an nn.LayerNorm."""
    return isinstance(value, nn.Module) and type(value).__module__.startswith("torch.nn.modules.")


def _in_order(node: ast.AST, is_entered: Callable[[list[ast.stmt]], bool]) -> Iterator[ast.AST]:
    """The node and its descendants, in the order of the source, without sides of branches that were not entered."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If):
        sides = [side for side in (node.body, node.orelse) if side and is_entered(side)]
        children = iter([node.test, *(statement for side in sides for statement in side)])
    for child in children:
        yield from _in_order(child, is_entered)


def _last(node: ast.expr) -> str:
    """Last name of a called expression: "no_grad" for torch.no_grad()."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _last(node) == "super"


def _holds_float(values: list[object] | dict[object, object] | set[object]) -> bool:
    items = values.values() if isinstance(values, dict) else values
    return any(isinstance(item, float) for item in items)


_IN_PLACE = "inplace=True"
# Operations that return a new tensor, never a view of an operand, unless written into one (`out=`).
_VIEWS = frozenset(
    {"view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "unsqueeze", "squeeze"}
)
_MAKING = ACTIVATIONS | ELEMENTWISE | NORMS | {"linear", "matmul", "bmm", "baddbmm", "addmm", "addcmul", "cat", "stack"}


def makes_its_result(child: nn.Module) -> bool:
    """True if a child always returns a new tensor."""
    return type(child) in (nn.Linear, *NORM_MODULES) and not has_hooks(child)


def out_of_place(forward: ForwardIR, made: Collection[str] = (), sums: bool = True) -> ForwardIR:
    """The forward with in-place activations, and `sums`, made out of place where they alone read a new tensor.

    `made` names locals returned by children that are new tensors.
    """
    readers = readers_of(forward)
    statements: list[Statement] = []
    making = set(made)  # targets that are new tensors
    taken = {name.partition("=")[0].lstrip("*") for name in forward.arguments}
    taken.update(step.target for step in forward.statements)
    for step in forward.statements:
        alone = [ref.text for ref in step.operands if ref.kind is RefKind.LOCAL and len(readers[ref.text]) == 1]
        if step.op in ACTIVATIONS and _IN_PLACE in step.template and making.intersection(alone) and step.target != "_":
            step = replace(step, template=step.template.replace(_IN_PLACE, "inplace=False"))
        plain = step.op.removesuffix("_")
        if step.op != plain and plain in ACTIVATIONS and making.intersection(alone) and step.target != "_":  # x.relu_()
            step = replace(step, op=plain, template=step.template.replace(f"{step.op}(", f"{plain}(", 1))
        steps = sum_out_of_place(step, making.intersection(alone), taken) if sums else (step,)
        of_first = bool(step.operands) and step.operands[0].text in making.intersection(alone)
        of_new = of_first and step.op in SUMS | _VIEWS
        if (step.op in _MAKING and _IN_PLACE not in step.template and "out=" not in step.template) or of_new:
            making.add(step.target)
        statements += steps
    return replace(forward, statements=tuple(statements))

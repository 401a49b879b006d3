"""A reading as statements."""

from __future__ import annotations

import inspect
import keyword
import operator
from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn

from loka.graph.capture.captured import place_in
from loka.graph.expression import INFIX, PREFIX, Arg, Call, Ref, RefKind, local, locals_in
from loka.graph.ir import CannotTraceError, Statement
from loka.graph.sites.op_names import is_idle_dropout
from loka.graph.trace.merging import Op
from loka.graph.trace.out_of_place import makes_its_result
from loka.graph.trace.printer import argument, attribute, is_identifier, public_name, variable
from loka.graph.trace.reading import Reading


class Printed:
    """The statements of a recording."""

    def __init__(self, module: nn.Module, recording: Reading) -> None:
        self.module = module
        self.refs: dict[fx.Node, Ref] = {}
        self.statements: list[Statement] = []
        self.made: dict[str, str] = {}  # locals returned by children that are new tensors, with these children
        self.lines: dict[str, tuple[str, int]] = {}  # of the targets, in the user's code
        self.result: Arg = None
        ops = _without_dead(recording)
        self.used = {node for op in ops for node in _inputs(op)}
        self.taken = set(inspect.signature(module.forward).parameters)
        for op in ops:
            try:
                self._print(op)
            except CannotTraceError as error:
                where = place_in(*op.line) if op.line is not None and op.node.op.startswith("call") else ""
                raise CannotTraceError(f"{error} {where}".strip()).inside_of(op.child) from error.__cause__
        self._drop_unread()

    def _print(self, op: Op) -> None:
        node = op.node
        if node.op == "placeholder":
            self.refs[node] = local(str(node.target))
        elif node.op == "get_attr":
            self.refs[node] = Ref(RefKind.ATTRIBUTE, attribute(self.module, str(node.target)))
        elif node.op == "output":
            self.result = self._arg(op, op.args[0])
        elif is_idle_dropout(node.target, op.args, op.kwargs) and op.args:
            self.refs[node] = self.refs[op.args[0]]
        else:
            self._statement(op)

    def _arg(self, op: Op, value: object) -> Arg:
        return argument(value, self.refs, attribute(self.module, op.child) + ".training")

    def _statement(self, op: Op) -> None:
        name, hint, target = self._called(op)
        kwargs = []
        for key, item in op.kwargs.items():
            if not key.isidentifier() or keyword.iskeyword(key):
                raise CannotTraceError(f"keyword argument {key!r} is no identifier")
            kwargs.append((key, self._arg(op, item)))
        value = Call(target, tuple(self._arg(op, each) for each in op.args), tuple(kwargs))
        made = variable(hint, self.taken) if op.node in self.used else "_"
        self.refs[op.node] = local(made)
        if op.node.op == "call_module" and makes_its_result(self.module.get_submodule(str(op.node.target))):
            self.made[made] = str(op.node.target)
        if op.line is not None:
            self.lines[made] = op.line
        self.statements.append(Statement(made, name, value, note=op.child))

    def _called(self, op: Op) -> tuple[str, str, str]:
        """The operation's name, a hint for the name of what it makes, and the target of its call."""
        node, args = op.node, op.args
        target = node.target
        if node.op == "call_module":
            return "module", _last_name(str(target)), attribute(self.module, str(target))
        if node.op == "call_method":
            if not is_identifier(str(target)):
                raise CannotTraceError(f"method {target!r} cannot be printed")
            return str(target), self._hint(op, str(target)), f".{target}"
        own = str(getattr(target, "__name__", target)).lstrip("_")
        if getattr(target, "__module__", "") == operator.add.__module__:
            known = f"operator.{getattr(target, '__name__', '')}"
            own = own.rstrip("_")  # `torch.relu_` writes into its operand, as the method does; `operator.and_` does not
            if known in (PREFIX if len(args) == 1 else INFIX):
                return own, own, known
            if target is operator.getitem:
                return own, "item", known
            if target is operator.abs:
                return own, own, "abs"
        if target is getattr and len(args) == 2 and is_identifier(args[1]):
            return str(args[1]), str(args[1]), "getattr"
        return own, self._hint(op, own), public_name(target)

    def _hint(self, op: Op, name: str) -> str:
        """A name hint: the child's name for a torch.nn child, which is one operation, otherwise the operation's."""
        if op.child and type(self.module.get_submodule(op.child)).__module__.startswith("torch.nn."):
            return _last_name(op.child)
        return name

    def _drop_unread(self) -> None:
        """Unread targets become `_`: statements may have effects and stay."""
        read = {ref.text for s in self.statements for ref in s.operands} | set(locals_in(self.result))
        self.statements = [
            s if s.target in read or s.target == "_" else replace(s, target="_") for s in self.statements
        ]


def _last_name(path: str) -> str:
    """Last name of a path: "fmb_norm" for "layers.fmb_norm", "fmb_0" for "layers.fmb.0"."""
    parts = path.split(".")
    return "_".join(parts[-2:]) if parts[-1].isdecimal() else parts[-1]


def _without_dead(recording: Reading) -> list[Op]:
    """The operations without those that have neither a reader nor an effect: sizes, items, tests."""
    kept: list[Op] = []
    used: set[fx.Node] = set()
    for op in reversed(recording.ops):
        node = op.node
        pure = (
            node.op == "get_attr" or node.target in (getattr, operator.getitem) or not node.meta.get("is_tensor", True)
        )
        if pure and node not in used:
            continue
        kept.append(op)
        used.update(_inputs(op))
    return kept[::-1]


def _inputs(op: Op) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((op.args, op.kwargs), lambda n: found.append(n))
    yield from found

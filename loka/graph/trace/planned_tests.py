"""Tests of traced values: answered as in all known calls of the module, and recorded to be checked in each call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import fx, nn

from loka.graph.guards import checked_branch, checked_length
from loka.graph.ir import CannotTraceError
from loka.graph.trace.call_values import VIEWS_OF_DICT, EntryValues, Values, ValuesNeededError, is_size
from loka.graph.trace.fixed_sizes import GivenShapes
from loka.graph.trace.printer import INFIX, PREFIX

_OF_THEIR_OWNER = (getattr, operator.getitem, checked_length)
_MAYBE_NONE = frozenset({"grad", "grad_fn"})  # attributes of tensors
_LAYOUTS = frozenset({"is_contiguous", "stride", "storage_offset"})
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # in which one model may run
_TYPES: dict[type, str] = {each: each.__name__ for each in (bool, int, float, str, list, tuple, dict)} | {
    torch.Tensor: "torch.Tensor",
    nn.Parameter: "torch.nn.Parameter",
}


@dataclass(frozen=True, slots=True)
class PlannedTest:
    """A condition on a value that is read from the arguments: `text` is a template over `node`, "{0} is None"."""

    node: fx.Node
    text: str


class Tracer(Protocol):
    """The trace whose tests are answered."""

    graph: fx.Graph

    def place(self) -> str:
        """The line of the user's code that is being traced, as text."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A traced value as the forward sees it."""

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Adds an operation to the trace."""

    def is_torch(self, child: str) -> bool:
        """True for a child of torch.nn, whose outputs have the same types in all calls."""


class PlannedTests:
    """Answers the tests of one trace: `loka.graph.trace.watched_functions.Tests`, and the truth of traced values.

    `computed` has the values of operations that were asked for in earlier traces; None where they have none. `fixed`
    has the tensors that are given to the module, by name, whose shapes decide such a value; None for others. Every
    method raises CannotTraceError where the calls differ, and ValuesNeededError where a value is not known yet.
    """

    tracer: Tracer  # set by the trace

    def __init__(
        self, entry: EntryValues, computed: Mapping[str, Values | None], fixed: Mapping[str, GivenShapes | None]
    ) -> None:
        self.found: dict[PlannedTest, None] = {}
        self.of_dtype = ""  # the first test that float32 answers otherwise than bfloat16, in words
        self.entered: set[tuple[str, int]] = set()
        self._entry, self._computed, self._fixed = entry, computed, fixed

    def enter(self, filename: str, line: int) -> None:
        self.entered.add((filename, line))

    def test_is(self, left: Any, right: Any) -> bool:
        if not isinstance(left, fx.Proxy):
            left, right = right, left
        if left is right or not isinstance(left, fx.Proxy):
            return left is right
        if isinstance(right, fx.Proxy) or not (right is None or isinstance(right, bool)):
            if isinstance(right, fx.Proxy) and right.node is left.node:
                return True
            self._refuse(f"branch on whether {described(left.node)} is the same object as another")
        what = f"branch on whether {described(left.node)} is {right}"
        if self._is_made(left.node) and left.node.op != "call_module" and left.node.target is not operator.getitem:
            return False  # one result of torch is a tensor; of several, some may be None
        return self._answer(left.node, what, lambda value: value is right, f"{{0}} is {right}", f"{{0}} is not {right}")

    def test_isinstance(self, value: Any, types: Any) -> bool:
        if not isinstance(value, fx.Proxy):
            return isinstance(value, types)
        node, what = value.node, f"branch on the type of {described(value.node)}"
        text = _text_of(types)
        if text is None:
            self.test_type(value)
            return bool(self._same(node, what, lambda each: isinstance(each, types)))
        said = f"isinstance({{0}}, {text})"
        return self._answer(node, what, lambda each: isinstance(each, types), said, f"not {said}")

    def test_type(self, value: Any) -> type:
        if not isinstance(value, fx.Proxy):
            return type(value)
        node, what = value.node, f"branch on the type of {described(value.node)}"
        kind: type = self._same(node, what, type)
        if not self._is_made(node):
            if kind is type(None):
                self._check(node, what, "{0} is None")
            elif kind in _TYPES:
                self._check(node, what, f"type({{0}}) is {_TYPES[kind]}")
            else:
                self._refuse(f"{what} (class {kind.__qualname__})")
        return kind

    def test_in(self, value: Any, items: Any) -> bool:
        if not isinstance(value, fx.Proxy):
            return value in items
        if isinstance(items, tuple | list | Set) and all(isinstance(each, torch.dtype) for each in items):
            return self._is_one_of(value.node, items)
        if isinstance(items, Set | Mapping):  # looked up by a hash, which is the proxy's
            self._refuse(f"branch on {described(value.node)}")
        return value in items

    def test_hasattr(self, value: Any, name: str) -> bool:
        if not isinstance(value, fx.Proxy):
            return hasattr(value, name)
        what, said = f"branch on whether {described(value.node)} has '{name}'", f"hasattr({{0}}, {name!r})"
        return self._answer(value.node, what, lambda each: hasattr(each, name), said, f"not {said}")

    def test_callable(self, value: Any) -> bool:
        if not isinstance(value, fx.Proxy):
            return callable(value)
        what = f"branch on whether {described(value.node)} can be called"
        return self._answer(value.node, what, callable, "callable({0})", "not callable({0})")

    def test_len(self, value: Any) -> Any:
        if not isinstance(value, fx.Proxy):
            return len(value)
        node, what = value.node, f"the length of {described(value.node)}"
        found = self._values(node)
        if all(isinstance(each, torch.Tensor) and each.dim() for each in found) and len(set(map(len, found))) > 1:
            return value.size(0)  # the batch: a size that is read anew in each call
        length: int = self._same(node, what, len, shown=True)
        if self._entry.of(node) is not None:
            self._check(node, what, f"len({{0}}) == {length}")
        else:
            self._record(checked_length, node, length)
        return length

    def test_keys(self, value: fx.Proxy) -> tuple[str, ...]:
        """The keys of an argument that is a dict."""
        node, what = value.node, f"the keys of {described(value.node)}"
        keys: tuple[str, ...] = self._same(node, what, tuple, shown=True)
        for text in (f"len({{0}}) == {len(keys)}", *(f"{key!r} in {{0}}" for key in keys)):
            self._check(node, what, text)
        return keys

    def test_range(self, *bounds: Any) -> range:
        what = "loop over a range of"
        return range(*(self._size(bound, what) if isinstance(bound, fx.Proxy) else bound for bound in bounds))

    def repeated(self, items: Any, times: fx.Proxy) -> Any:
        """A list or a tuple, so many times."""
        return items * self._size(times, "a list repeated by")

    def test_assert(self, value: Any, *message: Any) -> None:
        if not value:
            raise AssertionError(message[0] if message and not callable(message[0]) else "")

    def _size(self, bound: fx.Proxy, words: str) -> int:
        node, what = bound.node, f"{words} {described(bound.node)}"
        self._plain_values(node, what)
        found: int = self._same(node, what, operator.index, shown=True)
        if self._entry.of(node) is not None:
            self._check(node, what, f"{{0}} == {found}")
        else:
            self._record(checked_branch, node, found)
        return found

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, args, kwargs)

    def test_truth(self, node: fx.Node) -> bool:
        """The truth of a traced value, such as `x.dim() == 3`, or an argument that is a flag or None.

        Numbers that differ between calls decide nothing, except that two of them are equal in all calls.
        """
        what, parts = f"branch on {described(node)}", operands(node)
        if (of := _compared_dtype(node)) is not None:
            return self._is_one_of(of[0], of[1:]) is (node.target is operator.eq)
        equal = node.target in (operator.eq, operator.ne) and len(parts) == 2
        if equal and set(self._plain_values(node, what)) == {node.target is operator.eq}:
            parts = ()
        for part in parts:
            self._same(part, what, _number, shown=True)
        values = self._plain_values(node, what)
        if all(value is None for value in values):
            self._check(node, what, "{0} is None")
            return False
        answer: bool = self._same(node, what, bool)
        if self._entry.of(node) is not None:
            self._check(node, what, "{0}" if answer else "not {0}")
        else:
            self._record(checked_branch, node, answer)
        return answer

    def _is_one_of(self, node: fx.Node, dtypes: Collection[torch.dtype]) -> bool:
        """Whether a traced dtype is one of some, as in a model in bfloat16.

        A model is planned in float32, and runs in either: the gate shows whether the answer makes a difference there.
        Tests of other dtypes, which an argument may have in another call, and of bfloat16 alone are refused.
        """
        what = f"branch on {described(node)}"
        full, half, other = (precision in dtypes for precision in _PRECISIONS)
        if not {*self._values(node), *dtypes} <= set(_PRECISIONS) or full is other is not half:
            self._refuse(what)
        if full is half is not other:
            same = self.tracer.create_proxy("call_function", operator.eq, (self.tracer.proxy(node), torch.float16), {})
            self._record(checked_branch, same.node, False)
        elif full is not half:
            self.of_dtype = self.of_dtype or f"{what} {self.tracer.place()}".strip()
        return half

    def is_number(self, value: fx.Proxy, number: int) -> bool:
        """True if a traced number is this one in all calls; then it is checked."""
        if set(self._plain_values(value.node, f"branch on {described(value.node)}")) != {number}:
            return False
        equal = self.tracer.create_proxy("call_function", operator.eq, (value, number), {})
        return self.test_truth(equal.node)

    def _plain_values(self, node: fx.Node, what: str) -> Values:
        """The values of a node that is no tensor and does not depend on a tensor's numbers."""
        for part in operands(node):
            if not is_size(part) and self._entry.of(part) is None:
                self._refuse(what)
        values = self._values(node)
        if any(isinstance(value, torch.Tensor) for value in values):
            self._refuse(what)
        return values

    def _answer(self, node: fx.Node, what: str, test: Callable[[Any], bool], true: str, false: str) -> bool:
        answer: bool = self._same(node, what, test)
        if not self._is_made(node):
            self._check(node, what, true if answer else false)
        return answer

    def _same(self, node: fx.Node, what: str, read: Callable[[Any], Hashable], shown: bool = False) -> Any:
        """What `read` gives for the value in all calls."""
        values = self._values(node)
        try:
            found = tuple(dict.fromkeys(map(read, values)))
        except Exception:  # noqa: BLE001 - classes of the user's own can raise anything when they are asked
            self._refuse(what)
        if len(found) > 1:
            differing = f" ({' and '.join(map(str, found[:2]))} in two calls)"
            self._refuse(f"{what}{differing if shown else ', which differs between calls'}")
        return found[0]

    def _values(self, node: fx.Node) -> Values:
        values = self._entry.of(node)
        if values is None:
            if node.name not in self._computed:
                raise ValuesNeededError(self.tracer.graph, node)
            values = self._computed[node.name]
        if values is None:
            self._refuse(f"branch on {described(node)}")
        return values

    def _check(self, node: fx.Node, what: str, text: str) -> None:
        """Records a condition to check in each call, unless it is on the module's own tensors, whose shapes are bound.

        A computed value cannot be checked before the forward has had effects.
        """
        if self._entry.of(node) is None:
            self._refuse(what)
        if not all(self._is_bound(each) for each in _sources(node)):
            self.found[PlannedTest(node, text)] = None

    def _is_bound(self, node: fx.Node) -> bool:
        """True for a Parameter or buffer of the module."""
        return node.op == "get_attr" and isinstance((self._entry.of(node) or (None,))[0], torch.Tensor)

    def _is_made(self, node: fx.Node) -> bool:
        """True for a result of torch on tensors, a size, or a tensor of the module: always of one type, never None."""
        if node.op == "call_module":
            return self.tracer.is_torch(str(node.target))
        if node.op in ("placeholder", "get_attr"):
            return self._is_bound(node)
        if is_size(node):
            return True
        owner = node.args[0] if node.args else None
        if node.target is getattr and node.args[1] in _MAYBE_NONE:
            return False
        if not isinstance(owner, fx.Node) or (node.op == "call_function" and node.target not in _OF_THEIR_OWNER):
            return node.op == "call_function"
        values = self._entry.of(owner)
        return self._is_made(owner) if values is None else all(isinstance(value, torch.Tensor) for value in values)

    def _record(self, check: Callable[[Any, Any], object], node: fx.Node, planned: object) -> None:
        """Checks a computed value in its place in the forward; before it where shapes of what is given decide it."""
        given = self._fixed.get(node.name)
        for each in self.tracer.graph.nodes if given is not None else ():
            if (shape := (given or {}).get(each.name)) is not None:
                known = f"{{0}}.shape == {shape}" if shape[0] is not None else f"{{0}}.shape[1:] == {shape[1:]}"
                self._check(each, described(each), known)
        if given is not None:
            return
        self.tracer.create_proxy("call_function", check, (self.tracer.proxy(node), planned), {})

    def _refuse(self, what: str) -> NoReturn:
        raise CannotTraceError(f"{what} {self.tracer.place()}".strip())


def described(node: fx.Node) -> str:
    """A traced value in words: an argument, a tensor's size, an attribute, a child's output, or a tensor's value."""
    parts = operands(node)
    if len(parts) > 1 or parts[0] is not node:
        kinds = dict.fromkeys(described(part) for part in parts)
        return "a tensor's value" if "a tensor's value" in kinds else " and ".join(kinds)
    if is_size(node):
        return "tensor size"
    if node.op == "placeholder":
        return f"argument '{node.target}'"
    if node.op == "get_attr":
        return f"attribute '{node.target}'"
    if node.op == "call_module":
        return f"what '{node.target}' returns"
    owner = node.args[0] if node.args else None
    if isinstance(owner, fx.Node) and node.op == "call_method" and node.target in VIEWS_OF_DICT:
        return f"the {node.target} of {described(owner)}"
    if isinstance(owner, fx.Node) and node.target is operator.getitem and isinstance(node.args[1], str):
        return f"item {node.args[1]!r} of {described(owner)}"
    if node.target is getattr:
        of_tensor = isinstance(owner, fx.Node) and owner.target is not getattr
        return f"a tensor's {node.args[1]}" if of_tensor or not isinstance(owner, fx.Node) else described(owner)
    return "a tensor's layout" if node.target in _LAYOUTS else "a tensor's value"


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values from which Python's operators compute a node: itself, where another operation gives it."""
    if node.op != "call_function" or node.target not in (*INFIX, *PREFIX):
        return (node,)
    return tuple(dict.fromkeys(part for each in node.all_input_nodes for part in operands(each)))


def _compared_dtype(node: fx.Node) -> tuple[fx.Node, torch.dtype] | None:
    """A traced dtype and the one that it is compared with."""
    if node.target not in (operator.eq, operator.ne) or len(node.args) != 2:
        return None
    traced, known = sorted(node.args, key=lambda each: isinstance(each, torch.dtype))
    return (traced, known) if isinstance(traced, fx.Node) and isinstance(known, torch.dtype) else None


def _sources(node: fx.Node) -> set[fx.Node]:
    """The arguments and attributes that a node is read from."""
    inputs = node.all_input_nodes
    return set().union(*map(_sources, inputs)) if inputs else {node}


def _number(value: Any) -> Hashable:
    """What has to be the same in all calls for a decision: the number; the rest is decided by its answer."""
    if isinstance(value, torch.Size | tuple):
        return tuple(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text_of(types: Any) -> str | None:
    """Types as text; None where one of them has no name in generated code."""
    each = types if isinstance(types, tuple) else getattr(types, "__args__", None) or (types,)
    if not all(isinstance(kind, type) and kind in _TYPES for kind in each):
        return None
    names = [_TYPES[kind] for kind in each]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"

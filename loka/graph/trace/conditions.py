"""The plain values by which a forward was decided, and the conditions on a call that follow from them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loka.graph.capture.captured import Captured, Condition, Read
from loka.graph.capture.sources import Source
from loka.graph.ir import CannotTraceError
from loka.graph.trace.examples import ExampleCall
from loka.graph.trace.printer import attribute, constant
from loka.graph.trace.situations import followed, leaves_in

_MANY = 4093  # times the difference between two example batches: as many rows as a model is trained on
_PLAIN = (bool, int, float, str, type(None), dict)  # types that conditions on values tell
_DECIDES = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "BOOL_TRUE", "BOOL_FALSE", "NONE_MATCH"})


class Conditions:
    """What captures of one module have read of it and of its arguments, as conditions on a call."""

    def __init__(self, module: nn.Module, calls: Sequence[ExampleCall]) -> None:
        self._module, self._calls, self._first = module, calls, calls[0]

    def of(self, captured: Captured) -> tuple[str, ...]:
        """What has to hold in a call, as Python: sizes, plain arguments and plain attributes."""
        self._check(captured.conditions)
        given = bound_arguments(self._module, self._first)
        found = [*_ranks(captured.conditions, given), *(each.text for each in captured.conditions)]
        for name, parameter in inspect.signature(self._module.forward).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                found.append(f"len({name}) == {len(given[name])}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                found.append(f"list({name}) == {constant(list(given[name]))}")
        for read in captured.reads:
            if read.source.root in given:
                found += self._of_argument(read, followed(given[read.source.root], read.source.steps))
        for source, value in self._decided(captured):
            if source.steps[-1][1] != "training":
                found.append(_equals(self._expression(source), value))
        return tuple(dict.fromkeys(found))

    def check_calls(self, conditions: Sequence[str]) -> None:
        """Raises where an argument hides a function of a condition, or the module is called in several ways."""
        called = {name for each in conditions for name in re.findall(r"\b(\w+)\(", each)}
        hidden = next((name for name in bound_arguments(self._module, self._first) if name in called), None)
        if hidden is not None:
            raise CannotTraceError(f"argument '{hidden}' has a name that the generated text needs for itself")
        for call in self._calls[1:]:
            given = bound_arguments(self._module, call)
            other = next((each for each in conditions if not self._holds(each, given)), None)
            if other is not None:
                raise CannotTraceError(f"is called in several ways: {other} in one call, and not in another")

    def _decided(self, captured: Captured) -> Iterator[tuple[Source, Any]]:
        """The plain values of the user's own modules and objects that are read, with their sources."""
        for read in dict.fromkeys(captured.reads):
            source = read.source
            if not source.is_of_module or read.kind not in _DECIDES or any(map(_is_hidden, source.steps)):
                continue
            holder, value = self._holder(source)
            if not _is_of_torch(holder) and type(value) in (bool, int, float, str, type(None)):
                yield source, value

    def _holder(self, source: Source) -> tuple[nn.Module, Any]:
        """The innermost module on the way to a value, and the value."""
        holder = self._module
        value: Any = holder
        for kind, key in source.steps:
            value = getattr(value, key) if kind == "." else value[key]
            holder = value if isinstance(value, nn.Module) else holder
        return holder, value

    def _of_argument(self, read: Read, value: Any) -> list[str]:
        """The conditions on one argument, or on what is in it, that a read stands for."""
        text = read.source.expression
        if isinstance(value, torch.Tensor):
            return self._of_tensor(read.source)
        if isinstance(value, torch.Size):
            return [f"{text.removesuffix('.shape')}.dim() == {len(value)}"] if text.endswith(".shape") else []
        if isinstance(value, dict) and "DICT" in read.kind:
            return [f"list({text}) == {constant(list(value))}"]
        if isinstance(value, list | tuple) and read.kind == "SEQUENCE_LENGTH":
            return [*_type_is(text, value), f"len({text}) == {len(value)}"]
        if read.kind == "TYPE_MATCH" and type(value) not in _PLAIN:
            return _type_is(text, value)
        if read.kind not in _DECIDES:
            return []
        may_be_tensor = type(value) is float and not self._is_annotated(read.source.root, "float")
        return [*([f"not isinstance({text}, torch.Tensor)"] if may_be_tensor else []), _equals(text, value)]

    def _is_annotated(self, name: str, *kinds: str) -> bool:
        """True for an argument that is annotated with one of some classes alone."""
        annotation = inspect.signature(self._module.forward).parameters[name].annotation
        return (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")) in kinds

    def _of_tensor(self, source: Source) -> list[str]:
        """That an argument is a tensor, where its place in the signature allows for something else."""
        parameter = inspect.signature(self._module.forward).parameters[source.root]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default is None:
            return [f"{source.expression} is not None"]
        if source.steps or self._is_annotated(source.root, "Tensor", "torch.Tensor"):
            return []
        is_open = parameter.annotation is not parameter.empty or parameter.default is not parameter.empty
        return [f"isinstance({source.expression}, torch.Tensor)"] if is_open else []

    def _check(self, conditions: Sequence[Condition]) -> None:
        """Raises where a condition does not hold for as many rows as a model is trained on, as far as batches tell."""
        first = self._calls[0]
        second = next((call for call in self._calls if call.batch != first.batch), first)
        given = [bound_arguments(self._module, call) for call in (first, second)]
        given.append({name: _larger(value, given[1][name]) for name, value in given[0].items()})
        for condition in conditions:
            for each in given:
                if not self._holds(condition.text, each):
                    raise CannotTraceError(
                        f"depends on the number of rows: {condition.text} {condition.place}".rstrip()
                    )

    def _holds(self, condition: str, arguments: Mapping[str, Any]) -> bool:
        scope = {"math": math, "torch": torch}
        try:
            return bool(eval(condition, scope, {**arguments, "self": self._module}))  # noqa: S307 - text that LoKA made
        except (AttributeError, IndexError, KeyError, TypeError, NameError):
            return False

    def _expression(self, source: Source) -> str:
        """What the module holds, as Python on `self`."""
        names = dotted(source.steps)
        text, rest = attribute(self._module, ".".join(names)), source.steps[len(names) :]
        return text + "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in rest)


def _ranks(conditions: Sequence[Condition], given: Mapping[str, Any]) -> Iterator[str]:
    """The ranks of the arguments whose sizes conditions look at."""
    for name, value in given.items():
        for source, leaf in leaves_in(value, Source(name, (), "")):
            sizes = re.compile(rf"(?<![\w.\]]){re.escape(source.expression)}\.shape\[")
            if isinstance(leaf, torch.Tensor) and any(sizes.search(each.text) for each in conditions):
                yield f"{source.expression}.dim() == {leaf.dim()}"


def _type_is(expression: str, value: Any) -> list[str]:
    """That a value has its class, by name: text has no other way to the classes of the user's files."""
    kind = type(value)
    if kind in (list, tuple):
        return [f"type({expression}) is {kind.__name__}"]
    return [f"type({expression}).__qualname__ == {kind.__qualname__!r}"]


def _equals(expression: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f"{expression} is {value}"
    return f"{expression} == {constant(value)}"


def bound_arguments(module: nn.Module, call: ExampleCall) -> dict[str, Any]:
    """A call's arguments, with defaults, by name."""
    given = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    return dict(given.arguments)


def _larger(a: Any, b: Any) -> Any:
    """Arguments for many samples, without values: sizes that differ between two batches grow as they do there."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim():
        sizes = [m + _MANY * (n - m) for m, n in zip(a.shape, b.shape, strict=True)]
        return torch.empty(sizes, dtype=a.dtype, device="meta")
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        items = [_larger(x, y) for x, y in zip(a, b, strict=True)]
        if hasattr(a, "_fields"):
            return type(a)(*items)
        return type(a)(items) if type(a) in (tuple, list) else a
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        made = copy.copy(a)
        for each in dataclasses.fields(made):
            object.__setattr__(made, each.name, _larger(getattr(a, each.name), getattr(b, each.name)))
        return made
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _larger(item, b.get(key)) for key, item in a.items()}
    if type(a) is int and type(b) is int:
        return a + _MANY * (b - a)
    return a


def dotted(steps: Sequence[tuple[str, Any]]) -> list[str]:
    """The attributes at the beginning of a way."""
    count = next((place for place, (kind, _) in enumerate(steps) if kind != "."), len(steps))
    return [str(key) for _, key in steps[:count]]


def _is_hidden(step: tuple[str, Any]) -> bool:
    """True for a step into a function: a leaf's stub, or what a function of the user's holds."""
    return step == (".", "forward") or str(step[1]).startswith("__")


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")

"""The arguments of a captured call, by the names of the forward's signature."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.graph.capture.captured import CannotCaptureError
from loka.graph.capture.sources import Source, parsed


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call by the names of the forward's signature, defaults included."""

    names: tuple[str, ...]  # of the positional ones, in order
    rest: str  # the name of `*args`; "" without
    keywords: str  # the name of `**kwargs`; "" without
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: frozenset[str]  # names of its keyword arguments
    module: nn.Module
    paths: dict[str, str]  # of the modules in it, the first of several, by id as text: Dynamo's key

    def source(self, name: str) -> Source:
        """A source of Dynamo's, as one of the forward's own arguments."""
        root, steps = parsed(name)
        if root == "self":
            return Source("self", self._by_path(steps), name)
        if root == "args" and steps and isinstance(steps[0][1], int):
            place = steps[0][1]
            if place < len(self.names):
                return Source(self.names[place], steps[1:], name)
            return Source(self.rest, (("[]", place - len(self.names)), *steps[1:]), name)
        if root == "kwargs" and steps:
            own = str(steps[0][1])
            return Source(own, steps[1:], name) if own in self.known else Source(self.keywords, steps, name)
        return Source("", (), name)

    def _by_path(self, steps: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        """Steps through the path of the last module on the way, which a list or another name may have led to."""
        value: Any = self.module
        found = steps
        for place, (kind, key) in enumerate(steps, 1):
            try:
                value = getattr(value, str(key)) if kind == "." else value[key]
            except (AttributeError, LookupError, TypeError):  # of what a function holds
                break
            if isinstance(value, nn.Module) and (path := self.paths.get(str(id(value)))) is not None:
                found = (*((".", name) for name in path.split(".") if name), *steps[place:])
        return found

    def tensors(self) -> Iterator[tuple[Source, torch.Tensor]]:
        """The tensors among the arguments, each with its source."""
        for name, value in zip(self.names, self.args, strict=False):
            yield from _tensors_in(value, Source(name, (), ""))
        yield from _tensors_in(self.args[len(self.names) :], Source(self.rest, (), ""))
        for name, value in self.kwargs.items():
            of_all = Source(self.keywords, (("[]", name),), "")
            yield from _tensors_in(value, Source(name, (), "") if name in self.known else of_all)


def _tensors_in(value: Any, source: Source) -> Iterator[tuple[Source, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield source, value
        return
    if isinstance(value, dict):
        parts = [(("[]", key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(("[]", place), item) for place, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [((".", each.name), getattr(value, each.name)) for each in dataclasses.fields(value)]
    else:
        parts = []
    for step, item in parts:
        yield from _tensors_in(item, Source(source.root, (*source.steps, step), ""))


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    kinds = inspect.Parameter
    try:
        signature = inspect.signature(module.forward)
        given = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CannotCaptureError(f"the arguments do not fit the forward of {type(module).__name__}: {error}") from error
    given.apply_defaults()
    parameters = signature.parameters.values()
    names = tuple(p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "")
    keywords = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), "")
    own = frozenset(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
    paths = {str(id(child)): path for path, child in module.named_modules()}
    return Arguments(names, rest, keywords, given.args, given.kwargs, own, module, paths)

"""Leaves: children whose calls stay one node each in a captured graph."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from loka.graph.capture.captured import CannotCaptureError, map_tree
from loka.graph.capture.undisturbed import buffers_kept

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FormNeededError(Exception):
    """A leaf returns more than one tensor; capture starts again, with the form of its result known."""

    def __init__(self, path: str, form: Any) -> None:
        super().__init__(path)
        self.path, self.form = path, form


@dataclass(slots=True)
class Leaves:
    """Children whose calls stay nodes; `forms` has their results, with places in the flat list for tensors."""

    modules: dict[str, nn.Module]
    forwards: dict[str, Callable[..., Any]]
    observed: Mapping[str, tuple[Any, Any]]
    forms: dict[str, Any] = field(default_factory=dict)

    def run(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a leaf on fake tensors: its result if that is one tensor, otherwise its tensors."""
        mode = torch._guards.detect_fake_mode((args, kwargs))
        if mode is None:
            return self.forwards[path](*args, **kwargs)
        allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        unknown = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # fake, it returns no None
        try:
            with unknown:  # numbers that the leaf reads of fake tensors are its own
                made = self.forwards[path](*args, **kwargs)
        except Exception:
            if path not in self.observed:
                raise
            made = _as_observed(*self.observed[path], list(tree_leaves((args, kwargs))))
        finally:
            mode.allow_non_fake_inputs = allowed
            torch.backends.mha.set_fastpath_enabled(fast)
        if isinstance(made, torch.Tensor):
            return made
        flat: list[torch.Tensor] = []
        form = map_tree(made, lambda leaf: _placed(leaf, flat))
        if path not in self.forms:
            raise FormNeededError(path, form)
        return tuple(flat)

    def install(self) -> None:
        """Gives the leaves forwards that Dynamo takes as one node, and takes their hooks, which a call will run."""
        for path, child in self.modules.items():
            vars(child).update({name: OrderedDict() for name in _HOOKS if name in vars(child)}, forward=self.stub(path))

    def stub(self, path: str) -> Callable[..., Any]:
        """What stands for a leaf's forward, for Dynamo to read."""
        form = self.forms.get(path)

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = _call_leaf(path, *args, **kwargs)
            return made if form is None else _filled(form, made)

        return forward

    def restore(self, graph: fx.Graph, node: fx.Node) -> None:
        """Makes a node the call of a module, whose tensors are taken from its result instead of the flat list."""
        path = str(node.args[0])
        node.op, node.target, node.args = "call_module", path, node.args[1:]
        if path not in self.forms:
            return
        steps = dict(_places(self.forms[path], ()))
        for item in list(node.users):
            *way, (kind, key) = steps[_Place(item.args[1])]
            of = node
            with graph.inserting_before(item):
                for each, name in way:
                    of = graph.call_function(operator.getitem if each == "[]" else getattr, (of, name))
                    of.meta |= {key: item.meta[key] for key in ("modules", "stack_trace") if key in item.meta}
            item.target, item.args = operator.getitem if kind == "[]" else getattr, (of, key)


def observed_results(
    module: nn.Module, paths: Collection[str], calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
) -> dict[str, tuple[Any, Any]]:
    """What children return in two calls of a module, if they are called once in each.

    Runs without gradients; buffers and random states are restored. Raises CannotCaptureError where it cannot run.
    """
    made: dict[str, list[Any]] = {path: [] for path in paths}
    for args, kwargs in calls:
        hooks = [module.get_submodule(path).register_forward_hook(_keeping(made[path])) for path in paths]
        try:
            with buffers_kept(module):
                module.forward(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
        except Exception as error:
            raise CannotCaptureError(f"running it raised {type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
    return {path: (results[0], results[1]) for path, results in made.items() if len(results) == 2}


def _keeping(made: list[Any]) -> Callable[..., None]:
    return lambda module, args, result: made.append(result)


def _as_observed(a: Any, b: Any, given: Sequence[Any]) -> Any:
    """A result as it was observed, with the sizes that differ between two calls as symbols of what is given now."""
    sizes: list[Any] = [size for each in given if isinstance(each, torch.Tensor) for size in each.shape]
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]

    def sized(m: int, n: int) -> Any:
        times = [(m // each.node.hint, each) for each in symbols if m % each.node.hint == 0]
        if m != n and not times:
            raise CannotCaptureError("a size of its child's result follows from none of its arguments")
        count, symbol = min(times, key=operator.itemgetter(0)) if m != n else (m, 1)
        return count * symbol

    def like(x: Any, y: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if not isinstance(x, bool | int | float | str | None):
                raise CannotCaptureError("its child returns more than tensors in tuples, lists and dicts")
            return x
        shape = list(map(sized, x.shape, y.shape))
        needed = torch.is_grad_enabled() and x.is_floating_point()  # as what reads it may have a gradient of its own
        return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=needed).clone()

    return tree_map(like, a, b)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place in the flat list of a leaf's result."""

    index: Any


def _placed(leaf: Any, flat: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flat.append(leaf)
    return _Place(len(flat) - 1)


def _filled(form: Any, flat: Sequence[torch.Tensor]) -> Any:
    """A form with the tensors in their places; Dynamo reads this function."""
    if isinstance(form, _Place):
        return flat[form.index]
    if isinstance(form, dict):
        return {key: _filled(item, flat) for key, item in form.items()}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*[_filled(item, flat) for item in form])
    if isinstance(form, list):
        return [_filled(item, flat) for item in form]
    if isinstance(form, tuple):
        return tuple([_filled(item, flat) for item in form])
    if dataclasses.is_dataclass(form) and not isinstance(form, type):
        return type(form)(**{each.name: _filled(getattr(form, each.name), flat) for each in dataclasses.fields(form)})
    return form


def _places(form: Any, steps: tuple[tuple[str, Any], ...]) -> Iterator[tuple[_Place, tuple[tuple[str, Any], ...]]]:
    """The places in a form, each with the steps that lead to it."""
    if isinstance(form, _Place):
        yield form, steps
    elif isinstance(form, dict):
        for key, item in form.items():
            yield from _places(item, (*steps, ("[]", key)))
    elif isinstance(form, list | tuple):
        for place, item in enumerate(form):
            yield from _places(item, (*steps, ("[]", place)))
    elif dataclasses.is_dataclass(form) and not isinstance(form, type):
        for each in dataclasses.fields(form):
            yield from _places(getattr(form, each.name), (*steps, (".", each.name)))


_LEAVES: ContextVar[Leaves] = ContextVar("leaves")


def _call_leaf(path: str, *args: Any, **kwargs: Any) -> Any:
    """A leaf's call: one node for Dynamo, which runs it on fake tensors to know what it returns."""
    return _LEAVES.get().run(path, args, kwargs)


@contextlib.contextmanager
def leaves_of(module: nn.Module, paths: Collection[str], observed: Mapping[str, tuple[Any, Any]]) -> Iterator[Leaves]:
    modules = {path: module.get_submodule(path) for path in paths}
    if modules:
        torch.compiler.allow_in_graph(_call_leaf)  # type: ignore[no-untyped-call]
    leaves = Leaves(modules, {path: child.forward for path, child in modules.items()}, observed)
    token = _LEAVES.set(leaves)
    try:
        yield leaves
    finally:
        _LEAVES.reset(token)


def is_call(node: fx.Node) -> bool:
    """True for the node that a leaf's call left in a graph."""
    return node.op == "call_function" and node.target is _call_leaf

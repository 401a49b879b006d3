"""Named ranges of bound modules in the traces of torch.profiler, for `Patch.ranges`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from loka.dispatch.bind.bound import CallCounters, derived_class
from loka.dispatch.bound_state import BoundModule


@contextmanager
def named_ranges(modules: tuple[BoundModule, ...]) -> Iterator[None]:
    """Context in which the forwards of bound modules, and the backwards of the functions they call, have ranges.

    Each bound module has a class of its own, whose forward is another one inside. Dynamo does not guard on a plain
    forward, so that compiled code runs as it is.
    """
    classes = [derived_class(type(bound.module)) for bound in modules]
    forwards = [vars(each)["forward"] for each in classes]
    try:
        for bound, each, forward in zip(modules, classes, forwards, strict=True):
            each.forward = _ranged(forward, bound.name or type(bound.module).__name__, _forward_label(bound))
        yield
    finally:
        for each, forward in zip(classes, forwards, strict=True):
            each.forward = forward


def _ranged(forward: Callable[..., Any], name: str, label: str) -> Callable[..., Any]:
    @wraps(forward)
    def ranged(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _profiler_enabled():
            return forward(self, *args, **kwargs)
        with record_function(label):
            result = forward(self, *args, **kwargs)
        for node in _functions_between(result, (args, kwargs)):
            _add_range(node, f"loka: {name} (backward of {node._forward_cls.__name__})")
        return result

    return ranged


def _forward_label(bound: BoundModule) -> str:
    name = bound.name or type(bound.module).__name__
    return f"loka: {name} ({_runs_in(bound.counters, f'{bound.name}.' if bound.name else '')})"


def _runs_in(counters: CallCounters, prefix: str) -> str:
    """ "fprop FP8", with the names of the sites in a module that has several; "as-is" where none is in FP8."""
    fp8 = [site for index, site in enumerate(counters.sites) if "fprop" in counters.planned(index)]
    if not fp8:
        return "fprop as-is"
    if len(counters.sites) == 1:
        return "fprop FP8"
    return f"fprop FP8 of {', '.join(site.removeprefix(prefix) for site in fp8)}"


def _functions_between(result: Any, arguments: Any) -> list[Any]:
    """Nodes of torch.autograd.Functions through which gradients go from a result to arguments."""
    before = {node for node in map(_node, tree_leaves(arguments)) if node is not None}
    waiting = [node for node in map(_node, tree_leaves(result)) if node is not None]
    seen, found = set(before), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "_forward_cls"):
            found.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _node(leaf: Any) -> Any:
    return leaf.grad_fn if isinstance(leaf, torch.Tensor) else None


def _add_range(node: Any, label: str) -> None:
    """Put a range around a node's backward. The hooks return None, and so leave gradients as they are."""
    opened: list[record_function] = []

    def enter(gradients: Any) -> None:
        opened.append(record_function(label))
        opened[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(inputs: Any, outputs: Any) -> None:
        opened.pop().__exit__(None, None, None)

    node.register_prehook(enter)
    node.register_hook(leave)

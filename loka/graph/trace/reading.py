"""Reading a forward: captured in several situations, and merged into one list of operations.

A capture has constants where the forward reads what may change from call to call: flags and dtypes. So a forward is
captured with these varied together, each in a pattern of its own, and a constant that moves is printed as the
expression that has its value in every capture. What moves otherwise is refused. Plain attributes that are read are
conditions of the call, as sizes are.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loka.graph.capture.captured import CannotCaptureError, Captured, line_of, map_tree, modules_around, place_in
from loka.graph.capture.dynamo import capture
from loka.graph.capture.leaves import observed_results
from loka.graph.capture.undisturbed import buffers_kept
from loka.graph.fingerprint import called_children
from loka.graph.ir import CannotTraceError
from loka.graph.sites.groups import split_groups
from loka.graph.trace.alignment import aligned, operations, place_of_difference
from loka.graph.trace.conditions import Conditions, dotted
from loka.graph.trace.examples import ExampleCall, copy_tree
from loka.graph.trace.merging import FLOATS, IN_PLACE, LIMITS, Merged, Op, OwnerPaths
from loka.graph.trace.out_of_place import makes_its_result
from loka.graph.trace.situations import (
    DIFFERENCES,
    SITUATIONS,
    Seen,
    Situation,
    differentiable,
    in_situation,
    narrowed,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The operations of a whole forward. `called` are the inlined children."""

    ops: tuple[Op, ...]
    called: tuple[str, ...]
    mode_dependent: tuple[str, ...]  # paths of modules whose mode is read, and of called children that may read theirs
    conditions: tuple[str, ...]  # on the arguments and attributes, as Python, under which these are the operations
    is_split: bool = False  # products with several of the sites are split, so that sums may round otherwise


def read_forward(
    module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall], sites: Collection[str] = ()
) -> Reading:
    """The operations of a module's forward, and of its children in `expand` (relative names).

    Products with a Parameter that holds several of the `sites` (relative names) are split. The module is left as it
    was. Raises CannotTraceError with the reason, and the user's line where there is one.
    """
    return _Reader(module, expand, calls, sites).reading()


def other_situation(module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall]) -> str | None:
    """The mode or dtype in which a forward does other operations, in words, with the line; None where it does not."""
    reader = _Reader(module, expand, calls)
    with contextlib.suppress(CannotTraceError):
        return reader.difference(reader.first_seen().captured)
    return None


class _Reader:
    """Captures one module, and finds what is read of it."""

    def __init__(
        self, module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall], sites: Collection[str] = ()
    ) -> None:
        self._module, self._calls, self._first, self._sites = module, calls, calls[0], sites
        self._paths = OwnerPaths(module, expand)
        self._conditions = Conditions(module, calls)
        self._observed: dict[str, tuple[Any, Any]] = {}
        self._is_split = False
        self._leaves = tuple(called_children(module, self._paths.inside - {""}))

    def reading(self) -> Reading:
        """The merged captures."""
        seen = self.first_seen()
        _check_opaque(seen.captured)
        merged = self._merged(seen)
        if merged is None:
            raise CannotTraceError(self.difference(seen.captured) or "does other operations in another mode or dtype")
        if merged.lost:
            raise CannotTraceError(f"{merged.lost[0]} is not the same in each call")
        first = seen.captured
        conditions = self._conditions.of(first)
        self._conditions.check_calls(conditions)
        mode_dependent = (*self._flags(first), *self._mode_dependent_children(first))
        called = self._called(first)
        return Reading(tuple(merged.ops), called, mode_dependent, conditions, self._is_split)

    def first_seen(self) -> Seen:
        """The capture in training, with gradients."""
        try:
            return self._seen(SITUATIONS[0])
        except CannotTraceError:
            self._observe()
            return self._seen(SITUATIONS[0])

    def _merged(self, first: Seen) -> Merged | None:
        """The operations in all situations; None where they are not the same ones, but for casts that do nothing."""
        seen = [first, *(self._in_any_dtype(each) for each in self._situations(first.captured))]
        seen.sort(key=lambda each: -len(operations(each.captured.graph)))
        whole = seen[0].captured
        if any(aligned(whole, each.captured) is None for each in seen):
            return None
        flags = self._flags(first.captured)
        # Flags of several modules are told apart by a code for each, one bit a capture.
        for bit in range(max(len(flags) - 1, 0).bit_length()):
            on = frozenset(path for place, path in enumerate(flags) if place >> bit & 1)
            seen.append(self._seen(replace(SITUATIONS[0], on=on)))
            if aligned(whole, seen[-1].captured) is None:
                seen.pop()  # `other_conditions` meets the difference, too: such calls run the module's own forward
        return Merged(self._paths, self._first, seen, flags)

    def _situations(self, first: Captured) -> tuple[Situation, ...]:
        """Those in which constants of a capture may move. That nothing else does is seen where both forwards run."""
        constants: list[Any] = []
        done = operations(first.graph)
        for node in done:
            map_tree((node.args, dict(node.kwargs)), constants.append)
        if any(node.target in IN_PLACE or node.target is operator.setitem for node in done):
            return SITUATIONS[1:]  # what is written into keeps its dtype, which others may not have
        limits = {getattr(torch.finfo(each), name) for each in FLOATS for name in LIMITS}
        if any(isinstance(each, torch.dtype) or (type(each) is float and each in limits) for each in constants):
            return SITUATIONS[1:]
        has_flag = self._flags(first) and any(each is True for each in constants)  # all modules are in training there
        return (replace(SITUATIONS[0], training=False),) if has_flag else ()

    def _in_any_dtype(self, situation: Situation) -> Seen:
        """A situation as it is seen, or with what the module can run: some cannot under autocast, or on bfloat16."""
        tried = [situation] if situation.narrow else []
        tried += [replace(situation, narrow=False)] if situation.autocast is not None else []
        for each in tried:
            with contextlib.suppress(CannotTraceError):
                return self._seen(each)
        return self._seen(replace(situation, autocast=None, narrow=False))

    def _seen(self, situation: Situation) -> Seen:
        args, kwargs = copy_tree(self._first.args), copy_tree(self._first.kwargs)
        if situation.narrow:
            args, kwargs = (map_tree(each, lambda x: narrowed(x, situation.autocast)) for each in (args, kwargs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_situation(self._module, situation))
            stack.enter_context(buffers_kept(self._module))  # a called BatchNorm counts, on fake tensors, too
            stack.enter_context(torch.set_grad_enabled(situation.gradients))
            if situation.gradients:  # without, torch reads through a function whose backward is the user's own
                args, kwargs = (map_tree(each, differentiable) for each in (args, kwargs))
            if situation.autocast is not None:
                stack.enter_context(torch.autocast("cpu", situation.autocast))
            try:
                return Seen(situation, self._capture(args, kwargs))
            except CannotCaptureError as error:
                cannot = CannotTraceError(str(error))
                cannot.inside = self._paths.child_at(error.lines)
                raise cannot from error

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        read = capture(self._module, args, kwargs, leaves=self._leaves, observed=self._observed, result=True)
        split = split_groups(read, self._module, lambda path: any(each.startswith(f"{path}.") for each in self._sites))
        self._is_split |= split is not read
        return split

    def _observe(self) -> None:
        """Runs the module at two batches, and keeps what its leaves return."""
        second = next((call for call in self._calls if call.batch != self._first.batch), self._first)
        try:
            calls = [(each.args, each.kwargs) for each in (self._first, second)]
            self._observed = observed_results(self._module, self._leaves, calls)
        except CannotCaptureError as error:
            raise CannotTraceError(str(error)) from error

    def difference(self, first: Captured) -> str | None:
        """Which part of a situation gives another graph, in words; None where none does."""
        seen = []
        for words, changed in DIFFERENCES:
            seen.append(self._in_any_dtype(replace(SITUATIONS[0], **changed)).captured)
            if aligned(first, seen[-1]) is None and aligned(seen[-1], first) is None:
                return f"does other operations {words} {place_of_difference(first, seen[-1])}".rstrip()
        one, other = seen[-2:]
        if aligned(one, other) is None and aligned(other, one) is None:
            return f"does other operations in float16 than in bfloat16 {place_of_difference(one, other)}".rstrip()
        return None

    def _flags(self, captured: Captured) -> tuple[str, ...]:
        """The modules whose mode is read, by path."""
        sources = [read.source for read in captured.reads if read.source.is_of_module]
        paths = [each.path for each in sources if each.path is not None and each.steps[-1:] == ((".", "training"),)]
        return tuple(dict.fromkeys(path.rpartition(".")[0] for path in paths))

    def _mode_dependent_children(self, captured: Captured) -> Iterator[str]:
        """The called children that may do something else in another mode."""
        for path in dict.fromkeys(str(node.target) for node in captured.graph.nodes if node.op == "call_module"):
            child = self._module.get_submodule(path)
            if isinstance(child, nn.BatchNorm1d) or not makes_its_result(child):
                yield path

    def _called(self, captured: Captured) -> tuple[str, ...]:
        """The inlined children that the forward calls, in the order of the modules; some leave no operation."""
        found = {path for node in captured.graph.nodes for path in modules_around(node)}
        ways = [read.source.steps for read in captured.reads if read.source.is_of_module]
        found |= {".".join(dotted(way[:-1])) for way in ways if way[-1:] == ((".", "_forward_hooks"),)}
        inlined = found & self._paths.inside
        known = (path for path in self._paths.names.values() if path and path in inlined)
        return tuple(path for path in known if type(self._module.get_submodule(path)).forward is not nn.Module.forward)


def _check_opaque(captured: Captured) -> None:
    """Raises for operations with graphs of their own: checkpoints, gradients of the user's own, branches on data."""
    for node in captured.graph.nodes:
        if node.op == "get_attr" and isinstance(captured.constants[node.target], nn.Module):
            user = next(iter(node.users))
            line = line_of(user)
            where = f" {place_in(*line)}" if line is not None else ""
            raise CannotTraceError(f"calls {user.target}, which has a graph of its own{where}")

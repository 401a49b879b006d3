"""Calls unlike the examples: a forward whose text computes something else there has a condition, or is refused.

A capture is told neither that a forward asked for a tensor's rank, layout or dtype, nor what it asked of sizes that an
operation made: `y[:4].shape[0] == 4`. So the printed forward and the module's own are run on such calls, too.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka.graph.capture.captured import map_tree
from loka.graph.capture.undisturbed import buffers_kept, unchanged
from loka.graph.equivalence import outputs_differ, with_forward
from loka.graph.ir import CannotTraceError, ForwardIR
from loka.graph.trace.conditions import bound_arguments
from loka.graph.trace.examples import ExampleCall, Examples, copy_tree, quiet
from loka.graph.trace.printer import attribute
from loka.graph.trace.reading import other_situation

_ROWS = (2, 7, 300)  # samples, beside the examples' own
_TORCHS = frozenset({"aten", "prim", "prims", "profiler"})  # namespaces of operators, which check their arguments
_MOST_ELEMENTS = 2**21  # of the arguments at the largest number of samples: sequences take gigabytes and minutes else


@dataclass(frozen=True, slots=True)
class _Variant:
    """A change of a tensor that leaves its values, as far as the new rank has them."""

    is_possible: Callable[[Tensor], bool]
    change: Callable[[Tensor], Tensor]


_RANKS = (
    _Variant(lambda x: True, lambda x: x.unsqueeze(0)),
    _Variant(lambda x: x.dim() > 0, lambda x: x.unsqueeze(1)),
    _Variant(lambda x: x.dim() > 0, lambda x: x[0]),
    _Variant(lambda x: x.dim() > 1, lambda x: x[:, 0]),
)


def other_conditions(
    module: nn.Module,
    forward: ForwardIR,
    examples: Examples,
    copied: Callable[[], nn.Module],
    mode_dependent: Collection[str],
) -> tuple[str, ...]:
    """Conditions under which a printed forward is the module's own in calls unlike the examples, too.

    Compared are outputs and random states, in evaluation, and with the modules of these paths in different modes. No
    made-up size reaches operators of another library than torch, which may read past the end of their arguments, as
    FBGEMM's do by offsets: a forward that calls one is the module's own for ranks like the examples' and several rows.
    Raises CannotTraceError for a forward that depends on the number of rows, or on the layout or dtype of its
    arguments. The module is left as it was.
    """
    with unchanged(module):  # copies share children
        return _Others(module, forward, examples, copied, mode_dependent).conditions()


class _Others:
    def __init__(
        self,
        module: nn.Module,
        forward: ForwardIR,
        examples: Examples,
        copied: Callable[[], nn.Module],
        mode_dependent: Collection[str],
    ) -> None:
        self._module, self._inlined, self._mode_dependent = module, forward.inlined, mode_dependent
        self._calls = examples.calls
        self._ours, self._theirs = copied(), with_forward(copied(), forward)
        self._ours.eval()
        self._theirs.eval()

    def conditions(self) -> tuple[str, ...]:
        self._is_safe = not _calls_another_library(self._ours, self._calls[0])
        for rows in self._rows() if self._is_safe else ():
            found = self._difference(self._of_rows(rows))
            if found is not None:
                raise CannotTraceError(f"depends on the number of rows: at batch {rows}, traced, it {found}")
        if self._difference(self._with(_STRIDED, self._all_tensors())) is not None:
            raise CannotTraceError("depends on the layout of its arguments in memory")
        if self._difference(self._with(_NARROW, self._all_tensors()), autocast=True) is not None:
            reason = other_situation(self._module, self._inlined, self._calls)
            raise CannotTraceError(reason or "computes something else on bfloat16 arguments")
        return (*self._of_one_row(), *self._of_ranks(), *self._of_modes())

    def _rows(self) -> list[int]:
        """Numbers of samples; the largest is no more than its arguments may have elements, and more than the others."""
        *few, many = _ROWS
        sample = max(1, sum(tensor.numel() for tensor in self._all_tensors()) // max(1, self._calls[0].batch))
        return [*few, min(many, max(few[-1] + 1, _MOST_ELEMENTS // sample))]

    def _of_one_row(self) -> Iterator[str]:
        """Where a forward does something else with one row: one that squeezes, and asks for the rank of the result."""
        if self._is_safe and self._difference(self._of_rows(1)) is None:
            return
        first, second = (bound_arguments(self._module, call) for call in self._two())
        for name, value in first.items():
            other = second[name]
            if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dim() == other.dim():
                yield from (f"{name}.shape[{d}] != 1" for d, size in enumerate(value.shape) if size != other.shape[d])

    def _of_ranks(self) -> Iterator[str]:
        names = self._tensors()
        for name in names:
            groups = [{name: names[name]}, *([names] if len(names) > 1 else [])]
            if not self._is_safe or any(
                self._difference(self._with(each, list(group.values()))) for group in groups for each in _RANKS
            ):
                yield f"{name}.dim() == {names[name].dim()}"

    def _of_modes(self) -> Iterator[str]:
        """That all modules are in one mode, where a forward does something else if they are not."""
        paths = sorted({"", *self._mode_dependent})
        patterns = [
            [bool(place >> bit & 1) is one for place in range(len(paths))]
            for bit in range((len(paths) - 1).bit_length())
            for one in (True, False)
        ]
        differs = any(self._differs_in(dict(zip(paths, pattern, strict=True))) for pattern in patterns)
        self._set_modes(dict.fromkeys(paths, False))
        if differs:
            yield from (f"{attribute(self._module, path)}.training == self.training" for path in paths if path)

    def _differs_in(self, modes: Mapping[str, bool]) -> bool:
        """True where the two forwards differ with modules in these modes, with or without gradients."""
        self._set_modes(modes)
        return any(self._difference(self._calls[0], gradients=gradients) is not None for gradients in (True, False))

    def _set_modes(self, modes: Mapping[str, bool]) -> None:
        for path, training in modes.items():
            for each in (self._ours, self._theirs):
                child = each.get_submodule(path)
                for module in (child,) if path in ("", *self._inlined) else child.modules():
                    module.training = training

    def _difference(self, call: ExampleCall | None, autocast: bool = False, gradients: bool = True) -> str | None:
        return None if call is None else outputs_differ(self._ours, self._theirs, call, autocast, gradients)

    def _tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors."""
        given = bound_arguments(self._module, self._calls[0])
        return {name: value for name, value in given.items() if isinstance(value, Tensor)}

    def _all_tensors(self) -> list[Tensor]:
        """The tensors in the arguments of the first call, in whatever holds them."""
        found: list[Any] = []
        map_tree((self._calls[0].args, self._calls[0].kwargs), found.append)
        return [value for value in found if isinstance(value, Tensor)]

    def _with(self, variant: _Variant, tensors: Sequence[Tensor]) -> ExampleCall | None:
        """The first call with some tensors changed; None where one cannot be."""
        if not all(map(variant.is_possible, tensors)):
            return None
        changed = {id(value): variant.change(value) for value in tensors}
        call = self._calls[0]
        args, kwargs = (map_tree(each, lambda x: changed.get(id(x), x)) for each in (call.args, call.kwargs))
        return ExampleCall(call.batch, args, kwargs)

    def _two(self) -> tuple[ExampleCall, ExampleCall]:
        first = self._calls[0]
        return first, next((call for call in self._calls if call.batch != first.batch), first)

    def _of_rows(self, rows: int) -> ExampleCall | None:
        """A call with another number of samples; None where the examples do not tell what it would be."""
        first, second = self._two()
        if first.batch == second.batch:
            return None
        with suppress(_UnknownError):
            share = (rows - first.batch) / (second.batch - first.batch)
            args, kwargs = (
                _resized(a, b, share) for a, b in ((first.args, second.args), (first.kwargs, second.kwargs))
            )
            return ExampleCall(rows, args, kwargs)
        return None


class _Libraries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the namespaces of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.namespace)
        return func(*args, **(kwargs or {}))


def _calls_another_library(module: nn.Module, call: ExampleCall) -> bool:
    """True if a call reaches an operator that is not torch's."""
    with unchanged(module), buffers_kept(module), quiet(), torch.no_grad(), _Libraries() as libraries:
        module(*copy_tree(call.args), **copy_tree(call.kwargs))
    return not libraries.called <= _TORCHS


class _UnknownError(Exception):
    """Two examples do not tell what another call would be."""


def _resized(a: Any, b: Any, share: float) -> Any:
    """Arguments with sizes on the line through those of two examples, with their values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim():
        made = max(a, b, key=Tensor.numel)
        for dim, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)):
            if m != n:
                made = made.index_select(dim, torch.arange(_on_line(m, n, share)) % made.shape[dim])
        return made
    if type(a) in (tuple, list) and type(a) is type(b) and len(a) == len(b):
        return type(a)(_resized(x, y, share) for x, y in zip(a, b, strict=True))
    if type(a) is dict and type(b) is dict and list(a) == list(b):
        return {key: _resized(item, b[key], share) for key, item in a.items()}
    if type(a) is type(b) and hasattr(a, "_fields"):
        return type(a)(*(_resized(x, y, share) for x, y in zip(a, b, strict=True)))
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        other = copy.copy(a)
        for each in dataclasses.fields(a):
            object.__setattr__(other, each.name, _resized(getattr(a, each.name), getattr(b, each.name), share))
        return other
    if type(a) is int and type(b) is int and a != b:
        return _on_line(a, b, share)
    if type(a) is type(b) and type(a) in (bool, int, float, str, type(None)):
        return a
    raise _UnknownError


def _on_line(m: int, n: int, share: float) -> int:
    size = m + share * (n - m)
    if size < 0 or not math.isclose(size, round(size)):
        raise _UnknownError
    return round(size)


def _scattered(x: Tensor) -> Tensor:
    """The same values with the dimensions in the opposite order in memory; of a vector, with gaps between them."""
    if x.dim() == 1:
        return x.repeat_interleave(2)[::2]
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


_STRIDED = _Variant(lambda x: x.layout == torch.strided, _scattered)
_NARROW = _Variant(lambda x: True, lambda x: x.bfloat16() if x.dtype == torch.float32 else x)

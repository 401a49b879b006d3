"""Numbers of a forward that are no tensors: which of them may be built into what is recognised.

A size that is the same whatever the batch is part of the model. A float of a module and an argument are read in each
call, and so is what is computed from the batch: the two batch sizes that are seen do not show what it is in a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor

from loka.graph.canonical.recording import Run
from loka.graph.ir import Ref, RefKind, Statement


class Kind(IntEnum):
    """What numbers depend on, the least first."""

    FIXED = 0  # the model alone
    SIZE = 1  # the batch: a size of a tensor, or a product of such
    LIVE = 2  # a float of a module, an argument, or something else that may differ in each call


class Scalars:
    """The kinds of the locals that are numbers, or tuples and lists of these."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, list[object]] = {}
        self._tensors: set[str] = set()
        self._floats = runs[0].floats
        for name in runs[0].arguments:
            self._note(name, [run.arguments.get(name) for run in runs], Kind.LIVE)

    def read(self, step: Statement) -> Kind:
        """The last kind of the numbers that a statement reads, besides those in its text."""
        return max((self._of(ref.text) for ref in step.operands), default=Kind.FIXED)

    def made(self, step: Statement, values: Sequence[object]) -> None:
        """Note what a statement makes, in each run."""
        numbers = all(map(_is_number, values))
        self._note(step.target, values, self._kind(step, values) if numbers else Kind.LIVE)

    def _note(self, name: str, values: Sequence[object], kind: Kind) -> None:
        self._kinds.pop(name, None)
        self._tensors.discard(name)
        if isinstance(values[0], Tensor):
            self._tensors.add(name)
        elif all(map(_is_number, values)):
            self._kinds[name], self._values[name] = kind, list(values)

    def _of(self, text: str) -> Kind:
        return Kind.LIVE if text in self._floats else self._kinds.get(text, Kind.FIXED)

    def _kind(self, step: Statement, values: Sequence[object]) -> Kind:
        read = self.read(step)
        same = all(value == values[0] for value in values)
        numbers = [ref.text for ref in step.operands if ref.text in self._kinds]
        if not numbers:
            of_tensors = all(self._is_tensor(ref) for ref in step.operands)  # their sizes
            return (Kind.FIXED if same else Kind.SIZE) if of_tensors else Kind.LIVE
        if read is not Kind.SIZE:
            return read
        if step.op == "getitem":
            return Kind.FIXED if same else Kind.SIZE
        if step.op == "floordiv" and same and self._divides(numbers):
            return Kind.FIXED  # x.numel() // x.size(0)
        return Kind.SIZE if step.op == "mul" else Kind.LIVE

    def _is_tensor(self, ref: Ref) -> bool:
        if ref.kind is RefKind.LOCAL:
            return ref.text in self._tensors
        return ref.text not in self._floats  # a Parameter or a buffer: other attributes are part of the text

    def _divides(self, names: Sequence[str]) -> bool:
        """True for two sizes of the batch of which the second divides the first in each run."""
        if len(names) != 2 or any(self._kinds[name] is not Kind.SIZE for name in names):
            return False
        pairs = zip(*(self._values[name] for name in names), strict=True)
        return all(isinstance(a, int) and isinstance(b, int) and b > 0 and a % b == 0 for a, b in pairs)


def _is_number(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, bool | int | float | complex)

"""What all kernels have: the protocol of specs, widths of rows, and template values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loka.errors import InputError

LARGEST_HELD = 16384  # elements of a row that a program holds in registers; wider rows are taken in chunks
LARGEST_WIDTH = 2**20


def check_width(width: int) -> None:
    """Raises InputError for rows that no kernel takes."""
    if not 1 <= width <= LARGEST_WIDTH:
        raise InputError(f"no kernel is {width} wide; rows have 1 to {LARGEST_WIDTH} elements")


def padded_width(width: int) -> int:
    """The power of two of elements that a row takes up in registers."""
    return 1 << (width - 1).bit_length()


class KernelSpec(Protocol):
    """Properties that every spec has: names of its operator, parameters and results."""

    @property
    def function(self) -> str:
        """The operator's name."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Its tensor parameters, in order."""

    @property
    def results(self) -> tuple[str, ...]:
        """Its results, in order; a single result is not returned as a tuple."""


@dataclass(frozen=True, slots=True)
class WidthLaunch:
    """The launch of an operator's kernel for one width."""

    width: int
    kernel: str  # name in `triton_kernels`
    constants: tuple[int, ...]
    warps: int
    least_rows: int  # of a program
    most_programs: int  # on each multiprocessor


@dataclass(frozen=True, slots=True)
class KernelValues:
    """The values of one kernel's template, `triton/FAMILY.py.j2`.

    The template is rendered in the layouts `triton/kernel.py.j2`, `triton/launch.py.j2` and `triton/operator.py.j2`. It
    fills their blocks: kernel, launch, checks, outputs, reference and, where the defaults do not fit, others.
    """

    family: str  # the template: "norm/forward"
    spec: KernelSpec
    launch: object  # the family's launch configuration
    title: str  # the operation, in a phrase
    shapes: Mapping[str, str]  # of parameters and results, by name: "(M, 512)"
    numbers: Mapping[str, object] = field(default_factory=dict)  # further values built into the text, by name
    width: int | None = None  # of the rows, where one kernel is rendered for several widths; else None
    constants: Mapping[str, int] = field(default_factory=dict)  # the tl.constexpr parameters of such a kernel, in order
    structure: tuple[str, ...] = ()  # words for what sets its text apart from that of other widths

    def context(self) -> dict[str, object]:
        """The variables of the template."""
        return {
            "spec": self.spec,
            "launch": self.launch,
            "title": self.title,
            "shapes": self.shapes,
            "constants": tuple(self.constants),
            "launches": (),
            **self.numbers,
        }

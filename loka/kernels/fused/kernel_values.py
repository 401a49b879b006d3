"""What a family of kernels gives its template: a spec, how it is launched, and words for the docstring. No code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class KernelSpec(Protocol):
    """What every spec tells about its host function."""

    @property
    def function(self) -> str:
        """The host function's name."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Its tensor parameters, in order."""

    @property
    def results(self) -> tuple[str, ...]:
        """What it returns, in order; one result is no tuple."""


@dataclass(frozen=True, slots=True)
class KernelValues:
    """The values of one kernel's template, `triton/FAMILY.py.j2`.

    The template is rendered twice, in the layout `triton/kernel.py.j2` and in `triton/operator.py.j2`. It fills their
    blocks: kernel, checks, outputs, launch, reference and, where the usual ones do not fit, parameters and shapes.
    """

    family: str  # the template: "norm/forward"
    spec: KernelSpec
    launch: object  # the family's launch configuration
    title: str  # what the kernel computes, in a phrase
    shapes: Mapping[str, str]  # of parameters and results, by name: "(M, 512)"
    numbers: Mapping[str, object] = field(default_factory=dict)  # more that the text is specialised to, by name

    def context(self) -> dict[str, object]:
        """The names that the template reads."""
        return {
            "spec": self.spec,
            "launch": self.launch,
            "title": self.title,
            "shapes": self.shapes,
            **self.numbers,
        }

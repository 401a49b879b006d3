"""The protocol of GEMM kernels, which every library's file in this room follows (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Protocol

from loka.kernels.gemm.library import Library
from loka.numerics.enums import OPERANDS, Accumulation, Format, Gemm, Scaling
from loka.numerics.recipe import OperandPair

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class GemmSizes:
    """The sizes of one GEMM: a (rows x contraction) times b (columns x contraction), transposed."""

    rows: int
    columns: int
    contraction: int


def gemm_sizes(gemm: Gemm, m: int, k: int, n: int) -> GemmSizes:
    """Sizes of one of the three GEMMs of y = x @ weight.T, x of (m, k) and weight of (n, k)."""
    if gemm is Gemm.FPROP:
        return GemmSizes(rows=m, columns=n, contraction=k)
    if gemm is Gemm.DGRAD:
        return GemmSizes(rows=m, columns=k, contraction=n)
    return GemmSizes(rows=n, columns=k, contraction=m)


@dataclass(frozen=True, slots=True)
class GemmRequest:
    """One of the three GEMMs of y = x @ weight.T that a kernel is to run: its recipe, sizes and target."""

    gemm: Gemm
    operands: OperandPair  # in the order of `OPERANDS[gemm]`
    accumulation: Accumulation
    padding: bool  # False: sizes must fit without padding
    m: int  # at the policy's batch size
    k: int
    n: int
    target: str
    dtype: str = BFLOAT16  # of the model's activations

    @property
    def formats(self) -> tuple[Format, Format]:
        """Those of both operands."""
        return self.operands[0].format, self.operands[1].format

    @property
    def scalings(self) -> tuple[Scaling, Scaling]:
        """Those of both operands."""
        return self.operands[0].scaling, self.operands[1].scaling

    def refuse_range(self) -> str | None:
        """Reason why an operand cannot be quantized for any kernel: a static scale without its maximum."""
        for operand, recipe in zip(OPERANDS[self.gemm], self.operands, strict=True):
            if recipe.lacks_amax:
                place = f"{self.gemm.value}.{operand.value}"
                return f"{place} has a static scale but no amax; give amax, or use range: dynamic"
        return None

    def refuse_sizes(self, multiples: GemmSizes) -> str | None:
        """Reason why sizes do not fit without padding; each must be a multiple of that in `multiples`."""
        if self.padding:
            return None
        letters = {Gemm.FPROP: "MNK", Gemm.DGRAD: "MKN", Gemm.WGRAD: "NKM"}[self.gemm]
        sizes = gemm_sizes(self.gemm, self.m, self.k, self.n)
        misfits = [
            f"{letter} = {size} is no multiple of {multiple}"
            for letter, size, multiple in zip(letters, astuple(sizes), astuple(multiples), strict=True)
            if size % multiple
        ]
        return f"{', '.join(misfits)}, and padding is off; set padding: true" if misfits else None


class Kernel(Protocol):
    """An implementation of GEMMs."""

    @property
    def name(self) -> str:
        """Its name in plans and policies: "library.kernel"."""
        ...

    @property
    def operator(self) -> str | None:
        """The operator that generated code calls, such as "loka::scaled_mm"; None where no code is generated for it."""
        ...

    @property
    def library(self) -> Library | None:
        """The optional package that it belongs to; None for torch."""
        ...

    def unsupported_reason(self, wanted: GemmRequest) -> str | None:
        """Reason why it cannot run this GEMM on its target, None where it can; independent of this machine.

        Raises InputError on an unknown target.
        """
        ...

    def unavailable_reason(self) -> str | None:
        """Reason why it cannot run on this machine (library, version, device), or None. May import the library."""
        ...

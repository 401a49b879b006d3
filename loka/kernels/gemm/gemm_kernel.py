"""The protocol of GEMM kernels, which every library's file in this room follows (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loka.kernels.gemm.library import Library
from loka.numerics.enums import OPERANDS, Accumulation, Gemm
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

    def unsupported_reason(
        self,
        gemm: Gemm,
        operands: OperandPair,
        accumulation: Accumulation,
        padding: bool,
        m: int,
        k: int,
        n: int,
        target: str,
        dtype: str = BFLOAT16,
    ) -> str | None:
        """Reason why it cannot run this GEMM on this target, None where it can; independent of this machine.

        `operands` are in the order of `names.OPERANDS[gemm]`; m, k and n are those of y = x @ weight.T, m at the
        policy's batch size; without `padding`, sizes must fit without padding; `dtype` is that of the model's
        activations. Raises InputError on an unknown target.
        """
        ...

    def unavailable_reason(self) -> str | None:
        """Reason why it cannot run on this machine (library, version, device), or None. May import the library."""
        ...


def refuse_range(gemm: Gemm, operands: OperandPair) -> str | None:
    """Reason why an operand cannot be quantized for any kernel: a static scale without its maximum."""
    for operand, recipe in zip(OPERANDS[gemm], operands, strict=True):
        if recipe.lacks_amax:
            return f"{gemm.value}.{operand.value} has a static scale but no amax; give amax, or use range: dynamic"
    return None


def refuse_sizes(gemm: Gemm, sizes: GemmSizes, multiples: GemmSizes) -> str | None:
    """Reason why sizes do not fit without padding; each must be a multiple of that in `multiples`."""
    letters = {Gemm.FPROP: "MNK", Gemm.DGRAD: "MKN", Gemm.WGRAD: "NKM"}[gemm]
    wanted = (
        (letters[0], sizes.rows, multiples.rows),
        (letters[1], sizes.columns, multiples.columns),
        (letters[2], sizes.contraction, multiples.contraction),
    )
    misfits = [
        f"{letter} = {size} is no multiple of {multiple}" for letter, size, multiple in wanted if size % multiple
    ]
    return f"{', '.join(misfits)}, and padding is off; set padding: true" if misfits else None

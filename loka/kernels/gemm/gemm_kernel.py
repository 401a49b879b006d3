"""What a kernel says of itself: the protocol that every library's file in this room follows (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loka.kernels.gemm.library import Library
from loka.numerics.enums import OPERANDS, Accumulation, Gemm
from loka.numerics.recipe import OperandPair

BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class GemmSizes:
    """The sizes of one GEMM as a product of a (rows x contraction) and b (columns x contraction), transposed."""

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
    """One way of running a GEMM."""

    @property
    def name(self) -> str:
        """What a plan and a policy call it: "library.kernel"."""
        ...

    @property
    def operator(self) -> str | None:
        """The operator that generated code calls, "loka::scaled_mm"; None where none is generated for it."""
        ...

    @property
    def library(self) -> Library | None:
        """The package that it comes from and that LoKA does without; None where that is torch."""
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
        """Why it cannot run this GEMM on this target, or None where it can; what this machine has plays no part.

        `operands` are in the order of `names.OPERANDS[gemm]`; m, k and n are those of y = x @ weight.T, m at the
        policy's batch size; without `padding`, sizes must fit as they are; `dtype` is that of the model's activations.
        Raises InputError on an unknown target.
        """
        ...

    def unavailable_reason(self) -> str | None:
        """Why it cannot run on this machine, or None where it can: library, version, device. May import the library."""
        ...


def refuse_range(gemm: Gemm, operands: OperandPair) -> str | None:
    """Why an operand cannot be quantised, whatever multiplies it: a static scale without its maximum."""
    for operand, recipe in zip(OPERANDS[gemm], operands, strict=True):
        if recipe.lacks_amax:
            return f"{gemm.value}.{operand.value} has a static scale but no amax; give amax, or use range: dynamic"
    return None


def refuse_sizes(gemm: Gemm, sizes: GemmSizes, multiples: GemmSizes) -> str | None:
    """Why sizes do not fit without padding; `multiples` says what each must be a multiple of."""
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

"""Every kernel that a GEMM can run on: whether it can run this one, and if not, why.

| kernel            | what it is                                                                       |
|-------------------|----------------------------------------------------------------------------------|
| `torch.scaled_mm` | the operator `loka::scaled_mm`: cuBLASLt on Hopper, the reference elsewhere      |
| `as-is`           | the model's own GEMM                                                             |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loka.errors import InputError
from loka.kernels import limits
from loka.numerics.names import OPERANDS, Accumulation, Gemm, Range

if TYPE_CHECKING:  # a training machine imports this room without the policy's dependencies
    from loka.policy.settings import OperandRecipe

REFERENCE_TARGET = "reference"
HOPPER_TARGETS = ("h100", "h200")


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
        """What a plan calls it."""
        ...

    def why_not(
        self,
        gemm: Gemm,
        operands: tuple[OperandRecipe, OperandRecipe],
        accumulation: Accumulation,
        padding: bool,
        m: int,
        k: int,
        n: int,
        target: str,
    ) -> str | None:
        """Why it cannot run this GEMM on this target, or None where it can.

        `operands` are in the order of `names.OPERANDS[gemm]`; m, k and n are those of y = x @ weight.T, m at the
        policy's batch size; without `padding`, sizes must fit as they are. Raises InputError on an unknown target.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScaledMM:
    """The operator `loka::scaled_mm`."""

    name: str = "torch.scaled_mm"

    def why_not(
        self,
        gemm: Gemm,
        operands: tuple[OperandRecipe, OperandRecipe],
        accumulation: Accumulation,
        padding: bool,
        m: int,
        k: int,
        n: int,
        target: str,
    ) -> str | None:
        """The reference takes every recipe and size; Hopper's kernel what `kernels.limits` says."""
        _check_target(target)
        for operand, recipe in zip(OPERANDS[gemm], operands, strict=True):
            if recipe.range is Range.STATIC and recipe.amax is None:
                return f"{gemm.value}.{operand.value} has a static scale but no amax; give amax, or use range: dynamic"
        if target == REFERENCE_TARGET:
            return None
        first, second = operands
        refusal = limits.refuse_recipe((first.scaling, second.scaling), (first.format, second.format), accumulation)
        if refusal is None and not padding:
            refusal = _refuse_sizes(gemm, first, gemm_sizes(gemm, m, k, n))
        return refusal


@dataclass(frozen=True, slots=True)
class AsIs:
    """The model's own GEMM, in the model's own precision."""

    name: str = "as-is"

    def why_not(
        self,
        gemm: Gemm,
        operands: tuple[OperandRecipe, OperandRecipe],
        accumulation: Accumulation,
        padding: bool,
        m: int,
        k: int,
        n: int,
        target: str,
    ) -> str | None:
        """What the model runs, it can run."""
        _check_target(target)
        return None


SCALED_MM = ScaledMM()
AS_IS = AsIs()
KERNELS: tuple[Kernel, ...] = (SCALED_MM, AS_IS)  # the FP8 ones first, in the order in which they are tried


def _check_target(target: str) -> None:
    known = (*HOPPER_TARGETS, REFERENCE_TARGET)
    if target not in known:
        raise InputError(f"target {target!r} is not known; it can be {', '.join(known)}")


def _refuse_sizes(gemm: Gemm, first: OperandRecipe, sizes: GemmSizes) -> str | None:
    letters = {Gemm.FPROP: "MNK", Gemm.DGRAD: "MKN", Gemm.WGRAD: "NKM"}[gemm]
    wanted = (
        (letters[0], sizes.rows, limits.row_alignment(first.scaling)),
        (letters[1], sizes.columns, limits.ALIGNMENT),
        (letters[2], sizes.contraction, limits.ALIGNMENT),
    )
    misfits = [
        f"{letter} = {size} is no multiple of {multiple}" for letter, size, multiple in wanted if size % multiple
    ]
    return f"{', '.join(misfits)}, and padding is off; set padding: true" if misfits else None

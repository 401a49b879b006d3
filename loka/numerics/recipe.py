"""The recipe of a site: the operands of its three GEMMs, and the properties that planning and code generation read.

Each property is defined here alone. Chains of fused kernels, whose norms and activations write FP8 directly, can run
two forms of recipe:

- rows: fprop's operands and the output gradient are e4m3 with a dynamic power-of-two scale per row; dgrad's weight and
  both operands of wgrad are transposed copies of these (`requantize_transpose`);
- static: inputs and output gradients are e4m3 with one static scale each, weights with one dynamic scale, so that
  transposed copies hold the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loka.numerics.enums import Format, Gemm, Operand, Range, Scaling

TRANSPOSED_FROM: dict[tuple[Gemm, Operand], tuple[Gemm, Operand]] = {
    (Gemm.DGRAD, Operand.WEIGHT): (Gemm.FPROP, Operand.WEIGHT),
    (Gemm.WGRAD, Operand.GRAD_OUTPUT): (Gemm.DGRAD, Operand.GRAD_OUTPUT),
    (Gemm.WGRAD, Operand.INPUT): (Gemm.FPROP, Operand.INPUT),
}  # operands read along their other dimension, and where the same matrix is read along its rows
BESIDE_TRANSPOSED = (Scaling.TENSORWISE, Scaling.ROWWISE)  # forms of a transposed operand's one scale


@dataclass(frozen=True, slots=True)
class OperandRecipe:
    """The FP8 recipe of one operand of one GEMM.

    A transposed operand (`requantize_transpose`) is the transposed copy of an operand of another GEMM of its site:
    wgrad's grad_output of dgrad's, wgrad's input of fprop's, dgrad's weight of fprop's (TRANSPOSED_FROM). Its source is
    quantized rowwise with power-of-two scales; it keeps the source's format, and has a single scale, the largest of the
    source's. That fits a GEMM as a tensorwise scale or, repeated, as a rowwise one: `scaling` says which its GEMM
    takes, tensorwise where both operands are transposed and rowwise beside a rowwise one. `range` is dynamic and
    `power_of_two` true by definition; the latter also with `blockwise_1x32`, whose scales are e8m0 (OCP Microscaling
    Formats, version 1.0). With `nvfp4`, format and `power_of_two` are always e4m3 and false: its scales are e4m3. A
    static `amax` is that of its scale for all; those of blocks are measured.
    """

    format: Format = Format.E4M3
    scaling: Scaling = Scaling.ROWWISE
    range: Range = Range.DYNAMIC
    amax: float | None = None  # the maximum of |x|, for Range.STATIC
    power_of_two: bool = False  # round the scale up to a power of two, so that scaling is exact
    transposed: bool = False  # made from the FP8 copy that another GEMM of the site reads

    def __post_init__(self) -> None:
        if self.scaling is Scaling.BLOCKWISE_1X32:
            object.__setattr__(self, "power_of_two", True)
        if self.scaling is Scaling.NVFP4:
            object.__setattr__(self, "power_of_two", False)
            object.__setattr__(self, "format", Format.E4M3)

    @property
    def is_static(self) -> bool:
        """True if its scale is given beforehand."""
        return self.range is Range.STATIC

    @property
    def lacks_amax(self) -> bool:
        """True if its scale is to be static and no maximum is given yet."""
        return self.is_static and self.amax is None

    @property
    def has_one_scale(self) -> bool:
        """True if one scale serves the whole operand, in whatever shape its GEMM takes it."""
        static = self.is_static and self.scaling is not Scaling.NVFP4
        return self.transposed or static or self.scaling is Scaling.TENSORWISE

    @property
    def reads_first_scale(self) -> bool:
        """True if its GEMM takes a single scale of a transposed copy, which has one per row, all equal."""
        return self.transposed and self.scaling is Scaling.TENSORWISE

    @property
    def can_be_transposed(self) -> bool:
        """True if another GEMM can read a transposed copy of an operand of this recipe."""
        return self.scaling is Scaling.ROWWISE and not self.is_static and self.power_of_two

    @property
    def source(self) -> OperandRecipe:
        """Recipe of the matrix that a transposed operand is copied from; any other operand is its own source."""
        return replace(self, scaling=Scaling.ROWWISE, transposed=False) if self.transposed else self

    @property
    def without_amax(self) -> OperandRecipe:
        """The recipe without its static maximum."""
        return replace(self, amax=None)


OperandPair = tuple[OperandRecipe, OperandRecipe]  # in the order of `enums.OPERANDS[gemm]`


def transposed_copy(format: Format, beside: Scaling | None) -> OperandRecipe:
    """The recipe of a transposed operand with its source's format and the scaling of the operand beside it.

    `beside` is None if the operand beside it is transposed too.
    """
    scaling = Scaling.ROWWISE if beside not in (None, Scaling.TENSORWISE) else Scaling.TENSORWISE
    return OperandRecipe(format=format, scaling=scaling, power_of_two=True, transposed=True)


def transposed_form(operands: OperandPair) -> OperandPair | None:
    """Two transposed operands with tensorwise scales changed to rowwise, or the other way round.

    The products are bitwise equal; kernels differ in how fast they read the two forms. None for other operands.
    """
    first, second = operands
    if not (first.transposed and second.transposed) or first.scaling is not second.scaling:
        return None
    others = {Scaling.TENSORWISE: Scaling.ROWWISE, Scaling.ROWWISE: Scaling.TENSORWISE}
    if first.scaling not in others:
        return None
    return replace(first, scaling=others[first.scaling]), replace(second, scaling=others[first.scaling])


def with_scalings(operands: OperandPair, form: OperandPair) -> OperandPair:
    """The operands with the scalings of `form`."""
    first, second = operands
    return replace(first, scaling=form[0].scaling), replace(second, scaling=form[1].scaling)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The operands of each GEMM of a site; None where a GEMM stays in the model's dtype."""

    fprop: OperandPair | None = None
    dgrad: OperandPair | None = None
    wgrad: OperandPair | None = None
    has_dgrad: bool = True  # False where the input needs no gradient
    has_wgrad: bool = True  # False where the weight needs none

    @classmethod
    def of(cls, gemms: Mapping[Gemm, OperandPair | None]) -> Recipe:
        """The recipe of a site's GEMMs, without a dgrad or a wgrad if `gemms` has none."""
        fprop, dgrad, wgrad = (gemms.get(gemm) for gemm in Gemm)
        return cls(fprop, dgrad, wgrad, Gemm.DGRAD in gemms, Gemm.WGRAD in gemms)

    def items(self) -> tuple[tuple[Gemm, OperandPair | None], ...]:
        """The site's GEMMs and their operands, in the order fprop, dgrad, wgrad."""
        dgrad = ((Gemm.DGRAD, self.dgrad),) if self.has_dgrad else ()
        wgrad = ((Gemm.WGRAD, self.wgrad),) if self.has_wgrad else ()
        return (Gemm.FPROP, self.fprop), *dgrad, *wgrad

    @property
    def fp8(self) -> bool:
        """True if any GEMM runs in FP8."""
        return any(operands is not None for _, operands in self.items())

    @property
    def is_chain(self) -> bool:
        """True if chains of fused kernels can make the operands of all three GEMMs (`loka.codegen.chains`)."""
        wgrad = self.wgrad_in_form
        if wgrad is None:
            return False
        return self.is_static or (self._has_rows and _are_transposed_e4m3(wgrad))

    @property
    def keeps_wgrad(self) -> bool:
        """True if fprop and dgrad have the form of a chain and wgrad stays in the model's dtype."""
        return self.has_wgrad and self.wgrad is None and (self._has_rows or self.is_static)

    @property
    def is_static(self) -> bool:
        """True if fprop and dgrad have the form of a static chain, and wgrad has too or stays in the model's dtype."""
        dgrad = self.dgrad_in_form
        if self.fprop is None or dgrad is None:
            return False
        (x, weight), (dy, transposed) = self.fprop, dgrad
        same = transposed == weight and (self.wgrad is None or self.wgrad == (dy, x))
        static = all(_is_e4m3(operand, Scaling.TENSORWISE, Range.STATIC) for operand in (x, dy))
        return same and static and _is_e4m3(weight, Scaling.TENSORWISE, Range.DYNAMIC)

    @property
    def dgrad_in_form(self) -> OperandPair | None:
        """dgrad's operands; for a site without a dgrad, those that match the form of its other two GEMMs.

        Such a site then shares a form, and its generated code, with its neighbours. None where dgrad stays in the
        model's dtype, or where a site without a dgrad has no FP8 fprop.
        """
        if self.has_dgrad or self.fprop is None:
            return self.dgrad
        rows, weight = self.fprop
        if self.wgrad is None:
            return rows, replace(weight, transposed=True)
        dy = self.wgrad[0]
        return (weight, replace(dy, scaling=weight.scaling)) if dy.transposed else (dy, weight)

    @property
    def wgrad_in_form(self) -> OperandPair | None:
        """wgrad's operands; for a site without a wgrad, those that make a chain of its other GEMMs, None if none do."""
        if self.has_wgrad or self.fprop is None:
            return self.wgrad
        (x, _), dgrad = self.fprop, self.dgrad_in_form
        if dgrad is not None and self.is_static:
            return dgrad[0], x
        if dgrad is None or not self._has_rows:
            return None
        dy, x = (replace(each, scaling=Scaling.TENSORWISE, transposed=True) for each in (dgrad[0], x))
        return dy, x

    @property
    def _has_rows(self) -> bool:
        """True if fprop and dgrad have the form of a chain with a scale per row."""
        dgrad = self.dgrad_in_form
        if self.fprop is None or dgrad is None:
            return False
        weight = dgrad[1]
        return (
            all(map(_is_e4m3_rows, (*self.fprop, dgrad[0])))
            and weight.transposed
            and weight.format is Format.E4M3
            and weight.scaling is Scaling.ROWWISE
        )


def _are_transposed_e4m3(operands: OperandPair) -> bool:
    first, second = operands
    return (
        all(operand.transposed and operand.format is Format.E4M3 for operand in operands)
        and first.scaling is second.scaling
        and first.scaling in BESIDE_TRANSPOSED
    )


def _is_e4m3_rows(operand: OperandRecipe) -> bool:
    """True if an operand is e4m3, rowwise, dynamic, with power-of-two scales and not transposed."""
    return _is_e4m3(operand, Scaling.ROWWISE, Range.DYNAMIC) and operand.power_of_two


def _is_e4m3(operand: OperandRecipe, scaling: Scaling, range_: Range) -> bool:
    form = (operand.format, operand.scaling, operand.range, operand.transposed)
    return form == (Format.E4M3, scaling, range_, False)

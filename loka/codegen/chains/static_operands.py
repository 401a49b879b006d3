"""Chains with static scales: quantization in their kernels, and buffers of their modules.

An input or output gradient with a static scale has one scale for all elements, so that its kernel writes e4m3 in one
pass and a transpose changes no value. Each such operand of a site has two buffers in its module: the scale, and the
overflow statistics (`kernels.fused.quantization`), which the kernels add to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from loka.codegen.chains.chain_shapes import ChainShape, backward_after, forward_after, forward_before
from loka.codegen.modules.gemm_calls import GemmRecipe
from loka.codegen.modules.linear_recipes import SiteRecipe
from loka.errors import LokaError
from loka.kernels.fused.matrix_kernels import CastTranspose
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose, fits
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import ROWWISE, Quantization
from loka.numerics.enums import Operand
from loka.numerics.quantize import static_scale
from loka.numerics.recipe import OperandRecipe


@dataclass(frozen=True, slots=True)
class StaticOperand:
    """An operand with a static scale: becomes a `dispatch.StaticScale` of the module's class."""

    site: int  # its number in the binding
    operand: Operand
    amax: float  # maximum from the plan
    scale: float  # derived from amax


def quantization(recipe: OperandRecipe) -> Quantization:
    """Quantization in the kernel that makes an operand of a chain: static or rowwise."""
    if recipe.is_static:
        return Quantization("static", recipe.format, recipe.power_of_two, overflow_stats=True)
    return ROWWISE


_Norm = TypeVar("_Norm", NormForward, NormBackward)


def under(spec: _Norm, recipe: OperandRecipe) -> _Norm:
    """The kernel `spec` with the quantization of that recipe; unchanged if it does not quantize."""
    return replace(spec, how=quantization(recipe)) if spec.quantize else spec


def both_copies(recipe: OperandRecipe) -> CastTranspose:
    """The kernel that only casts an operand, writing it and its transpose."""
    if recipe.is_static:
        return CastTranspose(quantization(recipe))
    return CastTranspose(Quantization("tensorwise", recipe.format, recipe.power_of_two))


def input_kernel(shape: ChainShape, index: int) -> NormForward | FusedCastTranspose | CastTranspose:
    """The kernel that makes a stage's input in training, with its transpose if supported and read by wgrad."""
    stage = shape.stages[index]
    if index:
        spec = forward_after(shape.stages[index - 1], True, save=True, keep=shape.keeps(index - 1, inference=False))
    elif not stage.ops_before and not stage.keeps_wgrad:
        return both_copies(stage.x)
    else:
        spec = forward_before(stage, quantize=True, save=True)
    spec = under(spec, stage.x)
    return FusedCastTranspose(spec) if fits(spec) and not stage.keeps_wgrad else spec


def gradient_kernel(shape: ChainShape, index: int) -> NormBackward | FusedCastTranspose | CastTranspose:
    """The kernel that makes a stage's output gradient, with its transpose if supported."""
    stage = shape.stages[index]
    spec = backward_after(stage, True, carried=shape.reader(index) is not None, carry=not shape.leaves_sum(index))
    if not isinstance(spec, NormBackward):
        return both_copies(stage.dy)
    spec = under(spec, stage.dy)
    return FusedCastTranspose(spec) if fits(spec) else spec


def maximum(width: int) -> NormForward:
    """The kernel that finds the largest magnitude of a matrix."""
    how = Quantization("maximum")
    return NormForward(width, None, False, False, 1e-05, None, add=False, quantize=True, save=False, how=how)


def without_maxima(recipe: SiteRecipe) -> SiteRecipe:
    """The recipe without maxima: a chain takes scales as arguments, so that sites can share its text."""

    def plain(gemm: GemmRecipe | None) -> GemmRecipe | None:
        if gemm is None:
            return None
        first, second = (operand.without_amax for operand in gemm.operands)
        return replace(gemm, operands=(first, second))

    return SiteRecipe(plain(recipe.fprop), plain(recipe.dgrad), plain(recipe.wgrad))


def buffers(site: int, operand: Operand) -> tuple[str, str]:
    """Names of the buffers of the scale and the overflow statistics, as in `loka.dispatch.static_scales`."""
    return f"loka_{operand.value}_scale_{site}", f"loka_{operand.value}_record_{site}"


OPERANDS = (Operand.INPUT, Operand.GRAD_OUTPUT)  # those of a stage with static scales


def arguments(site: int) -> list[str]:
    """Arguments for a stage: scale and overflow statistics of the input and of the output gradient."""
    return [f"self.{name}" for operand in OPERANDS for name in buffers(site, operand)]


def static_operand(site: int, operand: Operand, recipe: SiteRecipe) -> StaticOperand:
    """An operand of a chain with its maximum from the plan and the static scale. Raises LokaError without amax."""
    gemm = recipe.fprop if operand is Operand.INPUT else recipe.dgrad
    found = None if gemm is None else gemm.operands[0]
    if found is None or found.amax is None:
        raise LokaError("the plan has a static scale without its amax. This is a fault in LoKA: please report it.")
    return StaticOperand(site, operand, found.amax, static_scale(found.amax, found.format, found.power_of_two))

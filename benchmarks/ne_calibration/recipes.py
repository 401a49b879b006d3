"""The recipes of the study: what rounds the operands of which GEMMs, from harmless to harmful."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.enums import Format, Gemm, Scaling
from loka.numerics.quantize import dequantize, quantize, round_up_to_power_of_two
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.probe.estimate import candidates
from loka.probe.gemm_errors import Rounding, SiteRoundings, recipe_rounding

FORWARD, BACKWARD, ALL = (Gemm.FPROP,), (Gemm.DGRAD, Gemm.WGRAD), tuple(Gemm)
LOWEST_EXPONENT = -6  # of a normal e4m3 number


@dataclass(frozen=True, slots=True)
class StudyRecipe:
    """A recipe for all FP8 sites of a model."""

    name: str
    roundings: SiteRoundings


def recipes() -> tuple[StudyRecipe, ...]:
    """The thirty recipes, the policies' own first."""
    shipped = {gemm: recipe_rounding(candidates(gemm)[-1]) for gemm in Gemm}  # with transposed operands
    rows, tensor = Scaling.ROWWISE, Scaling.TENSORWISE
    formats = {
        "e4m3 rowwise": _pair(OperandRecipe(scaling=rows)),
        "e4m3 tensorwise": _pair(OperandRecipe(scaling=tensor)),
        "e5m2 rowwise": _pair(OperandRecipe(format=Format.E5M2, scaling=rows)),
        "e5m2 tensorwise": _pair(OperandRecipe(format=Format.E5M2, scaling=tensor)),
    }
    known = {name: recipe_rounding(pair) for name, pair in formats.items()}
    made = [StudyRecipe("all: e4m3 transposed", shipped)]
    made += [_of("all", ALL, name, rounding) for name, rounding in known.items()]
    made += [_of("fprop", FORWARD, name, rounding) for name, rounding in known.items()]
    made += [_of("fprop", FORWARD, f"{bits} mantissa bits", _both(few_bits, bits)) for bits in (2, 1, 0)]
    made += [
        _of("fprop", FORWARD, f"clipped at {share:g} amax", _both(ranged, share)) for share in (0.5, 0.25, 0.1, 0.05)
    ]
    made += [_of("fprop", FORWARD, f"outlier of 2^{power}", _both(ranged, 2.0**power)) for power in (10, 12, 14, 16)]
    made += [_of("all", ALL, "1 mantissa bits", _both(few_bits, 1))]
    made += [_of("backward", BACKWARD, name, known[name]) for name in ("e4m3 rowwise", "e5m2 tensorwise")]
    made += [_of("backward", BACKWARD, "0 mantissa bits", _both(few_bits, 0))]
    for gemm in BACKWARD:
        made += [_of(gemm.value, (gemm,), "clipped at 0.05 amax", _both(ranged, 0.05))]
        made += [_of(gemm.value, (gemm,), f"outlier of 2^{power}", _both(ranged, 2.0**power)) for power in (14, 17)]
    return tuple(made)


def few_bits(x: Tensor, bits: float) -> Tensor:
    """x (R, C) with `bits` mantissa bits and the exponents of e4m3, one power-of-two scale a row; dequantized."""
    amax = x.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    scale = round_up_to_power_of_two(amax / 448)
    scaled = x / scale
    exponent = torch.frexp(scaled).exponent - 1
    step = torch.exp2((exponent.clamp(min=LOWEST_EXPONENT) - bits).float())
    return torch.round(scaled / step) * step * scale


def ranged(x: Tensor, share: float) -> Tensor:
    """x (R, C) in e4m3 with one scale, for a maximum of `share` times its own; dequantized.

    Below 1, larger values saturate; above 1, small ones are lost, as if one element were so much larger.
    """
    amax = share * float(x.abs().max())
    return dequantize(quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, amax=amax))


def _pair(recipe: OperandRecipe) -> OperandPair:
    return recipe, recipe


def _both(rounded: Callable[[Tensor, float], Tensor], number: float) -> Rounding:
    return lambda a, b: (rounded(a, number), rounded(b, number))


def _of(where: str, gemms: tuple[Gemm, ...], name: str, rounding: Rounding) -> StudyRecipe:
    return StudyRecipe(f"{where}: {name}", dict.fromkeys(gemms, rounding))

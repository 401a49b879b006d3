"""Estimates the error of a GEMM in FP8 on sampled operands: MERE and SQNR with intervals.

The reference is the float32 product of the operands as drawn; the result is the float32 product of the dequantized
operands.

A transposed operand is made as in training: its transpose is quantized along its rows, and that copy is transposed.
These rows have only the drawn features (of dy, for wgrad, those of joint_moments.py instead of all N), so that a row's
scale can be smaller than that of the whole row. That hardly matters: scales are powers of two, with which a value
rounds the same until it is subnormal, and what is subnormal is determined by the single scale that all rows get in the
end. For that one the whole operand's maximum is taken, as for a tensorwise scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Gemm, Scaling
from loka.numerics.metrics import mere, sqnr
from loka.numerics.quantize import Quantized, dequantize, quantize, requantize_transpose, static_scale
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.policy.settings import Budget
from loka.probe.estimate.intervals import confidence, decided, interval, looks, mere_interval
from loka.probe.estimate.samplers import CopulaSampler, Drawn, Sampler
from loka.probe.profile.profile import Estimate
from loka.probe.stats.site_stats import SiteStats

LIMIT = 64  # draws


def errors(drawn: Drawn, pair: OperandPair) -> tuple[float, float]:
    """MERE (floored) and SQNR in dB of one draw with its operands quantized by `pair`; never NaN.

    Zero operands give an exact product: (0, inf). Without a finite reference product the result is (inf, -inf).
    """
    return _errors(_Draw(drawn), pair)


def estimate(
    sampler: Sampler,
    gemm: Gemm,
    recipes: Sequence[OperandPair],
    budget: Budget,
    *,
    limit: int = LIMIT,
    seed: int,
) -> tuple[Estimate, ...]:
    """One Estimate for each recipe, in order, all from the same draws. Empty if the sampler cannot draw the GEMM.

    Checks after 4, 8, 16, ... draws and stops once every recipe is decided against the budget (with the risk in
    intervals.confidence), or at `limit`. The reported interval is the plain 95 % interval of all draws. The numbers
    depend only on `seed`; torch's global generator is not used. Raises InputError if limit is below 2.
    """
    planned = looks(limit)
    if not recipes or not sampler.can_draw(gemm):
        return ()
    generator = torch.Generator().manual_seed(seed)
    found: list[list[tuple[float, float]]] = [[] for _ in recipes]
    with full_precision():
        for look in planned:
            while len(found[0]) < look:
                draw = _Draw(sampler.draw(gemm, generator))
                for values, pair in zip(found, recipes, strict=True):
                    values.append(_errors(draw, pair))
            level = confidence(look, limit)
            if all(decided(_summary(gemm, *each, level), budget) for each in zip(recipes, found, strict=True)):
                break
    return tuple(_summary(gemm, *each) for each in zip(recipes, found, strict=True))


def estimate_site(
    stats: SiteStats,
    gemms: Sequence[Gemm],
    recipes_by_gemm: Mapping[Gemm, Sequence[OperandPair]],
    budget: Budget,
    rows: int,
    seed: int,
    limit: int = LIMIT,
) -> tuple[Estimate, ...]:
    """Estimates of a site's GEMMs with `CopulaSampler`; `rows` is the M of a call.

    A GEMM whose operands were not seen, or that has no recipes, gives none. The draws of a GEMM depend on the seed, the
    site's name and the GEMM, and not on what else is estimated.
    """
    sampler = CopulaSampler(stats, rows)
    made: list[Estimate] = []
    for gemm in gemms:
        recipes = recipes_by_gemm.get(gemm, ())
        made += estimate(sampler, gemm, recipes, budget, limit=limit, seed=seed_for(seed, stats.name, gemm))
    return tuple(made)


def seed_for(seed: int, site: str, gemm: Gemm) -> int:
    """A separate seed for each GEMM of each site."""
    digest = hashlib.sha256(f"{seed}/{site}/{gemm.value}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class _Draw:
    """One draw: its reference product, and its operands for each recipe, quantized once."""

    def __init__(self, drawn: Drawn) -> None:
        self._operands = ((drawn.a, drawn.amax_a), (drawn.b, drawn.amax_b))
        self.reference = drawn.a @ drawn.b.t()
        self._values: dict[tuple[int, OperandRecipe], Tensor] = {}

    def quantized(self, index: int, recipe: OperandRecipe) -> Quantized:
        """Operand 0 or 1 quantized by a recipe; a tensorwise or transposed one has the scale of the whole operand."""
        x, whole = self._operands[index]
        if recipe.transposed:
            return _transposed(x, whole, recipe)
        amax = whole if recipe.scaling is Scaling.TENSORWISE else None
        if recipe.is_static:
            if recipe.amax is None:
                raise InputError("estimate: a recipe with range static needs an amax")
            amax = recipe.amax
        return quantize(x, format=recipe.format, scaling=recipe.scaling, power_of_two=recipe.power_of_two, amax=amax)

    def dequantized(self, index: int, recipe: OperandRecipe) -> Tensor:
        """The operand's dequantized FP8 values, float32."""
        key = (index, recipe)
        if key not in self._values:
            self._values[key] = dequantize(self.quantized(index, recipe))
        return self._values[key]


def _transposed(x: Tensor, whole: float | None, recipe: OperandRecipe) -> Quantized:
    """x of (R, C) from the FP8 copy of its transpose, which is quantized along its rows, with its scale.

    `whole` is the largest |x| of the whole operand, None if x is the whole. Scales: (1, 1) tensorwise, otherwise (R,
    1).
    """
    rows = quantize(x.t(), format=recipe.format, scaling=Scaling.ROWWISE, power_of_two=True)
    if whole is not None:
        # A row of zeros represents the rest of the operand: its scale is that of the operand's largest |x|.
        largest = rows.scale.new_full((1, 1), static_scale(whole, recipe.format, power_of_two=True))
        zeros = rows.values.new_zeros((1, x.shape[0]))
        rows = Quantized(torch.cat([rows.values, zeros]), torch.cat([rows.scale, largest]))
    transposed = requantize_transpose(rows)
    scale = transposed.scale[:1] if recipe.reads_first_scale else transposed.scale
    return Quantized(transposed.values[:, : x.shape[1]].contiguous(), scale)


def _errors(draw: _Draw, pair: OperandPair) -> tuple[float, float]:
    return _compare(draw.dequantized(0, pair[0]) @ draw.dequantized(1, pair[1]).t(), draw.reference)


def _compare(out: Tensor, reference: Tensor) -> tuple[float, float]:
    if not bool(reference.isfinite().all()):
        return math.inf, -math.inf
    return mere(out, reference).value, sqnr(out, reference)


def _summary(gemm: Gemm, pair: OperandPair, found: list[tuple[float, float]], level: float | None = None) -> Estimate:
    levels = () if level is None else (level,)
    return Estimate(
        gemm=gemm,
        operands=pair,
        mere=mere_interval([value for value, _ in found], *levels),
        sqnr_db=interval([value for _, value in found], *levels),
        draws=len(found),
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 products in full float32 inside, regardless of global settings (TF32, autocast), without gradient.

    The setting of products is the process's: threads that each enter it need one around them all.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

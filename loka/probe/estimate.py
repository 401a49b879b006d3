"""Estimates the error of a GEMM in FP8 on sampled operands: MERE and SQNR with intervals.

The reference is the float32 product of the operands as drawn; the result is the float32 product of the dequantized
operands.

A transposed operand is made as in training: its transpose is quantized along its rows, and that copy is transposed.
These rows have only the drawn features (of dy, for wgrad, those of a JointTracker instead of all N), so that a row's
scale can be smaller than that of the whole row. That hardly matters: scales are powers of two, with which a value
rounds the same until it is subnormal, and what is subnormal is determined by the single scale that all rows get in the
end. For that one the whole operand's maximum is taken, as for a tensorwise scale.

Draws end when the intervals (Student's t) decide; `candidates` are the recipes for which errors are estimated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Scaling
from loka.numerics.metrics import mere, sqnr
from loka.numerics.quantize import Quantized, dequantize, quantize, requantize_transpose, static_scale
from loka.numerics.recipe import OperandPair, OperandRecipe, transposed_copy
from loka.numerics.scalings import BLOCKS, blockwise
from loka.policy.settings import Budget
from loka.probe.profile.profile import CONFIDENCE, Estimate, Interval, Verdict
from loka.probe.samplers import CopulaSampler, Drawn, Sampler
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
    for gemm, recipes in recipes_by_gemm.items():
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
        """Operand 0 or 1 quantized by a recipe; tensorwise, transposed and nvfp4: with the maximum of all of it."""
        x, whole = self._operands[index]
        if recipe.transposed:
            return _transposed(x, whole, recipe)
        amax = whole if recipe.scaling in (Scaling.TENSORWISE, Scaling.NVFP4) else None
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


FIRST_LOOK = 4  # draws
EARLY_RISK = 0.02  # one-sided, shared by all looks before the last


def looks(limit: int) -> tuple[int, ...]:
    """Numbers of draws at which to look: 4, 8, 16, ... and finally `limit`. Raises InputError if limit is below 2."""
    if limit < 2:
        raise InputError(f"estimate: the limit of draws must be at least 2 for an interval, not {limit}")
    counts = []
    count = FIRST_LOOK
    while count < limit:
        counts.append(count)
        count *= 2
    return (*counts, limit)


def confidence(look: int, limit: int) -> float:
    """The two-sided confidence at which the look after `look` draws may stop the sampling.

    A verdict is wrong if a one-sided bound misses. The last look has the stated 95 % (2.5 % one-sided); the earlier
    ones share another 2 % equally, so that by the union bound at most 4.5 % of estimates with a mean at the budget are
    decided wrongly.
    """
    planned = looks(limit)
    if look >= planned[-1] or len(planned) == 1:
        return CONFIDENCE
    return 1.0 - 2.0 * EARLY_RISK / (len(planned) - 1)


def interval(values: list[float], level: float = CONFIDENCE) -> Interval:
    """The mean of `values` and its t interval; one value has no spread, so its interval is unbounded.

    -inf in SQNR and inf in MERE (a non-finite result) make the whole interval infinite: one such draw is enough. inf in
    SQNR (an exact product, such as of zeros) is ignored if other draws are finite.
    """
    if not values:
        raise InputError("interval: no values")
    if -math.inf in values:
        return Interval(-math.inf, -math.inf, -math.inf)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.inf, math.inf, math.inf)
    mean = math.fsum(finite) / len(finite)
    if len(finite) == 1:
        return Interval(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in finite) / (len(finite) - 1)
    half = t_quantile((1 + level) / 2, len(finite) - 1) * math.sqrt(variance / len(finite))
    return Interval(mean, mean - half, mean + half)


def mere_interval(values: list[float], level: float = CONFIDENCE) -> Interval:
    """As `interval`, never below zero, and infinite if any draw is."""
    if math.inf in values:
        return Interval(math.inf, math.inf, math.inf)
    found = interval(values, level)
    return Interval(found.mean, max(found.low, 0.0), found.high)


def decided(estimate: Estimate, budget: Budget) -> bool:
    """True if the estimate's intervals settle that it keeps the budget, or that it does not."""
    return estimate.verdict(budget) is not Verdict.UNDECIDED


@lru_cache(maxsize=256)
def t_quantile(level: float, degrees: int) -> float:
    """The quantile of Student's t with `degrees` (1 or more) degrees of freedom at `level`, from 0.5 to below 1."""
    low, high = 0.0, 1.0
    while _t_distribution(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_distribution(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_distribution(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by the finite series for integer degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for i in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + inside / 2


_ROWS = OperandRecipe(power_of_two=True)  # source of a transposed operand
_BESIDE_ROWS = transposed_copy(Format.E4M3, Scaling.ROWWISE)
_BESIDE_TRANSPOSED = transposed_copy(Format.E4M3, None)
_TRANSPOSED = {
    Gemm.FPROP: (_ROWS, _ROWS),
    Gemm.DGRAD: (_ROWS, _BESIDE_ROWS),
    Gemm.WGRAD: (_BESIDE_TRANSPOSED, _BESIDE_TRANSPOSED),
}


def candidates(gemm: Gemm) -> tuple[OperandPair, ...]:
    """The standard recipes of a GEMM, all with dynamic scales, in a fixed order and without duplicates.

    e4m3 tensorwise, rowwise and in blocks (1x128, a weight 128x128); e5m2 for the output gradient only, tensorwise and
    rowwise, if there is one; e5m2 for both operands, tensorwise and rowwise; and the e4m3 recipe with transposed
    operands: fprop rowwise with power-of-two scales, dgrad the same with its weight transposed, wgrad with both
    transposed.
    """
    first, second = OPERANDS[gemm]
    pairs = [_pair(Format.E4M3, Format.E4M3, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs.append((OperandRecipe(scaling=blockwise(first)), OperandRecipe(scaling=blockwise(second))))
    if first is Operand.GRAD_OUTPUT:
        pairs += [_pair(Format.E5M2, Format.E4M3, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs += [_pair(Format.E5M2, Format.E5M2, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs.append(_TRANSPOSED[gemm])
    return tuple(dict.fromkeys(pairs))


def recipe_label(gemm: Gemm, pair: OperandPair) -> str:
    """A recipe in words: "e4m3 rowwise", or both operands if they differ."""
    one, other = (_describe_operand(recipe) for recipe in pair)
    if one == other:
        return one
    return ", ".join(f"{operand.value} {text}" for operand, text in zip(OPERANDS[gemm], (one, other), strict=True))


def _pair(first: Format, second: Format, scaling: Scaling) -> OperandPair:
    return (OperandRecipe(format=first, scaling=scaling), OperandRecipe(format=second, scaling=scaling))


def _describe_operand(recipe: OperandRecipe) -> str:
    if recipe.transposed:
        return f"{recipe.format.value} transposed"
    label = BLOCKS[recipe.scaling].label
    text = label if recipe.scaling is Scaling.NVFP4 else f"{recipe.format.value} {label}"
    if recipe.power_of_two:
        text += ", scales powers of two"
    if recipe.is_static:
        text += f", static amax {recipe.amax:g}" if recipe.amax is not None else ", static"
    return text

"""Findings about scales: features and rows that dominate a scale, gradients that underflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from loka.mods.protocols import Concern
from loka.numerics.enums import Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.probe.diagnostics.finding_evidence import FindingEvidence, FindingKind
from loka.probe.profile.profile import Finding, OperandSummary
from loka.probe.stats.bins import SPREAD_STEPS, HistogramView

# Octaves from the usual feature (row) to the largest. In a Gaussian, one element in a hundred is about 8.5 octaves
# below the maximum; e4m3 has full precision down to 14.8 octaves below it. So beyond 6, one element in a hundred of the
# usual feature is subnormal.
DOMINANT_OCTAVES = 6.0
UNDERFLOW_SHARE = 0.01  # of all elements of a gradient: rounding one in a hundred to zero biases the sums
BLOCK = 128  # neighbours that share a scale in blockwise_1x128

_ACROSS_FEATURES = {Gemm.FPROP: Operand.INPUT, Gemm.DGRAD: Operand.GRAD_OUTPUT}  # scaled along their features
_WIDE_SCALES = (Scaling.TENSORWISE, Scaling.ROWWISE)


def feature_dominates(evidence: FindingEvidence) -> Iterator[Finding]:
    """One feature far above the others determines the scale that all share, tensorwise and rowwise."""
    for gemm, operand in _ACROSS_FEATURES.items():
        seen = evidence.activation(operand)
        if gemm not in evidence.gemms or evidence.recipe(gemm, operand).scaling not in _WIDE_SCALES or seen is None:
            continue
        amax = seen.column_amax.double()
        positive = amax[amax > 0]
        if positive.numel() < 2:
            continue
        usual, largest = float(positive.median()), float(positive.max())
        if largest / usual >= 2**DOMINANT_OCTAVES:
            yield evidence.finding(
                FindingKind.FEATURE_DOMINATES,
                f"{operand.value}: feature {int(amax.argmax())} reaches {largest:.3g}, the median feature {usual:.3g}: "
                f"{largest / usual:.0f} times as much (limit: {2**DOMINANT_OCTAVES:.0f})",
                evidence.rule(f"{gemm.value}: {{{evidence.afresh(gemm)}scaling: blockwise}}")
                if amax.numel() > BLOCK
                else _one_size(evidence, operand),
            )


def _one_size(evidence: FindingEvidence, operand: Operand) -> str:
    by_hand = f"bring the features that meet in {evidence.quoted} to one size with a norm"
    return evidence.mod(Concern.INPUT_SIZES, by_hand) if operand is Operand.INPUT else evidence.by_hand(by_hand)


def row_dominates(evidence: FindingEvidence) -> Iterator[Finding]:
    """A few rows far above the others determine a tensorwise scale. Rowwise scales help."""
    for gemm, operand in _ACROSS_FEATURES.items():
        seen = evidence.activation(operand)
        if gemm not in evidence.gemms or evidence.recipe(gemm, operand).scaling is not Scaling.TENSORWISE:
            continue
        octaves = None if seen is None else _octaves_to_the_largest(seen.row_rms)
        if octaves is not None and octaves >= DOMINANT_OCTAVES:
            yield evidence.finding(
                FindingKind.ROW_DOMINATES,
                f"{operand.value}: the RMS of the largest row is {2**octaves:.0f} times that of the median row "
                f"(limit: {2**DOMINANT_OCTAVES:.0f})",
                evidence.rule(f"{gemm.value}: {{{evidence.afresh(gemm)}scaling: rowwise}}"),
            )


def gradient_underflows(evidence: FindingEvidence) -> Iterator[Finding]:
    """An output gradient with too many elements rounded to zero."""
    seen = evidence.operand(Operand.GRAD_OUTPUT)
    for gemm in (Gemm.DGRAD, Gemm.WGRAD):
        if gemm not in evidence.gemms or seen is None:
            continue
        recipe = evidence.recipe(gemm, Operand.GRAD_OUTPUT)
        lost = underflow(seen, gemm, recipe)
        if lost is None or lost <= UNDERFLOW_SHARE:
            continue
        yield evidence.finding(
            FindingKind.GRADIENT_UNDERFLOWS,
            f"{gemm.value}: {100 * lost:.1f} % of the elements of grad_output are rounded to zero in "
            f"{recipe.format.value} {'transposed' if recipe.transposed else recipe.scaling.value} "
            f"(limit: {100 * UNDERFLOW_SHARE:g} %)",
            evidence.rule(f"{gemm.value}: {{{_remedy(seen, gemm, recipe, evidence.afresh(gemm))}}}"),
        )


SCALE_RULES = (feature_dominates, row_dominates, gradient_underflows)


def underflow(seen: OperandSummary, gemm: Gemm, recipe: OperandRecipe) -> float | None:
    """The share of an operand that a recipe rounds to zero; None without a histogram for that granularity.

    dgrad scales grad_output along its features, wgrad its transpose along the rows. A transposed operand, or one with a
    static range, has one scale, and loses as much as a tensorwise one, in whatever form its GEMM takes that scale.
    """
    across = {
        Scaling.ROWWISE: HistogramView.ROWWISE if gemm is Gemm.DGRAD else HistogramView.COLUMNWISE,
    }
    if gemm is Gemm.DGRAD:
        across[Scaling.BLOCKWISE_1X128] = HistogramView.BLOCKWISE
    view = HistogramView.TENSORWISE if recipe.has_one_scale else across.get(recipe.scaling)
    return next((s.underflow for s in seen.shares if s.view == view and s.format is recipe.format), None)


def _remedy(seen: OperandSummary, gemm: Gemm, recipe: OperandRecipe, afresh: str) -> str:
    """The mildest sufficient change: a finer scale costs no precision, e5m2 one bit, and keeping the GEMM all speedup.

    `afresh`: fields to reset before scales can be rowwise. A transposed operand has no format of its own either.
    """
    rowwise = replace(recipe, scaling=Scaling.ROWWISE, transposed=False, range=Range.DYNAMIC, amax=None)
    finer = f"{afresh}scaling: rowwise"
    choices = [(rowwise, finer)]
    if not recipe.transposed:
        choices.append((replace(recipe, format=Format.E5M2), "grad_output: {format: e5m2}"))
    choices.append((replace(rowwise, format=Format.E5M2), f"{finer}, grad_output: {{format: e5m2}}"))
    return _first_that_keeps(seen, gemm, choices)


def _first_that_keeps(seen: OperandSummary, gemm: Gemm, choices: Sequence[tuple[OperandRecipe, str]]) -> str:
    for choice, text in choices:
        lost = underflow(seen, gemm, choice)
        if lost is not None and lost <= UNDERFLOW_SHARE:
            return text
    return "compute: keep"


def _octaves_to_the_largest(row_rms: Tensor) -> float | None:
    """Octaves from the median row to the largest, among non-zero rows; None without any."""
    counts = row_rms[1:].double()
    if float(counts.sum()) == 0:
        return None
    running = counts.cumsum(0)
    median = int((running < running[-1] / 2).sum())
    return (int(counts.nonzero().max()) - median) / SPREAD_STEPS

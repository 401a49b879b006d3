"""Findings about a site: causes of lost accuracy in FP8, with figures and remedies.

Rules about the model come first (the bias, the normalisation next to the GEMM, the activation before it), then those
about scales (features and rows that dominate one, gradients that underflow). Each is about one site and gives at most
one finding per operand or GEMM. Rules about the quantization of an operand consider only GEMMs that the policy does not
keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from loka.graph.sites.site import Site
from loka.mods.protocols import Concern
from loka.mods.suggestions import Suggestions
from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.policy.settings import Budget, SiteSettings
from loka.probe.estimate import recipe_label
from loka.probe.finding_evidence import BiasTrack, FindingEvidence, FindingKind
from loka.probe.profile.profile import Estimate, Finding, OperandSummary, SiteProfile, Verdict
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import SPREAD_STEPS, HistogramView, LowRank, Moments, SiteStats, WeightStats

Rule = Callable[[FindingEvidence], Iterator[Finding]]


def find(
    site: Site,
    stats: SiteStats,
    summary: SiteProfile,
    settings: SiteSettings,
    bias: BiasTrack | None = None,
    suggestible: Suggestions | None = None,
) -> tuple[Finding, ...]:
    """The findings about one site, in the order of the rules.

    `summary` is that of `stats`, with its estimates; `bias` that of the site's bias from `track_biases`, None if it
    has none or was not tracked; `suggestible` the possible mods, None if unknown.
    """
    evidence = FindingEvidence(site, stats, summary, settings, bias, suggestible or {})
    if (seen := evidence.summary.operand(Operand.INPUT)) is None or seen.calls == 0:
        return tuple(_never_ran(evidence))
    rules: tuple[Rule, ...] = (_no_gradient, _nonfinite, _always_zero, *MODEL_RULES, *SCALE_RULES)
    return tuple(found for rule in (*rules, _too_few_rows, _over_budget) for found in rule(evidence))


def _never_ran(evidence: FindingEvidence) -> Iterator[Finding]:
    yield evidence.finding(
        FindingKind.NEVER_RAN, "it was called in none of the sampled steps", evidence.rule("compute: keep")
    )


def _no_gradient(evidence: FindingEvidence) -> Iterator[Finding]:
    seen = evidence.summary.operand(Operand.GRAD_OUTPUT)
    if evidence.site.gemms != (Gemm.FPROP,) and (seen is None or seen.calls == 0):
        yield evidence.finding(
            FindingKind.NEVER_RAN,
            "it was called, but no gradient reached its output in any sampled step",
            evidence.rule("dgrad: {compute: keep}, wgrad: {compute: keep}"),
        )


def _nonfinite(evidence: FindingEvidence) -> Iterator[Finding]:
    """One NaN or infinity makes a dynamic scale infinite: everything that shares the scale is lost."""
    for seen in evidence.summary.operands:
        if seen.nonfinite or seen.nonfinite_calls:
            where = f"in {seen.nonfinite_calls} of {seen.calls} calls, " if seen.calls else ""
            rows = "in the sampled rows" if seen.calls else "when it was saved"
            yield evidence.finding(
                FindingKind.NONFINITE,
                f"{seen.operand.value}: NaN or infinite elements {where}{seen.nonfinite} {rows}",
                "with patch.trace_nonfinite(): names the first site that makes them; statistics leave such rows out",
            )


def _always_zero(evidence: FindingEvidence) -> Iterator[Finding]:
    for seen in evidence.summary.operands:
        if seen.zeros == 1.0:
            yield evidence.finding(
                FindingKind.ALWAYS_ZERO,
                f"{seen.operand.value}: every element was zero, in {seen.sampled} sampled rows",
                evidence.rule("compute: keep"),
            )


def _too_few_rows(evidence: FindingEvidence) -> Iterator[Finding]:
    """Fewer rows than features leave a covariance undetermined; with as many it is singular after centring."""
    if not evidence.gemms:
        return
    for seen in evidence.summary.operands:
        if seen.operand is not Operand.WEIGHT and seen.sampled <= seen.width:
            yield evidence.finding(
                FindingKind.TOO_FEW_ROWS,
                f"{seen.operand.value}: {seen.sampled} sampled rows of {seen.width} features do not determine "
                "how the features depend on each other",
                "more samples: loka probe with more --steps, or with a smaller --every",
            )


def _over_budget(evidence: FindingEvidence) -> Iterator[Finding]:
    """Estimates of the policy's own recipe over the budget, and a safe recipe if there is one."""
    budget = evidence.settings.budget
    for gemm in evidence.gemms:
        wanted = evidence.settings.gemms[gemm].operands
        estimate = evidence.summary.estimate(gemm, wanted)
        verdict = Verdict.SAFE if estimate is None else estimate.verdict(budget)
        if estimate is None or verdict is Verdict.SAFE:
            continue
        kind = FindingKind.OVER_BUDGET if verdict is Verdict.UNSAFE else FindingKind.UNDECIDED
        safe = (
            other.operands
            for other in evidence.summary.estimates
            if other.gemm is gemm and other.verdict(budget) is Verdict.SAFE and not _special(other.operands)
        )
        better = next(safe, None)
        setting = "compute: keep" if better is None else _undone(evidence, gemm) + _recipe_setting(gemm, better)
        remedy = evidence.rule(f"{gemm.value}: {{{setting}}}")
        if kind is FindingKind.UNDECIDED:
            remedy += f"  # or let more draws decide: loka probe --draws {4 * estimate.draws}"
        judged = f"{gemm.value} {recipe_label(gemm, estimate.operands)}"
        yield evidence.finding(kind, f"{judged}: {_numbers(estimate, verdict, budget)}", remedy)


def _numbers(estimate: Estimate, verdict: Verdict, budget: Budget) -> str:
    """The figures outside the budget; for an undecided GEMM also those whose interval contains it."""
    mere, sqnr = estimate.mere, estimate.sqnr_db
    parts = []
    if mere.low > budget.mere or (verdict is Verdict.UNDECIDED and mere.high > budget.mere):
        parts.append(f"MERE {mere.mean:.3f} [{mere.low:.3f}, {mere.high:.3f}] against the budget {budget.mere:g}")
    if sqnr.high < budget.sqnr_db or (verdict is Verdict.UNDECIDED and sqnr.low < budget.sqnr_db):
        parts.append(f"SQNR {sqnr.mean:.1f} dB [{sqnr.low:.1f}, {sqnr.high:.1f}] against the budget {budget.sqnr_db:g}")
    return f"{verdict.value} after {estimate.draws} draws: {' and '.join(parts)}"


def _undone(evidence: FindingEvidence, gemm: Gemm) -> str:
    """Fields to reset for a safe recipe, which was judged without the policy's other settings."""
    rounded = any(recipe.power_of_two for recipe in evidence.settings.gemms[gemm].operands)
    return evidence.afresh(gemm) + ("power_of_two: false, " if rounded else "")


def _special(operands: OperandPair) -> bool:
    """True if a recipe has more than the format and scaling that `_recipe_setting` writes."""
    return any(recipe.power_of_two or recipe.transposed or recipe.is_static for recipe in operands)


def _recipe_setting(gemm: Gemm, operands: OperandPair) -> str:
    """The fields of two operands in policy syntax, with common fields once."""
    common, own = [], {operand: list[str]() for operand in OPERANDS[gemm]}
    for name in ("format", "scaling"):
        values = [getattr(recipe, name).value for recipe in operands]
        if values[0] == values[1]:
            common.append(f"{name}: {values[0]}")
        else:
            for operand, value in zip(own, values, strict=True):
                own[operand].append(f"{name}: {value}")
    return ", ".join([*common, *(f"{operand.value}: {{{', '.join(each)}}}" for operand, each in own.items() if each)])


# The paper's rule for a bias that diverges is a norm of 0.1. A PyTorch linear is initialised with a bias of norm about
# sqrt(N / 3K), often above that, so this rule is about growth: by 0.1, and by half of its initial norm, which separates
# a diverging bias from one that learns a little.
BIAS_GROWTH = 0.1
BIAS_RATIO = 1.5
# Subtracting a mean with this share of the power quarters the signal's power and keeps the rounding noise: one bit
# less.
MEAN_SHARE = 0.75
# Octaves of amax / rms beyond a Gaussian of the same size: 2 of the 8.8 that e4m3 has above 1 go to outliers.
OUTLIER_OCTAVES = 2.0
AMPLIFYING = frozenset(("silu", "gelu", "sigmoid"))  # smooth gates: unbounded or saturating, unlike ReLU6


def bias_diverges(evidence: FindingEvidence) -> Iterator[Finding]:
    """A bias whose norm grows in training, which moves values out of the range of a scale."""
    bias = evidence.bias
    if bias is None or not evidence.gemms:
        return
    if bias.last - bias.first >= BIAS_GROWTH and bias.last >= BIAS_RATIO * bias.first:
        yield evidence.finding(
            FindingKind.BIAS_DIVERGES,
            f"the norm of its bias went from {bias.first:.3g} to {bias.last:.3g} "
            f"(limit: +{BIAS_GROWTH:g} and x{BIAS_RATIO:g})",
            evidence.mod(Concern.BIAS, f"build {evidence.quoted} without its bias"),
        )


def norm_cancels(evidence: FindingEvidence) -> Iterator[Finding]:
    """A LayerNorm subtracts each row's mean: if that is most of the row, the remainder is mostly rounding noise."""
    if not evidence.gemms:
        return
    if evidence.site.followed_by[:1] == ("layer_norm",):
        share = output_mean_share(evidence)
        if share is not None and share >= MEAN_SHARE:
            yield evidence.finding(
                FindingKind.NORM_CANCELS,
                f"the row means of its output, which the layer_norm after it subtracts, hold {100 * share:.1f} % of "
                f"its power (limit: {100 * MEAN_SHARE:g} %)",
                evidence.mod(Concern.NORM_AFTER, f"replace the LayerNorm after {evidence.quoted} by a block RMSNorm"),
            )
    if evidence.site.fed_by[:1] == ("layer_norm",) and evidence.stats.input is not None:
        share = mean_share(evidence.stats.input.moments)
        if share >= MEAN_SHARE:
            yield evidence.finding(
                FindingKind.NORM_CANCELS,
                f"the layer_norm before it gives nearly the same to every row: the features' means hold "
                f"{100 * share:.1f} % of the input's power (limit: {100 * MEAN_SHARE:g} %)",
                evidence.mod(Concern.NORM_BEFORE, f"replace the LayerNorm before {evidence.quoted} by a block RMSNorm"),
            )


def activation_outliers(evidence: FindingEvidence) -> Iterator[Finding]:
    """An activation whose output has larger maxima relative to its RMS than a Gaussian: in a row or in the tensor."""
    seen = evidence.summary.operand(Operand.INPUT)
    activation = evidence.site.fed_by[:1]
    if seen is None or not evidence.gemms or not AMPLIFYING.intersection(activation) or seen.rms <= 0:
        return
    elements = seen.width * max(1, round(seen.rows / max(1, seen.calls)))
    places = [("of a tensor", math.log2(max(seen.usual_amax, seen.rms) / seen.rms), gaussian_spread(elements, 0.5))]
    if seen.row_spread is not None:
        places.append(("within a row (99th percentile)", seen.row_spread.p99, gaussian_spread(seen.width, 0.99)))
    where, octaves, usual = max(places, key=lambda place: place[1] - place[2])
    if octaves - usual > OUTLIER_OCTAVES:
        yield evidence.finding(
            FindingKind.ACTIVATION_OUTLIERS,
            f"after {activation[0]} the maximum {where} is {2**octaves:.0f} times the RMS; "
            f"a Gaussian of that size has {2**usual:.1f} (limit: {OUTLIER_OCTAVES:g} octaves more)",
            evidence.mod(
                Concern.ACTIVATION_BEFORE, f"replace the {activation[0]} before {evidence.quoted} by a hard swish"
            ),
        )


MODEL_RULES = (bias_diverges, norm_cancels, activation_outliers)


def gaussian_spread(count: int, quantile: float) -> float:
    """log2 of the `quantile` of the largest |z| of `count` independent N(0, 1)."""
    tail = -math.expm1(math.log(quantile) / count) / 2
    return math.log2(max(-NormalDist().inv_cdf(tail), 2.0**-20))


def mean_share(moments: Moments) -> float:
    """The share of an operand's power in the means of its features, 0 to 1; 0 if there is no power."""
    if moments.count == 0:
        return 0.0
    mean = float(moments.mean.double().square().sum())
    power = mean + float(moments.diagonal.double().sum()) / moments.count
    return mean / power if power > 0 else 0.0


def output_mean_share(evidence: FindingEvidence) -> float | None:
    """The share of the power of y = x @ weight.T + bias in its row means, 0 to 1.

    y is not recorded: its first two moments follow from those of x and the weight, exactly if the covariance is full
    and all rows of the weight are kept, otherwise from the low-rank covariance and the kept rows. None if the input or
    the weight was not seen, or is not finite.
    """
    seen, weight = evidence.stats.input, evidence.stats.weight
    if seen is None or weight is None or seen.moments.count < 2 or weight.nonfinite:
        return None
    bias = torch.zeros(evidence.site.n, dtype=torch.float64)
    if evidence.bias is not None and evidence.bias.values.numel() == evidence.site.n:
        bias = evidence.bias.values.double()
    rows, shifts = weight.rows.double(), bias[weight.row_index]
    mean, spread = seen.moments.mean.double(), covariance(seen.moments)
    powers = (rows @ mean + shifts).square() + _quadratic(rows, spread)
    average = _average_row(weight)[None]
    of_mean = (average @ mean + bias.mean()).square() + _quadratic(average, spread)
    power = float(powers.mean())
    return min(1.0, float(of_mean) / power) if power > 0 else None


def _average_row(weight: WeightStats) -> Tensor:
    """The mean over all rows of the weight, (K,), from the additive fit."""
    if weight.rows.shape[0] == weight.row_mean.shape[0]:
        return weight.rows.double().mean(0)
    return weight.column_mean.double() + weight.row_mean.double().mean()


def _quadratic(rows: Tensor, spread: Tensor | LowRank) -> Tensor:
    """r C r^T for each of the rows (R, K), with C (K, K): (R,)."""
    if isinstance(spread, LowRank):
        low = (rows @ spread.factor.double()).square().sum(1)
        return low + rows.square() @ spread.diagonal.double()
    return ((rows @ spread.double()) * rows).sum(1)


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
    seen = evidence.summary.operand(Operand.GRAD_OUTPUT)
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

"""Findings about a site: causes of lost accuracy in FP8, with figures and remedies.

Each rule is about one site and gives at most one finding per operand or GEMM. Rules about the quantization of an
operand consider only GEMMs that the policy does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loka.mods.suggestions import Suggestible
from loka.numerics.enums import OPERANDS, Gemm, Operand
from loka.numerics.recipe import OperandPair
from loka.policy.settings import Budget, SiteSettings
from loka.probe.diagnostics.finding_evidence import FindingEvidence, FindingKind, estimate_of
from loka.probe.diagnostics.findings_model import MODEL_RULES
from loka.probe.diagnostics.findings_scale import SCALE_RULES
from loka.probe.estimate.candidate_recipes import recipe_label
from loka.probe.profile.profile import Estimate, Finding, SiteProfile, Verdict
from loka.probe.stats.bias_track import BiasTrack
from loka.probe.stats.site_stats import SiteStats
from loka.sites.site import Site

Rule = Callable[[FindingEvidence], Iterator[Finding]]


def find(
    site: Site,
    stats: SiteStats,
    summary: SiteProfile,
    settings: SiteSettings,
    bias: BiasTrack | None = None,
    suggestible: Suggestible | None = None,
) -> tuple[Finding, ...]:
    """The findings about one site, in the order of the rules.

    `summary` is that of `stats`, with its estimates; `bias` the track of the site's bias from `bias_track`, None if it
    has none or was not tracked; `suggestible` the possible mods, None if unknown.
    """
    evidence = FindingEvidence(site, stats, summary, settings, bias, suggestible or Suggestible())
    if (seen := evidence.operand(Operand.INPUT)) is None or seen.calls == 0:
        return tuple(_never_ran(evidence))
    rules: tuple[Rule, ...] = (_no_gradient, _nonfinite, _always_zero, *MODEL_RULES, *SCALE_RULES)
    return tuple(found for rule in (*rules, _too_few_rows, _over_budget) for found in rule(evidence))


def _never_ran(evidence: FindingEvidence) -> Iterator[Finding]:
    yield evidence.finding(
        FindingKind.NEVER_RAN, "it was called in none of the sampled steps", evidence.rule("compute: keep")
    )


def _no_gradient(evidence: FindingEvidence) -> Iterator[Finding]:
    seen = evidence.operand(Operand.GRAD_OUTPUT)
    if seen is None or seen.calls == 0:
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
        estimate = estimate_of(evidence.summary, gemm, wanted)
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
    fields = []
    for name in ("format", "scaling"):
        first, second = (getattr(recipe, name).value for recipe in operands)
        if first == second:
            fields.append(f"{name}: {first}")
        else:
            values = zip(OPERANDS[gemm], (first, second), strict=True)
            fields.extend(f"{operand.value}: {{{name}: {value}}}" for operand, value in values)
    return _merged(fields)


def _merged(fields: list[str]) -> str:
    """Merges fields of one key: `input: {format: a}, input: {scaling: b}` becomes `input: {format: a, scaling: b}`."""
    merged: dict[str, list[str]] = {}
    for text in fields:
        key, _, value = text.partition(": ")
        merged.setdefault(key, []).append(value)
    parts = []
    for key, values in merged.items():
        inner = ", ".join(value.strip("{}") for value in values)
        parts.append(f"{key}: {{{inner}}}" if values[0].startswith("{") else f"{key}: {inner}")
    return ", ".join(parts)

"""Decisions, recipes, figures and groups of names as short text, the same in all tables and reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TypeVar

from loka.kernels.gemm.catalogue import PREFERRED
from loka.numerics.enums import OPERANDS, Accumulation, Gemm, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.plan.plan import NATIVE, NOTHING_AROUND, Evidence, GemmPlan, SitePlan, StepTime, TunedStep
from loka.policy.settings import Assignment, Budget
from loka.probe.profile.profile import Interval

USUAL = PREFERRED[0].name  # the default kernel
EXTRAPOLATED = "~"  # before a time
EXTRAPOLATED_NOTE = f"{EXTRAPOLATED}: extrapolated beyond measured sizes"
_NUMBER = re.compile(r"(?<![^.#])\d+(?![^.#])")  # a numeric part of a name: the 3 in "layers.3.fmb"
_PARTS = re.compile(r"([.#])")
_FEW = 3  # names that are listed where their glob would match others


def format_recipe(recipe: OperandRecipe) -> str:
    """One operand: `e4m3 rowwise`, `e5m2 tensorwise static(448) pow2`, `e4m3 transposed`."""
    if recipe.transposed:
        return f"{recipe.format.value} transposed"  # implies the rest
    words = [recipe.format.value] if recipe.scaling is not Scaling.NVFP4 else []
    words.append(recipe.scaling.value)
    if recipe.is_static:
        words.append("static" if recipe.amax is None else f"static({recipe.amax:g})")
    if recipe.power_of_two:
        words.append("pow2")
    return " ".join(words)


def format_gemm(gemm: GemmPlan) -> str:
    """One GEMM: `e4m3 rowwise` for operands with equal recipes, otherwise both with names; `as-is` if it is kept."""
    return NATIVE if gemm.operands is None else format_operands(gemm.gemm, gemm.operands)


def format_operands(gemm: Gemm, pair: OperandPair) -> str:
    """The recipes of both operands: `e4m3 rowwise` if they are equal, otherwise each with its operand's name."""
    first, second = pair
    if first == second:
        return format_recipe(first)
    names = OPERANDS[gemm]
    return f"{names[0].value} {format_recipe(first)}, {names[1].value} {format_recipe(second)}"


def format_decision(plan: SitePlan, gemm: Gemm, with_amax: bool = True) -> str:
    """Recipe of one GEMM of a site, and its kernel if not the default one; `-` where the site has no such GEMM."""
    for decision in plan.gemms:
        if decision.gemm is gemm:
            if decision.operands is None:
                return f"{NATIVE}{_format_kernels(decision)}"
            first, second = decision.operands
            pair = decision.operands if with_amax else (first.without_amax, second.without_amax)
            return f"{format_operands(gemm, pair)}{_format_kernels(decision)}"
    return "-"


def _format_kernels(decision: GemmPlan) -> str:
    """Kernels other than the default one: ` by fbgemm.rowwise`, ` by fbgemm.rowwise up to M 1024, ...`."""
    if decision.m_buckets:
        *below, (_, above) = decision.m_buckets
        return " by " + ", ".join([*(f"{kernel} up to M {rows}" for rows, kernel in below), f"{above} above"])
    return "" if decision.kernel in (NATIVE, USUAL) else f" by {decision.kernel}"


def format_gemm_reasons(gemms: Sequence[GemmPlan]) -> str:
    """Reasons for the decisions on some GEMMs: one if they share it, otherwise each with its GEMMs."""
    groups = grouped(gemms, lambda each: each.reason)
    if len(groups) == 1:
        return gemms[0].reason
    return "; ".join(f"{', '.join(each.gemm.value for each in group)}: {group[0].reason}" for group in groups)


def format_reasons(plan: SitePlan) -> str:
    """Reasons for a site's decisions, and why its region ends.

    A region without anything to fuse is reported only by `explain`, as that is not a problem.
    """
    text = format_gemm_reasons(plan.gemms)
    if plan.region_note and plan.region_note != NOTHING_AROUND:
        what = "its region ends" if plan.region else "region not replaced"
        text = f"{text}; {what}: {plan.region_note}"
    return text


def format_place(assignment: Assignment) -> str:
    """Position where a field was set: `ranker.yaml:14`, or a whole file; "" for built-in defaults."""
    return f"{assignment.file}:{assignment.line}" if assignment.line else assignment.file


def format_mere(mere: Interval) -> str:
    """A MERE with its interval: `0.26 [0.25, 0.27]`."""
    return f"{mere.mean:.3g} [{mere.low:.3g}, {mere.high:.3g}]"


def format_sqnr(sqnr_db: Interval) -> str:
    """An SQNR with its interval, in dB: `24.1 [23.4, 24.8]`."""
    return f"{sqnr_db.mean:.1f} [{sqnr_db.low:.1f}, {sqnr_db.high:.1f}]"


def format_ne(ne_percent: Interval) -> str:
    """A change of NE with its interval, in per cent: `+0.0172 % [0.0121, 0.0223]`."""
    return f"{ne_percent.mean:+.3g} % [{ne_percent.low:.3g}, {ne_percent.high:.3g}]"


def format_evidence(evidence: Evidence | None) -> str:
    """The verdict with its figures: `undecided, MERE 0.021 [0.02, 0.022], SQNR 24.1 dB [23.4, 24.8]`."""
    if evidence is None:
        return "no evidence"
    return f"{evidence.verdict.value}, MERE {format_mere(evidence.mere)}, SQNR {_decibels(evidence.sqnr_db)}"


def format_kernel(kernel: str, accumulation: Accumulation | None) -> str:
    """A kernel, with its fast accumulation if it has: `torch.scaled_mm fast`."""
    return f"{kernel} fast" if accumulation is Accumulation.FAST else kernel


def format_share(share: float) -> str:
    """A share as a percentage with one decimal: `31.4 %`; `<0.1 %` for a positive share that rounds to 0."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def format_us(us: float) -> str:
    """A time with its unit: `43.2 us`, `1204 us`."""
    return f"{format_figure(us)} us"


def format_time(time: StepTime, calls: int = 1) -> str:
    """The time of some calls without its unit, marked where it was extrapolated: `43.2`, `~1204`."""
    return f"{EXTRAPOLATED if time.extrapolated else ''}{format_figure(time.us * calls)}"


def format_figure(us: float) -> str:
    """A time in microseconds without its unit: `43.2`, `1204`."""
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def format_speedup(speedup: float) -> str:
    """A ratio of times: `1.31x`."""
    return f"{speedup:.2f}x"


def format_over_budget(mere: Interval, sqnr_db: Interval, budget: Budget) -> str:
    """Figures that lie wholly outside the budget: `MERE 0.26 [0.25, 0.27] over the budget 0.2`."""
    found = []
    if mere.low > budget.mere:
        found.append(f"MERE {format_mere(mere)} over the budget {budget.mere:g}")
    if sqnr_db.high < budget.sqnr_db:
        found.append(f"SQNR {_decibels(sqnr_db)} under the budget {budget.sqnr_db:g}")
    return " and ".join(found)


def format_near_budget(mere: Interval, sqnr_db: Interval, budget: Budget) -> str:
    """Figures whose intervals contain the budget: `SQNR 24.1 dB [23.4, 24.8] about the budget 24`."""
    found = []
    if mere.low <= budget.mere < mere.high:
        found.append(f"MERE {format_mere(mere)} about the budget {budget.mere:g}")
    if sqnr_db.low < budget.sqnr_db <= sqnr_db.high:
        found.append(f"SQNR {_decibels(sqnr_db)} about the budget {budget.sqnr_db:g}")
    return " and ".join(found)


def _decibels(sqnr_db: Interval) -> str:
    return format_sqnr(sqnr_db).replace(" [", " dB [", 1)


T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items of each key, in the order of the first of them."""
    groups: dict[Hashable, list[T]] = {}
    for each in items:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def pattern_of(name: str) -> str:
    """A name with each numeric part replaced by a star: layers.3.fmb.0 -> layers.*.fmb.*"""
    return _NUMBER.sub("*", name)


def common_pattern(names: Sequence[str]) -> str:
    """The names' common glob: parts that differ become a star, as does all that follows what names have in common."""
    split = [_PARTS.split(name) for name in names]
    if len({len(parts) for parts in split}) > 1:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(min(names), max(names), strict=False))
        return "".join(one for one, _ in same) + "*"
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*split, strict=True))


def rule_patterns(names: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """Globs that a rule takes for these names: one, or where it would match others, one for those that are alike.

    A few names are listed instead where such a glob would match others, too.
    """
    if len(names) == 1:
        return list(names)
    rest = set(others).difference(names)

    def alone(glob: str) -> bool:
        return not any(fnmatchcase(each, glob) for each in rest)

    whole, globs = common_pattern(names), list(map(common_pattern, grouped(names, pattern_of)))
    if len(globs) > 1 and "." in whole and alone(whole):
        return [whole]
    return globs if len(names) > _FEW or all(map(alone, globs)) else list(names)


def describe_tuned(tuned: TunedStep) -> str:
    """`confirmed by a measured step: 3.21 ms against 4.10 ms of BF16 (reduce-overhead) on NVIDIA H200, 2026-11-23`.

    A winner that is no faster than BF16 says so.
    """
    where = f"on {tuned.device}, {tuned.date[:10]}"
    bf16 = f"{tuned.bf16_ms:.3g} ms of BF16 ({tuned.execution})"
    if tuned.is_native:
        return f"a measured step found nothing clearly faster than {bf16} {where}{_fp8(tuned)}"
    if tuned.step_ms >= tuned.bf16_ms:
        return f"slower in a measured step: {tuned.step_ms:.3g} ms against {bf16} {where}"
    return f"confirmed by a measured step: {tuned.step_ms:.3g} ms against {bf16} {where}"


def _fp8(tuned: TunedStep) -> str:
    """`; FP8 took 8.04 ms at best: 1.03x, with a noise of 4.0 %`."""
    if tuned.best_fp8_ms is None:
        return ""
    gain = tuned.bf16_ms / tuned.best_fp8_ms
    noise = f": {gain:.2f}x, with a noise of {100 * (tuned.best_fp8_noise or 0.0):.1f} %" if gain > 1 else ""
    return f"; FP8 took {tuned.best_fp8_ms:.3g} ms at best{noise}"

"""Decisions in a few words, for tables and reasons: the same words everywhere."""

from __future__ import annotations

from loka.numerics.names import OPERANDS, Gemm, Range
from loka.plan.plan import AS_IS, NOTHING_AROUND, GemmPlan, SitePlan
from loka.policy.settings import Assignment, OperandRecipe


def recipe_words(recipe: OperandRecipe) -> str:
    """One operand: `e4m3 rowwise`, `e5m2 tensorwise static(448) pow2`."""
    words = [recipe.format.value, recipe.scaling.value]
    if recipe.range is Range.STATIC:
        words.append("static" if recipe.amax is None else f"static({recipe.amax:g})")
    if recipe.power_of_two:
        words.append("pow2")
    return " ".join(words)


def gemm_words(gemm: GemmPlan) -> str:
    """One GEMM: `e4m3 rowwise` where both operands are alike, else both with their names; `as-is` where it is kept."""
    if gemm.operands is None:
        return AS_IS
    first, second = gemm.operands
    if first == second:
        return recipe_words(first)
    names = OPERANDS[gemm.gemm]
    return f"{names[0].value} {recipe_words(first)}, {names[1].value} {recipe_words(second)}"


def decision_words(plan: SitePlan, gemm: Gemm) -> str:
    """What one GEMM of a site runs in, or `-` where the site has no such GEMM."""
    for decision in plan.gemms:
        if decision.gemm is gemm:
            return gemm_words(decision)
    return "-"


def reason_words(plan: SitePlan) -> str:
    """Why a site runs as it does: one reason where its GEMMs share it, else each with its name.

    That there is nothing around a site to take along is left to `explain`: it is no refusal.
    """
    reasons: dict[str, list[str]] = {}
    for decision in plan.gemms:
        reasons.setdefault(decision.reason, []).append(decision.gemm.value)
    if len(reasons) == 1:
        text = next(iter(reasons))
    else:
        text = "; ".join(f"{', '.join(gemms)}: {reason}" for reason, gemms in reasons.items())
    if plan.region_note and plan.region_note != NOTHING_AROUND:
        text = f"{text}; region not replaced: {plan.region_note}"
    return text


def place_words(assignment: Assignment) -> str:
    """Where a field was set: `ranker.yaml:14`; "" where it is built in."""
    return f"{assignment.file}:{assignment.line}" if assignment.line else ""

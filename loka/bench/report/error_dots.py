"""The error of each GEMM against its budget: a row of dots for each site, on one axis for MERE and one for SQNR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.bench.report.geometry import Axis, axis_of
from loka.bench.report.precision import Precision, precision_of
from loka.numerics.enums import Gemm
from loka.plan.format import format_mere, format_sqnr
from loka.plan.plan import Evidence, GemmPlan, Plan, SitePlan
from loka.plan.report.plan_rows import name_of_group, site_groups
from loka.plan.report.profile_view import budget_of
from loka.policy.settings import Budget
from loka.probe.profile.profile import Interval, Verdict

SHOWN = 60  # rows
_MARGIN = 1.08  # of the axis beyond what is on it
_MOST_DB = 80.0  # an SQNR beyond it, of an operand that is exact, is at the end of the axis


@dataclass(frozen=True, slots=True)
class Dot:
    """One GEMM: positions on both axes in per cent, with the ends of the intervals."""

    gemm: Gemm
    precision: Precision
    fp8: bool  # as planned; otherwise the error that FP8 would have
    verdict: Verdict
    mere: tuple[float, float, float]  # low, mean, high
    sqnr: tuple[float, float, float]
    words: str  # "fprop: MERE 0.21 [0.2, 0.22], SQNR 24.1 [23.4, 24.8] dB, safe"


@dataclass(frozen=True, slots=True)
class DotRow:
    """A site, or several alike ones, of which the worst of each GEMM is shown."""

    name: str
    count: int
    budget: Budget
    budget_at: tuple[float, float]  # on the axes of MERE and of SQNR
    dots: tuple[Dot, ...]

    @property
    def words(self) -> str:
        """The row as a sentence."""
        dots = "; ".join(dot.words for dot in self.dots)
        return f"{self.name}, budget MERE {self.budget.mere:g} and SQNR {self.budget.sqnr_db:g} dB: {dots}"


@dataclass(frozen=True, slots=True)
class DotChart:
    """The rows, the nearest to its budget first, and the axes that they share."""

    mere: Axis
    sqnr: Axis
    rows: tuple[DotRow, ...]
    left_out: int  # rows further from their budget

    @property
    def budget(self) -> Budget | None:
        """The budget of all rows; None if they have several."""
        found = {(row.budget.mere, row.budget.sqnr_db) for row in self.rows}
        return self.rows[0].budget if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Judged:
    """GEMMs of a plan in FP8, counted by the verdict of their evidence."""

    safe: int
    undecided: int
    unsafe: int
    without: int  # without evidence

    @property
    def total(self) -> int:
        """All GEMMs in FP8."""
        return self.safe + self.undecided + self.unsafe + self.without


def judged(plan: Plan) -> Judged:
    """The verdicts on all GEMMs in FP8."""
    fp8 = [gemm.evidence for site in plan.sites for gemm in site.gemms if gemm.fp8]
    counts = {verdict: sum(each is not None and each.verdict is verdict for each in fp8) for verdict in Verdict}
    return Judged(counts[Verdict.SAFE], counts[Verdict.UNDECIDED], counts[Verdict.UNSAFE], fp8.count(None))


def dot_chart(plan: Plan, shown: int = SHOWN) -> DotChart | None:
    """The chart of a plan; None where no GEMM has evidence."""
    found = [(group, budget_of(group[0].history), _worst(group)) for group in site_groups(plan)]
    found = [each for each in found if each[2]]
    if not found:
        return None
    found.sort(key=lambda each: -_used(each[1], each[2]))
    kept = found[:shown]
    evidence = [each for _, _, worst in kept for _, each in worst]
    budgets = [budget for _, budget, _ in kept]
    meres = _finite([each.mere for each in evidence], [budget.mere for budget in budgets])
    decibels = _finite([each.sqnr_db for each in evidence], [budget.sqnr_db for budget in budgets])
    mere = axis_of(0.0, _MARGIN * max(meres))
    sqnr = axis_of(math.floor(min(decibels)) - 1.0, math.ceil(min(max(decibels), _MOST_DB)) + 1.0)
    rows = tuple(_row(group, budget, worst, mere, sqnr) for group, budget, worst in kept)
    return DotChart(mere, sqnr, rows, len(found) - len(kept))


def _finite(intervals: Sequence[Interval], budgets: Sequence[float]) -> list[float]:
    ends = [end for each in intervals for end in (each.low, each.mean, each.high)]
    return [end for end in (*ends, *budgets) if math.isfinite(end)]


def _worst(group: Sequence[SitePlan]) -> list[tuple[GemmPlan, Evidence]]:
    """Of each GEMM the one with the largest error."""
    found: dict[Gemm, tuple[GemmPlan, Evidence]] = {}
    for site in group:
        for gemm in site.gemms:
            known = found.get(gemm.gemm)
            if gemm.evidence is not None and (known is None or known[1].mere.high < gemm.evidence.mere.high):
                found[gemm.gemm] = (gemm, gemm.evidence)
    return list(found.values())


def _used(budget: Budget, worst: Sequence[tuple[GemmPlan, Evidence]]) -> float:
    """The share of the budget that the worst GEMM in FP8 uses; those that are kept come last."""
    shares = [each.mere.high / budget.mere if budget.mere else math.inf for gemm, each in worst if gemm.fp8]
    return max(shares, default=-1.0)


def _row(
    group: Sequence[SitePlan], budget: Budget, worst: Sequence[tuple[GemmPlan, Evidence]], mere: Axis, sqnr: Axis
) -> DotRow:
    dots = tuple(
        Dot(
            gemm=gemm.gemm,
            precision=precision_of(gemm, fused=False),
            fp8=gemm.fp8,
            verdict=each.verdict,
            mere=_positions(each.mere, mere),
            sqnr=_positions(each.sqnr_db, sqnr),
            words=(
                f"{gemm.gemm.value}{'' if gemm.fp8 else ' (not in FP8)'}: MERE {format_mere(each.mere)}, "
                f"SQNR {format_sqnr(each.sqnr_db)} dB, {each.verdict.value}"
            ),
        )
        for gemm, each in worst
    )
    return DotRow(name_of_group(group), len(group), budget, (mere.at(budget.mere), sqnr.at(budget.sqnr_db)), dots)


def _positions(interval: Interval, axis: Axis) -> tuple[float, float, float]:
    return axis.at(interval.low), axis.at(interval.mean), axis.at(interval.high)

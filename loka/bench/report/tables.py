"""What a plan and its profile say, as the tables and lines of a report."""

from __future__ import annotations

from collections.abc import Sequence

from loka.bench.markdown import Table
from loka.plan.evidence import over_budget
from loka.plan.format import format_share, grouped, pattern_of
from loka.plan.plan import NATIVE, Plan
from loka.plan.view.table import (
    DECISIONS,
    EVIDENCE,
    NOTHING,
    PlanRow,
    cells_of,
    slowed_lines,
)
from loka.probe.profile.profile import Finding

SMALL = 0.001  # share of the model's FLOPs below which a site outside FP8 is no shortfall


def shortfalls(plan: Plan, rows: Sequence[PlanRow]) -> list[str]:
    """The plan's shortfalls, a line each; `rows` are those of the plan, with sites alike in one row."""
    lines = [f"over budget and in FP8 all the same: {line}" for line in over_budget(plan)]
    judged = [gemm.evidence is not None for site in plan.sites for gemm in site.gemms if gemm.fp8]
    if judged.count(False):
        without = f"{judged.count(False)} of {len(judged)} GEMMs"
        lines.append(f"in FP8 without evidence: {without}; run loka probe, and name the profile")
    lines += slowed_lines(plan)
    for row in rows:
        if row.share >= SMALL and set(row.runs_in) <= {NATIVE, NOTHING}:
            lines.append(f"not in FP8: {row.pattern}, {format_share(row.share)} of the FLOPs: {row.reason}")
    for each in plan.opaque:
        if each.share >= SMALL:
            where = ", ".join(repr(owner) for owner in each.owners[:3]) + (", ..." if len(each.owners) > 3 else "")
            lines.append(f"not replaced: {each.what} in {where}, {format_share(each.share)} of the FLOPs")
    for skipped in plan.skipped:
        where = f"region {skipped.owner!r}" if skipped.owner else "the model itself"
        lines.append(f"not patched: {where}, {format_share(skipped.share)} of the FLOPs: {skipped.reason}")
    return lines


def decisions(rows: Sequence[PlanRow]) -> Table:
    """A row for each site, or for several alike ones."""
    return DECISIONS, [tuple(cell or NOTHING for cell in cells) for cells in cells_of(rows, DECISIONS)]


def evidence(rows: Sequence[PlanRow]) -> Table:
    """The errors of the rows that have evidence."""
    judged = [row for row in rows if row.mere != NOTHING]
    columns = ("site", "count", "worst MERE", "worst SQNR, dB", "sampled steps")
    return columns, cells_of(judged, ("site", "count", *EVIDENCE))


def finding_rows(findings: Sequence[Finding]) -> Table:
    """A line for each kind of finding and group of sites whose names differ only in numbers; evidence of the first."""
    groups = grouped(findings, lambda each: (each.kind, pattern_of(each.site)))
    return ("finding", "site", "count", "evidence of the first", "remedy"), [
        (first.kind, pattern_of(first.site), str(len(group)), first.evidence, first.remedy)
        for group in groups
        for first in group[:1]
    ]

"""`loka report`: a policy's measurements and decisions on one page of Markdown, from its plan and its profile."""

from __future__ import annotations

from collections.abc import Sequence

from loka.bench.markdown import Table, code, escaped, listed, markdown_table, nested
from loka.plan.evidence import ProfiledSites, over_budget
from loka.plan.format import describe_tuned, format_share, grouped, pattern_of
from loka.plan.mod_words import describe_mod, describe_unchanged
from loka.plan.plan import NATIVE, Plan
from loka.plan.planner import Planned
from loka.plan.totals import format_host, format_time_sources, format_total, total_time
from loka.plan.view.coverage import Coverage, coverage_of
from loka.plan.view.table import (
    DECISIONS,
    EVIDENCE,
    INTERACTIONS,
    NOTHING,
    TIMES,
    PlanRow,
    budget_lines,
    cells_of,
    group_sites,
    interaction_rows,
    slowed_lines,
)
from loka.probe.profile.profile import Finding

TITLE = ": what was measured and decided"  # ends the first line of every page
SMALL = 0.001  # share of the model's FLOPs below which a site outside FP8 is no shortfall


def to_markdown(planned: Planned, policy: str) -> str:
    """The page of a policy, titled with the user's name for it. Deterministic for a plan and a profile."""
    plan, known = planned.plan, planned.known
    rows = group_sites(plan, True)
    parts = [f"# {escaped(plan.name)}{TITLE}", _summary(plan, known, policy)]
    parts += ["## Decisions", markdown_table(decisions(rows))]
    parts += [listed(planned.notes)] if planned.notes else []
    if any(site.site.calls for site in plan.sites):
        parts += ["## Coverage", *_coverage(coverage_of(plan))]
    if plan.mods:
        parts += ["## Mods", _mods(plan)]
    if known is not None:
        budgets = [escaped(f"{line[:1].upper()}{line[1:]}.") for line in budget_lines(plan)]
        parts += ["## Evidence", "\n".join(budgets), markdown_table(evidence(rows))]
        if known.profile.findings:
            parts += ["## Findings", markdown_table(finding_rows(known.profile.findings))]
    if sentences := total_sentences(planned):
        timed = [row for row in rows if row.us != NOTHING]
        columns = ("site", "count", *TIMES)
        parts += ["## Times", escaped(" ".join(sentences)), markdown_table((columns, cells_of(timed, columns)))]
        parts += [markdown_table((INTERACTIONS, interaction_rows(plan)))] if plan.interactions else []
    short = shortfalls(plan, rows)
    parts += ["## What falls short", listed(short) if short else "Nothing that the plan knows of."]
    return "\n\n".join(parts) + "\n"


def is_markdown_report(head: bytes) -> bool:
    """True for the start of a page that `to_markdown` made."""
    return head.split(b"\n", 1)[0].endswith(TITLE.encode())


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


def _summary(plan: Plan, known: ProfiledSites | None, policy: str) -> str:
    fp8 = sum(site.fp8 for site in plan.sites)
    lines = [
        f"Policy {code(policy)}, for {plan.target.value} at batch size {plan.batch_size}, by LoKA {plan.loka_version}.",
        f"{format_share(plan.share_fp8)} of the training GEMM FLOPs run in FP8: {fp8} of {len(plan.called)} sites, "
        f"{len(plan.bindings)} generated classes.",
    ]
    if known is None:
        lines.append("No evidence: the policy names no profile.")
    else:
        profile = known.profile
        lines.append(
            f"Evidence: {code(known.name)}, {profile.samples} samples in {profile.steps} steps of "
            f"{profile.batch_size}, {escaped(profile.created)}."
        )
    if plan.measurements is not None:
        lines.append(escaped(f"Times: {plan.measurements[0]}."))
    if plan.tuned is not None:
        lines.append(f"{escaped(f'{plan.tuned.choice}: {describe_tuned(plan.tuned)}')} ({code(plan.tuned.file)}).")
    return "\n".join(lines)


def decisions(rows: Sequence[PlanRow]) -> Table:
    """A row for each site, or for several alike ones."""
    return DECISIONS, [tuple(cell or NOTHING for cell in cells) for cells in cells_of(rows, DECISIONS)]


def total_sentences(planned: Planned) -> tuple[str, ...]:
    """The time of a training step, what FP8 itself gains, and what the step waits for; none without measurements."""
    plan, total = planned.plan, total_time(planned.plan)
    if total is None:
        return ()
    found, host = f"{format_total(total)} ({format_time_sources(total)}).", format_host(plan, total)
    return (found, f"{host[:1].upper()}{host[1:]}.") if host else (found,)


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


def _coverage(coverage: Coverage) -> list[str]:
    table = markdown_table((("", "share", "us")[: len(coverage.rows[0])], coverage.rows))
    pieces = [piece.words for piece in coverage.largest]
    largest = ["The largest pieces that stay the compiler's:", listed(pieces)] if pieces else []
    return [table, escaped(coverage.step_words), *largest]


def _mods(plan: Plan) -> str:
    return nested(
        (describe_mod(plan, mod), [f"left {line}" for line in describe_unchanged(mod.unchanged)]) for mod in plan.mods
    )

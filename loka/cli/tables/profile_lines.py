"""Lines of `loka explain` about a site's profile."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from loka.cli.output import percent, print_line, print_table

if TYPE_CHECKING:
    from loka.plan.report.profile_view import ProfileView
    from loka.probe.profile.profile import NeEstimate, OperandSummary, Quantiles


def show_profile_view(seen: ProfileView) -> None:
    """Print operands with their distributions, recipes with their errors, and findings."""
    print_line(f"evidence: {seen.profile}, {seen.samples} samples in {seen.steps} steps, made {seen.created}")
    if seen.note:
        print_line(f"  {seen.note}")
    for operand in seen.operands:
        _show_operand(operand)
    if seen.operands:
        _show_shares(seen)
    if seen.recipes:
        _show_recipes(seen)
    if seen.unjudged:
        gemms = ", ".join(gemm.value for gemm in seen.unjudged)
        print_line(f"no estimate of {gemms}: loka probe makes none of what the policy keeps, or was never finite")
    for finding in seen.findings:
        print_line(f"finding {finding.kind}: {finding.evidence}; {finding.remedy}")


def _show_operand(operand: OperandSummary) -> None:
    from loka.plan.report.histogram import ASCII, BLOCKS, histogram

    calls = f"{operand.calls} calls, " if operand.calls else ""
    bars, axis = histogram(operand.operand, operand.magnitudes, BLOCKS if _shows(BLOCKS) else ASCII)
    print()
    print_line(f"{operand.operand.value}: |x| of {operand.sampled} rows of {operand.rows}, {calls}log height:")
    if bars:
        print_line(f"  {bars}")
        print_line(f"  {axis}")
    amax = f"amax {operand.amax:.4g}, usually {operand.usual_amax:.4g}, rms {operand.rms:.4g}"
    print_line(
        f"  {amax}, zeros {percent(operand.zeros)}, non-finite {operand.nonfinite} in {operand.nonfinite_calls} calls"
    )
    spreads = [
        f"{name} {_quantiles(each)}"
        for name, each in (("a row", operand.row_spread), ("128 neighbours", operand.block_spread))
        if each is not None
    ]
    if spreads:
        print_line(f"  octaves from rms to amax within {', within '.join(spreads)}")


def _quantiles(spread: Quantiles) -> str:
    return f"{spread.p50:.1f} ({spread.p1:.1f} to {spread.p99:.1f})"


def _show_shares(seen: ProfileView) -> None:
    """Print losses with dynamic scales, a line for each operand and kind of scale."""
    rows: dict[tuple[str, str], list[str]] = {}
    formats: dict[str, None] = {}
    for operand in seen.operands:
        for each in operand.shares:
            formats.setdefault(each.format.value)
            cells = rows.setdefault((operand.operand.value, each.view.value), [])
            cells += [percent(each.underflow), percent(each.subnormal)]
    if rows:
        losses = [f"{format} {loss}" for format in formats for loss in ("underflow", "subnormal")]
        print()
        print_table(("operand", "scale", *losses), [(*key, *cells) for key, cells in rows.items()], losses)


def _show_recipes(seen: ProfileView) -> None:
    from loka.plan.format import format_mere, format_sqnr

    print()
    print_line("predicted MERE and predicted SQNR: of this site's own operands, estimated from the profile")
    shows_ne = any(each.ne is not None for each in seen.recipes)
    rows = [
        (
            each.gemm.value,
            f"{each.recipe} (runs)" if each.runs else each.recipe,
            format_mere(each.mere),
            format_sqnr(each.sqnr_db),
            *(_ne_cells(each.ne) if shows_ne else ()),
            str(each.draws),
            f"{each.verdict.value}: {each.figures}" if each.figures else each.verdict.value,
        )
        for each in seen.recipes
    ]
    ne_columns = ("change of NE", "varying error dB") if shows_ne else ()
    print_table(
        ("GEMM", "recipe", "predicted MERE", "predicted SQNR dB", *ne_columns, "draws", "verdict"), rows, ("draws",)
    )
    print_line(f"budget: MERE {seen.budget.mere:g}, SQNR {seen.budget.sqnr_db:g} dB; speed {seen.speed}")


def _ne_cells(ne: NeEstimate | None) -> tuple[str, str]:
    """The change of NE, and the error of what varies between samples, in dB of that."""
    from loka.plan.format import format_ne

    if ne is None:
        return "-", "-"
    error = ne.varying_error
    decibels = "-" if error is None else f"{10 * math.log10(error):.1f}" if 0 < error < math.inf else f"{error:g}"
    return format_ne(ne.ne_percent), decibels


def _shows(text: str) -> bool:
    """True if stdout's encoding can print the text."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

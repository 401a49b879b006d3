"""What `loka explain` prints of a site: facts, GEMMs, times, evidence of the profile, the rules of its fields."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from loka.cli.output import print_line, print_table
from loka.plan.communication import gather_words
from loka.plan.format import (
    EXTRAPOLATED_NOTE,
    format_figure,
    format_gemm,
    format_kernel,
    format_mere,
    format_ne,
    format_share,
    format_speedup,
    format_sqnr,
    format_time,
)
from loka.plan.plan import NOTHING_AROUND, GemmPlan, InteractionPlan, KernelTime, SiteTiming, StepTime, TimedOption
from loka.plan.select.interaction_times import kernel_names
from loka.plan.select.workload import surroundings_of
from loka.plan.totals import format_by_fp8
from loka.plan.view.explain import Explanation, SiteEvidence
from loka.plan.view.histogram import ASCII, BLOCKS, histogram
from loka.probe.profile.profile import NeEstimate, OperandSummary, Quantiles

KERNELS_ERROR = ("kernel's MERE", "kernel's SQNR dB")  # beside times


def show_site(explained: Explanation) -> None:
    """Print the site, its GEMMs and its fields."""
    found, site = explained.found, explained.found.site
    print_line(f"{site.name}: {site.kind.value}, M {explained.m} ({site.rows}), K {site.k}, N {site.n}")
    for label, text in _facts(explained):
        print_line(f"  {label}: {text}")
    print()
    print_table(
        ("GEMM", "runs in", "kernel", "reason"),
        [(each.gemm.value, format_gemm(each), each.kernel, each.reason) for each in found.gemms],
    )
    if explained.inside is not None:
        _show_inside(explained.inside)
    if found.timing is not None:
        _show_timing(explained, found.timing)
        _show_kernels(found.gemms)
    else:
        _show_rejected(found.gemms)
    if explained.evidence is not None:
        print()
        _show_evidence(explained.evidence)
    if explained.fields:
        print()
        fields = [
            (each.path, each.holds.value, str(each.holds), "; ".join(f"{was.value} of {was}" for was in each.overrode))
            for each in explained.fields
        ]
        print_table(("field", "value", "set by", "overrode"), fields)
    notes = [(field.holds.source, field.holds.note) for field in explained.fields]
    for source, text in dict.fromkeys(notes + [(each.mod, each.note) for each in explained.mods]):
        if text:
            print_line(f"{source}: {text}")


def _facts(explained: Explanation) -> list[tuple[str, str]]:
    found, site, ends = explained.found, explained.found.site, explained.region_ends
    members = ", ".join(site.members)
    facts = [
        (
            "share",
            f"{format_share(site.share)} of the model's GEMM FLOPs, {explained.flops:.3g} FLOPs in a training step",
        ),
        ("calls", f"{site.calls} in training, {site.calls_eval} in evaluation"),
        ("owner", site.owner or "the model itself"),
        ("weight", site.weight or (f"those of {members}" if members else "computed, no Parameter")),
        ("bias", site.bias or (f"those of {members}" if members else "none")),
        ("fed by", ", ".join(site.fed_by) or "the model's input"),
        ("followed by", ", ".join(site.followed_by) or "the model's output"),
        ("written at", site.where),
        ("cannot be patched", site.blocked or ""),
        ("region", " -> ".join(found.region) or ("the GEMM alone" if ends else "")),
        (
            "region ends" if found.region else "region not replaced",
            "" if ends and found.region_note == NOTHING_AROUND else found.region_note,
        ),
        *(("region ends at", text) for text in ends),
        ("generated class", explained.bound_in),
        ("all-gather", gather_words(explained.gather) if explained.gather is not None else ""),
        ("not timed", explained.untimed),
    ]
    numbered = [(each.mod.partition(": "), each) for each in explained.mods]  # "mod 2: block_norm"
    mods = [(number, f"{use} ({each.place}): {each.what}") for (number, _, use), each in numbered]
    return [(label, text) for label, text in facts if text] + mods


def _show_rejected(gemms: Sequence[GemmPlan]) -> None:
    rows = [(gemm.gemm.value, each.kernel, each.reason) for gemm in gemms for each in gemm.rejected]
    if rows:
        print()
        print_table(("GEMM", "rejected", "because"), rows)


def _show_inside(inside: InteractionPlan) -> None:
    """Print the interaction that a site is part of, and its times."""
    print()
    print_line(
        f"computed in {inside.what} in {inside.owner or 'the model itself'}, by {' and '.join(kernel_names(inside))}"
    )
    times = (("our kernels", inside.chosen), ("torch.compile", inside.as_is))
    rows = [(name, *_figures(time), time.source.value) for name, time in times if time is not None]
    if rows:
        columns = ("forward", "backward", "us")
        print_table(("one call by", *columns, "source"), rows, columns, tight=True)
    if inside.chosen is not None and inside.as_is is None:
        print_line("never measured by torch.compile: what it gains is not known")


def _show_timing(explained: Explanation, timing: SiteTiming) -> None:
    """Print the times of one call, and a line for each execution option of the site's GEMMs."""
    chosen = timing.chosen
    print()
    print_line(
        f"time of one call by {explained.measurements}: {format_time(chosen)} us, {format_time(timing.without_fp8)} us "
        f"without FP8, {format_time(timing.as_is)} us in compiled BF16, {format_speedup(timing.speedup)}, "
        f"{chosen.source.value}"
    )
    if any(each.extrapolated for each in (chosen, timing.without_fp8, timing.as_is)):
        print_line(EXTRAPOLATED_NOTE)
    if explained.found.fp8:
        print_line(f"{format_by_fp8(timing.by_fp8)} (min_speedup {explained.min_speedup:g})")
    print_line(f"{' and '.join(KERNELS_ERROR)}: measured on normal operands, not on this site's own")
    print()
    options = explained.found.options
    bare = not surroundings_of(explained.found.site).any and not any(each.fused for each in options)
    rows = [
        (*each.kernels, _around(each, bare), *_figures(each.time), *_error(each), each.time.source.value, each.outcome)
        for each in options
    ]
    host = ("host us",) if chosen.host_us is not None else ()
    columns = ("forward", "backward", "us", *host, *KERNELS_ERROR)
    gemms = (gemm.gemm.value for gemm in explained.found.gemms)
    print_table((*gemms, "around them", *columns, "source", "outcome"), rows, columns, tight=True)


def _around(option: TimedOption, bare: bool) -> str:
    """What becomes of the norms and activations around the GEMMs; `bare`: there are none."""
    return "-" if bare else "fused" if option.fused else "compiled"


def _figures(time: StepTime) -> list[str]:
    """Forward, backward, both, and the host's time if it is known."""
    times = (time.forward, time.backward, time.us, time.host_us)
    return [format_figure(each) for each in times if each is not None]


def _show_kernels(gemms: Sequence[GemmPlan]) -> None:
    """Print the product's time on every kernel, its error if measured, and why the others were rejected."""
    rows: list[tuple[str, ...]] = []
    never_timed: dict[tuple[str, str], list[str]] = {}  # (kernel, reason) -> names of the GEMMs
    for gemm in gemms:
        reasons = {each.kernel: each.reason for each in gemm.rejected}
        for each in gemm.times:
            run = format_kernel(each.kernel, each.accumulation)
            reason = reasons.pop(run, "")
            outcome = "chosen" if (each.kernel, each.accumulation) == (gemm.kernel, gemm.accumulation) else reason
            spread, figures = f"{100 * each.spread:.1f}", _error(each)
            rows.append((gemm.gemm.value, run, format_figure(each.us), spread, *figures, each.source.value, outcome))
        for rejected in reasons.items():
            never_timed.setdefault(rejected, []).append(gemm.gemm.value)
    rows += [(", ".join(names), kernel, *["-"] * 5, reason) for (kernel, reason), names in never_timed.items()]
    print()
    columns = ("us", "+- %", *KERNELS_ERROR)
    print_table(("GEMM", "product alone on", *columns, "source", "outcome"), rows, columns, tight=True)


def _error(found: TimedOption | KernelTime) -> tuple[str, str]:
    """MERE and SQNR as measured, `-` if unknown."""
    return (
        "-" if found.mere is None else f"{found.mere:.3g}",
        "-" if found.sqnr_db is None else f"{found.sqnr_db:.1f}",
    )


def _show_evidence(seen: SiteEvidence) -> None:
    """Print operands with their distributions, recipes with their errors, and findings."""
    print_line(f"evidence: {seen.profile}, {seen.samples} samples in {seen.steps} steps, made {seen.created}")
    if seen.note:
        print_line(f"  {seen.note}")
    for operand in seen.operands:
        _show_operand(operand)
    _show_shares(seen.operands)
    if seen.recipes:
        _show_recipes(seen)
    if seen.unjudged:
        gemms = ", ".join(gemm.value for gemm in seen.unjudged)
        print_line(f"no estimate of {gemms}: loka probe makes none of what the policy keeps, or was never finite")
    for finding in seen.findings:
        print_line(f"finding {finding.kind}: {finding.evidence}; {finding.remedy}")


def _show_operand(operand: OperandSummary) -> None:
    calls = f"{operand.calls} calls, " if operand.calls else ""
    bars, axis = histogram(operand.operand, operand.magnitudes, BLOCKS if _shows(BLOCKS) else ASCII)
    print()
    print_line(f"{operand.operand.value}: |x| of {operand.sampled} rows of {operand.rows}, {calls}log height:")
    if bars:
        print_line(f"  {bars}")
        print_line(f"  {axis}")
    amax = f"amax {operand.amax:.4g}, usually {operand.usual_amax:.4g}, rms {operand.rms:.4g}"
    zeros, nonfinite = format_share(operand.zeros), f"{operand.nonfinite} in {operand.nonfinite_calls} calls"
    print_line(f"  {amax}, zeros {zeros}, non-finite {nonfinite}")
    spreads = (("a row", operand.row_spread), ("128 neighbours", operand.block_spread))
    known = [f"within {name} {_quantiles(each)}" for name, each in spreads if each is not None]
    if known:
        print_line(f"  octaves from rms to amax {', '.join(known)}")


def _quantiles(spread: Quantiles) -> str:
    return f"{spread.p50:.1f} ({spread.p1:.1f} to {spread.p99:.1f})"


def _show_shares(operands: Sequence[OperandSummary]) -> None:
    """Print losses with dynamic scales, a line for each operand and kind of scale."""
    rows: dict[tuple[str, str], list[str]] = {}
    formats: dict[str, None] = {}
    for operand in operands:
        for each in operand.shares:
            formats.setdefault(each.format.value)
            cells = rows.setdefault((operand.operand.value, each.view.value), [])
            cells += [format_share(each.underflow), format_share(each.subnormal)]
    if rows:
        losses = [f"{format} {loss}" for format in formats for loss in ("underflow", "subnormal")]
        print()
        print_table(("operand", "scale", *losses), [(*key, *cells) for key, cells in rows.items()], losses)


def _show_recipes(seen: SiteEvidence) -> None:
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

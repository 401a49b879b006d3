"""Lines of `loka explain` about a site's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loka.cli.output import print_line, print_table

if TYPE_CHECKING:
    from loka.plan.plan import KernelTime, TimedOption
    from loka.plan.report.explain_site import Decision, ExplainedTiming, Inside

KERNELS_ERROR = ("kernel's MERE", "kernel's SQNR dB")  # beside times


def show_inside(inside: Inside) -> None:
    """Print the interaction that a site is part of, and its times."""
    from loka.plan.format import format_figure

    computes = "computed in" if inside.takes else "read by"
    print()
    print_line(f"{computes} {inside.what} in {inside.owner or 'the model itself'}, by {' and '.join(inside.kernels)}")
    rows = [
        (name, format_figure(time.forward), format_figure(time.backward), format_figure(time.us), time.source.value)
        for name, time in (("our kernels", inside.chosen), ("torch.compile", inside.as_is))
        if time is not None
    ]
    if rows:
        columns = ("forward", "backward", "us")
        print_table(("one call by", *columns, "source"), rows, columns, tight=True)
    if inside.chosen is not None and inside.as_is is None:
        print_line("never measured by torch.compile: what it gains is not known")


def show_timing(timing: ExplainedTiming) -> None:
    """Print the times of one call, and a line for each execution option of the site's GEMMs."""
    from loka.plan.format import format_figure, format_speedup, format_us

    chosen, as_is = timing.chosen, timing.as_is
    host = chosen.host_us is not None
    print()
    print_line(
        f"time of one call by {timing.measurements}: {format_us(chosen.us)}, {format_us(as_is.us)} in BF16, "
        f"{format_speedup(timing.speedup)} (min_speedup {timing.min_speedup:g}), {chosen.source.value}"
    )
    print_line(f"{' and '.join(KERNELS_ERROR)}: measured on normal operands, not on this site's own")
    print()
    rows = [
        (
            *each.kernels,
            format_figure(each.time.forward),
            format_figure(each.time.backward),
            format_figure(each.time.us),
            *((format_figure(each.time.host_us),) if each.time.host_us is not None else ()),
            *_error(each),
            each.time.source.value,
            each.outcome,
        )
        for each in timing.candidates
    ]
    gemms = tuple(gemm.value for gemm in timing.gemms)
    columns = ("forward", "backward", "us", *(("host us",) if host else ()), *KERNELS_ERROR)
    print_table((*gemms, *columns, "source", "outcome"), rows, columns, tight=True)


def show_kernels(gemms: Sequence[Decision]) -> None:
    """Print the product's time on every kernel, its error if measured, and why the others were rejected."""
    from loka.plan.format import format_figure, format_kernel

    rows: list[tuple[str, ...]] = []
    for gemm in gemms:
        reasons = dict(gemm.rejected)
        for each in gemm.times:
            run = format_kernel(each.kernel, each.accumulation)
            chosen = (each.kernel, each.accumulation) == (gemm.kernel, gemm.accumulation)
            outcome = "chosen" if chosen else reasons.get(run, "")
            spread = f"{100 * each.spread:.1f}"
            rows.append(
                (gemm.gemm.value, run, format_figure(each.us), spread, *_error(each), each.source.value, outcome)
            )
    rows += [(names, kernel, *["-"] * 5, reason) for (kernel, reason), names in _never_timed(gemms).items()]
    print()
    columns = ("us", "+- %", *KERNELS_ERROR)
    print_table(("GEMM", "product alone on", *columns, "source", "outcome"), rows, columns, tight=True)


def _error(found: TimedOption | KernelTime) -> tuple[str, str]:
    """MERE and SQNR as measured, `-` if unknown."""
    return (
        "-" if found.mere is None else f"{found.mere:.3g}",
        "-" if found.sqnr_db is None else f"{found.sqnr_db:.1f}",
    )


def _never_timed(gemms: Sequence[Decision]) -> dict[tuple[str, str], str]:
    """(kernel, reason) of rejected kernels without a time -> names of the GEMMs."""
    from loka.plan.format import format_kernel

    found: dict[tuple[str, str], list[str]] = {}
    for gemm in gemms:
        timed = {format_kernel(each.kernel, each.accumulation) for each in gemm.times}
        for kernel, reason in gemm.rejected:
            if kernel not in timed:
                found.setdefault((kernel, reason), []).append(gemm.gemm.value)
    return {key: ", ".join(names) for key, names in found.items()}

"""What measurements say of one site, as `loka explain` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loka.cli.output import print_table

if TYPE_CHECKING:
    from loka.plan.plan import Candidate, KernelTime
    from loka.plan.report.explain_site import Decision, ExplainedTiming, Inside


def show_inside(inside: Inside) -> None:
    """The interaction that a site is part of, and its times."""
    from loka.plan.report.format import figure_words

    computes = "computed in" if inside.takes else "read by"
    print()
    print(f"{computes} {inside.what} in {inside.owner or 'the model itself'}, by {' and '.join(inside.kernels)}")
    rows = [
        (name, figure_words(time.forward), figure_words(time.backward), figure_words(time.us), time.source.value)
        for name, time in (("our kernels", inside.chosen), ("torch.compile", inside.as_is))
        if time is not None
    ]
    if rows:
        columns = ("forward", "backward", "us")
        print_table(("one call by", *columns, "source"), rows, columns, tight=True)
    if inside.chosen is not None and inside.as_is is None:
        print("never measured by torch.compile: what it gains is not known")


def show_timing(timing: ExplainedTiming) -> None:
    """The times of one call, and a line for each way of running the site's GEMMs."""
    from loka.plan.report.format import figure_words, speedup_words, time_words

    chosen, as_is = timing.chosen, timing.as_is
    print()
    print(
        f"time of one call by {timing.measurements}: {time_words(chosen.us)}, {time_words(as_is.us)} in BF16, "
        f"{speedup_words(timing.speedup)} (min_speedup {timing.min_speedup:g}), {chosen.source.value}"
    )
    print()
    rows = [
        (
            *each.kernels,
            figure_words(each.time.forward),
            figure_words(each.time.backward),
            figure_words(each.time.us),
            *_error(each),
            each.time.source.value,
            each.outcome,
        )
        for each in timing.candidates
    ]
    gemms = tuple(gemm.value for gemm in timing.gemms)
    columns = ("forward", "backward", "us", "MERE", "SQNR dB")
    print_table((*gemms, *columns, "source", "outcome"), rows, columns, tight=True)


def show_kernels(gemms: Sequence[Decision]) -> None:
    """The product alone on every kernel, with its error where that was measured, and why the others lost."""
    from loka.plan.report.format import figure_words, run_words

    rows: list[tuple[str, ...]] = []
    for gemm in gemms:
        reasons = dict(gemm.rejected)
        for each in gemm.times:
            run = run_words(each.kernel, each.accumulation)
            chosen = (each.kernel, each.accumulation) == (gemm.kernel, gemm.accumulation)
            outcome = "chosen" if chosen else reasons.get(run, "")
            spread = f"{100 * each.spread:.1f}"
            rows.append(
                (gemm.gemm.value, run, figure_words(each.us), spread, *_error(each), each.source.value, outcome)
            )
    rows += [(names, kernel, *["-"] * 5, reason) for (kernel, reason), names in _never_timed(gemms).items()]
    print()
    columns = ("us", "+- %", "MERE", "SQNR dB")
    print_table(("GEMM", "product alone on", *columns, "source", "outcome"), rows, columns, tight=True)


def _error(found: Candidate | KernelTime) -> tuple[str, str]:
    """MERE and SQNR as measured, `-` where they are not known."""
    return (
        "-" if found.mere is None else f"{found.mere:.3g}",
        "-" if found.sqnr_db is None else f"{found.sqnr_db:.1f}",
    )


def _never_timed(gemms: Sequence[Decision]) -> dict[tuple[str, str], str]:
    """The kernels without a time and why they are not taken, with the GEMMs of which that is said."""
    from loka.plan.report.format import run_words

    found: dict[tuple[str, str], list[str]] = {}
    for gemm in gemms:
        timed = {run_words(each.kernel, each.accumulation) for each in gemm.times}
        for kernel, reason in gemm.rejected:
            if kernel not in timed:
                found.setdefault((kernel, reason), []).append(gemm.gemm.value)
    return {key: ", ".join(names) for key, names in found.items()}

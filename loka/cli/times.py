"""What measurements say of one site, as `loka explain` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loka.cli.output import print_table

if TYPE_CHECKING:
    from loka.plan.explain import Decision, Timing


def show_timing(timing: Timing) -> None:
    """The times of one call, and a line for each way of running the site's GEMMs."""
    from loka.plan.words import figure_words, speedup_words, time_words

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
            each.time.source.value,
            each.outcome,
        )
        for each in timing.candidates
    ]
    gemms = tuple(gemm.value for gemm in timing.gemms)
    columns = ("forward us", "backward us", "us")
    print_table((*gemms, *columns, "source", "outcome"), rows, columns)


def show_kernels(gemms: Sequence[Decision]) -> None:
    """The product alone on every kernel, with its error where that was measured, and why the others lost."""
    from loka.plan.words import figure_words

    rows: list[tuple[str, ...]] = []
    for gemm in gemms:
        reasons = dict(gemm.rejected)
        for each in gemm.times:
            outcome = "chosen" if each.kernel == gemm.kernel else reasons.get(each.kernel, "")
            error = (
                "-" if each.mere is None else f"{each.mere:.3g}",
                "-" if each.sqnr_db is None else f"{each.sqnr_db:.1f}",
            )
            spread = f"{100 * each.spread:.1f}"
            rows.append(
                (gemm.gemm.value, each.kernel, figure_words(each.us), spread, *error, each.source.value, outcome)
            )
    rows += [(names, kernel, *["-"] * 5, reason) for (kernel, reason), names in _never_timed(gemms).items()]
    print()
    columns = ("us", "+- %", "MERE", "SQNR dB")
    print_table(("GEMM", "product alone on", *columns, "source", "outcome"), rows, columns)


def _never_timed(gemms: Sequence[Decision]) -> dict[tuple[str, str], str]:
    """The kernels without a time and why they are not taken, with the GEMMs of which that is said."""
    found: dict[tuple[str, str], list[str]] = {}
    for gemm in gemms:
        timed = {each.kernel for each in gemm.times}
        for kernel, reason in gemm.rejected:
            if kernel not in timed:
                found.setdefault((kernel, reason), []).append(gemm.gemm.value)
    return {key: ", ".join(names) for key, names in found.items()}

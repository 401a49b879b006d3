"""The speed that a plan predicts on its GPU, beside that of training on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from loka.cli.output import note, print_line, print_table

if TYPE_CHECKING:
    from loka.bench.quality.training import PairResult
    from loka.cli.labels import ComparisonLabels
    from loka.plan.plan import Plan


def show_speed(plan: Plan, device: str, pairs: Sequence[PairResult], labels: ComparisonLabels) -> None:
    """Print the planned time of a step, if measurements decided the plan, and the mean rate of the pairs' training."""
    from loka.plan.format import format_figure, format_speedup
    from loka.plan.totals import format_summed, total_time

    rows, total = [], total_time(plan)
    if total is not None:
        target, time = plan.target.value, (format_figure(total.as_is_us), format_figure(total.us))
        rows.append((f"planned on {target}, us of a step", *time, format_speedup(total.speedup)))
    as_is, fp8 = (
        fmean(run.samples_per_second for run in runs)
        for runs in ([pair.as_is for pair in pairs], [pair.patched for pair in pairs])
    )
    emulated = device == "cpu" and any(site.fp8 for site in plan.sites)
    how = "not compiled" if device != "cpu" else "FP8 emulated" if emulated else ""
    where = ", ".join(filter(None, (f"{device} here", how)))
    rows.append((f"{where}, samples/s", f"{as_is:.0f}", f"{fp8:.0f}", f"{fp8 / as_is:.2f}x"))
    columns = ("speed of training", labels.first, labels.second, "speedup")
    print_table(columns, rows, numbers=columns[1:])
    if total is not None:
        print_line(
            f"Planned: {format_summed(total)}, at batch size {plan.batch_size}, by measurements on that GPU; as it is "
            "under torch.compile in BF16."
        )
    if emulated:
        note("note: this machine has no FP8 GPU: its samples/s of FP8 are those of the emulation in torch")
    elif device != "cpu":
        note(
            "note: these runs are for quality: eager, and at the batch size of training, where Python's launches are "
            "what takes the time, the more the kernels; loka bench model measures compiled steps"
        )

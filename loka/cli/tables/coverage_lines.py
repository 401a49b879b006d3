"""Coverage of a plan for terminals and for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka.cli.output import percent, print_line, print_table

if TYPE_CHECKING:
    from loka.plan.report.coverage import Coverage


def print_coverage(coverage: Coverage) -> None:
    """Print the shares as a table of at most 80 columns, what the time contains, and the largest native pieces."""
    from loka.plan.report.coverage import describe_pieces, describe_step, share_rows

    rows = share_rows(coverage)
    print()
    if coverage.time is None:
        print_table(("coverage", "share"), [(name, percent(share)) for name, share, _ in rows], ("share",))
    else:
        cells = [(name, percent(share), us) for name, share, us in rows]
        print_table(("coverage", "share", "us"), cells, ("share", "us"))
    print_line(describe_step(coverage))
    pieces = describe_pieces(coverage)
    if pieces:
        print_line("The largest pieces that stay the compiler's:")
    for line in pieces:
        print_line(f"  {line}")


def coverage_result(coverage: Coverage) -> dict[str, object]:
    """Coverage for `--json`, with the shares of time."""
    time = coverage.time
    return {
        "flops_training": coverage.flops_training,
        "flops_inference": coverage.flops_inference,
        "time": None
        if time is None
        else {
            "us": round(time.us, 3),
            "fused": round(time.fused, 4),
            "fp8": round(time.fp8, 4),
            "compiler": round(time.compiler, 4),
            "fused_us": time.fused_us,
            "fp8_us": time.fp8_us,
            "compiler_us": time.compiler_us,
            "beside_us": time.beside_us,
            "bounded": time.bounded,
        },
        "largest": coverage.largest,
    }

"""Error of looked-up times: each measured part is left out in turn and looked up from the others.

    python -m benchmarks.held_out_times FILE [--target h100] [--kind gemm] [--most 200]

FILE is a recording of `loka bench kernels`, or an export of one. Prints a line for each kind of part: how many parts
were looked up, how many of these were interpolated, and the ratio of looked-up and measured time (larger over smaller)
as geometric mean, 90th percentile and maximum. On a grid of powers of two, a part left out leaves neighbours a factor
of four apart, so these ratios overestimate the error of parts between measured ones. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.study import run_study
from loka.bench.markdown import markdown_table
from loka.devices.targets import DEFAULT, GPU_TARGETS
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.measurement import Measurement, PartSeries
from loka.kernels.measurements.parts import TimeSource

MOST = 200  # most parts of a kind that are looked up, spread over its sizes


@dataclass(frozen=True, slots=True)
class HeldOutTime:
    """Results of the look-ups of one kind of part. Ratios are of interpolated parts; NaN if there are none."""

    kind: PartSeries
    asked: int
    between: int
    mean: float
    p90: float
    worst: float


def held_out(measurements: Measurements, most: int = MOST) -> Iterator[HeldOutTime]:
    """Leave parts out in turn, kind by kind; kinds with a single part are skipped."""
    right = [each for each in measurements.measured if not each.wrong]
    for kind, group in groupby(right, lambda each: PartSeries.of(each.part)):
        found = list(group)
        if len(found) > 1:
            yield _of_kind(kind, found, measurements, most)


def _of_kind(kind: PartSeries, found: Sequence[Measurement], measurements: Measurements, most: int) -> HeldOutTime:
    step = -(-len(found) // most)
    ratios = []
    asked = range(0, len(found), step)
    for index in asked:
        rest = Measurements.of([*found[:index], *found[index + 1 :]], measurements.machine)
        time = rest.time(found[index].part)
        if time is not None and time.source is TimeSource.INTERPOLATED:
            ratios.append(abs(math.log(time.us / found[index].us)))
    ratios.sort()
    if not ratios:
        return HeldOutTime(kind, len(asked), 0, math.nan, math.nan, math.nan)
    mean, p90 = sum(ratios) / len(ratios), ratios[int(0.9 * (len(ratios) - 1))]
    return HeldOutTime(kind, len(asked), len(ratios), math.exp(mean), math.exp(p90), math.exp(ratios[-1]))


def table(found: Iterable[HeldOutTime]) -> str:
    """A line for each kind, in Markdown."""
    lines = []
    for each in found:
        kind = each.kind
        names = (kind.work.value, kind.kernel, kind.dtype, kind.recipe, kind.around)
        ratios = (f"{ratio:.3f}" for ratio in (each.mean, each.p90, each.worst))
        lines.append((*names, str(each.asked), str(each.between), *ratios))
    columns = ("work", "kernel", "dtype", "recipe", "around", "asked", "between", "mean", "p90", "worst")
    return markdown_table((columns, lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_out_times", description="Held-out look-ups.")
    parser.add_argument("file", help="measurements of loka bench kernels")
    parser.add_argument("--target", choices=GPU_TARGETS, default=DEFAULT.name, help="whose measurements (%(default)s)")
    parser.add_argument("--kind", default="", help="of work: gemm, quantize, ...; default: all")
    parser.add_argument("--most", type=int, default=MOST, help="parts of a kind that are asked for (%(default)s)")
    options = parser.parse_args(arguments)

    def study() -> str:
        found = held_out(Measurements.open(options.file, options.target), options.most)
        return table(each for each in found if options.kind in ("", each.kind.work.value))

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())

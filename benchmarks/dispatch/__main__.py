"""Dispatch against every single library on 27 regions: `python -m benchmarks.dispatch FILE [M,N,K ...]`, on a GPU.

FILE has measurements of `loka bench kernels`. Each result is written to dispatch.jsonl at once, and another run
continues with incomplete regions; dispatch.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.dispatch.dispatch_cases import SHAPES
from benchmarks.dispatch.dispatch_run import run_dispatch
from benchmarks.dispatch.dispatch_table import USUAL, VARIANTS, to_markdown
from benchmarks.region.region import parse_shape
from benchmarks.study import run_study, tell
from loka.bench.machine import require_gpu
from loka.bench.options import check_seconds, listed
from loka.bench.results import usable_folder
from loka.devices.targets import DEFAULT, GPU_TARGETS
from loka.kernels.measurements.lookup import Measurements
from loka.paths import write_file

LINES, PAGE = "dispatch.jsonl", "dispatch.md"


def compare(options: argparse.Namespace) -> str:
    """Plan the regions by measurements, measure what is missing and write the tables; returns the text to print.

    Raises InputError for wrong shapes, variants, seconds or files, and without a GPU.
    """
    check_seconds(options.seconds)
    end = time.monotonic() + options.seconds
    shapes = tuple(map(parse_shape, options.shapes)) or SHAPES
    variants = listed("--variants", options.variants, VARIANTS) or USUAL
    known = Measurements.open(options.file, options.target)
    require_gpu()
    usable_folder(options.out)
    lines = run_dispatch(options.out / LINES, known, shapes, variants, tell, lambda: time.monotonic() > end)
    page = to_markdown(lines, str(known.machine), f"By {known.name}, measured until {known.date}")
    write_file(options.out / PAGE, page)
    if options.json:
        return json.dumps({"lines": [asdict(line) for line in lines]}, indent=2, allow_nan=False)
    return f"{page}\nwrote {options.out / LINES} and {options.out / PAGE}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dispatch", description="Dispatch against every single library."
    )
    parser.add_argument("file", help="measurements of loka bench kernels")
    parser.add_argument("shapes", nargs="*", metavar="M,N,K", help="regions; default: 27")
    parser.add_argument("--variants", help=f"comma-separated, of {', '.join(VARIANTS)}; default: all but torchao's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to stop")
    parser.add_argument("--target", choices=GPU_TARGETS, default=DEFAULT.name, help="whose measurements (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results"), help="folder of the lines and the page")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    options = parser.parse_args(arguments)
    return run_study(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())

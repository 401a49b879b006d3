"""`python -m benchmarks.gemm_tilings`: every tiling of rendered products is compiled, then timed, on a Hopper GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.gemm_tilings.gemm_work import Shape
from benchmarks.gemm_tilings.tiling_times import SHAPES, measure_all
from benchmarks.study import run_study


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemm_tilings", description="Times rendered products.")
    for kind in SHAPES:
        parser.add_argument(f"--{kind}", type=shape_of, nargs="*", default=[], metavar="M,N,K")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    return parser.parse_args(arguments)


def shape_of(text: str) -> Shape:
    """`M,N,K` as numbers; argparse reports what is wrong with it."""
    m, n, k = (int(part) for part in text.split(","))
    return m, n, k


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each time; returns the exit status."""
    options = parse(arguments)
    chosen = {kind: getattr(options, kind) for kind in SHAPES}
    return run_study(lambda: measure_all(chosen if any(chosen.values()) else SHAPES, options.jobs))


if __name__ == "__main__":
    sys.exit(main())

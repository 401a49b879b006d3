"""`python -m benchmarks.exact_mods [CASE ...]`, on a GPU: speedup of each mod that rewrites forwards, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.exact_mods.exact_cases import CASES, named
from benchmarks.exact_mods.exact_mods import run
from benchmarks.study import run_study
from loka.bench.machine import environment, require_gpu
from loka.bench.markdown import markdown_table


def measure(names: Sequence[str]) -> str:
    """Measure the cases of these names (none: all); returns the text to print. Raises InputError."""
    cases = named(names)
    require_gpu()
    return f"{environment()}\n\n{markdown_table(run(cases))}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact_mods", description="The gain of each mod that rewrites forwards, on a GPU."
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(case.name for case in CASES)}; default: all")
    options = parser.parse_args(arguments)
    return run_study(lambda: measure(options.cases))


if __name__ == "__main__":
    sys.exit(main())

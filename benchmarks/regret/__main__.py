"""Regret of deciding by one recording, judged by another: `python -m benchmarks.regret FIRST SECOND`. Needs no GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from benchmarks.dispatch.dispatch_cases import HOWS
from benchmarks.regret import regret
from benchmarks.regret.regret_sites import site_problems
from benchmarks.study import run_study
from loka.devices.targets import DEFAULT, GPU_TARGETS
from loka.errors import InputError
from loka.kernels.gemm.catalogue import GEMM_KERNELS
from loka.kernels.measurements.lookup import Measurements


def compare(files: tuple[str, str], target: str, as_json: bool) -> str:
    """Decide every problem by the first file and judge it by the second; returns the text to print.

    Raises InputError for a file that is missing or damaged, and for two files without common parts.
    """
    first, second = (Measurements.open(name, target) for name in files)
    parts = first.parts
    both = {part.kernel for part in parts} & {part.kernel for part in second.parts}
    kernels = [kernel.name for kernel in GEMM_KERNELS if kernel.operator is not None and kernel.name in both]
    problems = {f"GEMMs, {recipe}": found for recipe, found in regret.gemm_problems(parts).items()}
    problems.update({f"sites, {how.value} accumulation": tuple(site_problems(kernels, how)) for how in HOWS})
    summaries = []
    for title, found in problems.items():
        with contextlib.suppress(InputError):  # nothing of the kind was recorded twice
            summaries.append(regret.summarise(title, found, first, second))
    if not summaries:
        raise InputError(f"{files[0]} and {files[1]} have nothing in common; record the same parts twice")
    shares = regret.drift(parts, first, second)
    if as_json:
        return json.dumps(regret.to_plain(summaries, shares), indent=2, allow_nan=False)
    return regret.to_text(summaries, shares)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret", description="What deciding by one recording costs by another."
    )
    parser.add_argument("first", help="measurements to decide by")
    parser.add_argument("second", help="measurements to judge by")
    parser.add_argument("--target", choices=GPU_TARGETS, default=DEFAULT.name, help="whose measurements (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every problem that flipped")
    options = parser.parse_args(arguments)
    return run_study(lambda: compare((options.first, options.second), options.target, options.json))


if __name__ == "__main__":
    sys.exit(main())

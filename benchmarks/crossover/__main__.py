"""Map of where FP8 is faster than BF16, from measurements: `python -m benchmarks.crossover FILE [-o FOLDER]`.

Writes crossover-DATE.md and .svg. Needs no GPU; the plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.crossover import crossover
from benchmarks.crossover.crossover_plot import plot
from benchmarks.study import run_study
from loka.bench.results import usable_folder
from loka.devices.targets import DEFAULT, GPU_TARGETS
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements
from loka.paths import write_file


def draw(file: str, target: str, out: Path, as_json: bool) -> str:
    """Write the page and the plot into the folder `out`; returns the text to print.

    Raises InputError for a file that is missing or damaged or has no GEMM in both precisions.
    """
    known = Measurements.open(file, target)
    found = crossover.crossover(known)
    if not any(found.values()):
        raise InputError(
            f"{file}: no GEMM was measured in FP8 and in BF16; record them by `loka bench kernels --record FILE "
            "--parts gemm,quantize,turn`"
        )
    usable_folder(out)
    page, picture = (out / f"crossover-{known.date[:10]}.{suffix}" for suffix in ("md", "svg"))
    command = f"python -m benchmarks.crossover {Path(file).name}"
    source = f"From {known.name}, measured until {known.date}, by `{command}`"
    write_file(page, crossover.to_markdown(found, str(known.machine), source))
    plot(found, known.machine.device, picture)
    if as_json:
        plain = {
            view.value: [{"m": m, "k": k, "n": n, **asdict(ratio)} for (m, k, n), ratio in ratios.items()]
            for view, ratios in found.items()
        }
        return json.dumps(plain, indent=2, allow_nan=False)
    lines = [f"{crossover.TITLES[view]}: {crossover.summary(ratios)}" for view, ratios in found.items()]
    return "\n".join([*lines, f"wrote {page} and {picture}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the map; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crossover", description="Where FP8 wins over BF16, by M, K and N."
    )
    parser.add_argument("file", help="measurements of loka bench kernels")
    parser.add_argument("--target", choices=GPU_TARGETS, default=DEFAULT.name, help="whose measurements (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results"), help="folder of the page and the plot")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON")
    options = parser.parse_args(arguments)
    return run_study(lambda: draw(options.file, options.target, options.out, options.json))


if __name__ == "__main__":
    sys.exit(main())

"""Where FP8 loses quality: `python -m benchmarks.ne_sources FILE`, trainings with a part of a model's GEMMs in FP8.

The policy's recipe with requantized transposes is at all of a model's FP8 sites, at one kind of GEMM alone or at all
but one, and at one site alone or at all but one (`--sites`). Each is trained from the same weights on the same batches
as the native model, by the reference quantizers. Rows go to FILE as they are made; run again, it goes on where it was.
With `LOKA_DATA` for MovieTweetings.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks.ne_calibration.report import trained_changes
from benchmarks.ne_calibration.trained import MODELS, Row, RowFile, fp8_sites, prepared, train_cases
from benchmarks.study import run_study, tell
from loka.numerics.enums import Gemm
from loka.probe.estimate import candidates
from loka.probe.gemm_errors import SiteRoundings, recipe_rounding

Case = Mapping[str, SiteRoundings]  # by the site's name


def gemm_cases(sites: Sequence[str], recipe: SiteRoundings) -> dict[str, Case]:
    """All in FP8, each kind of GEMM alone, and all but each kind."""
    found: dict[str, Case] = {"all": dict.fromkeys(sites, recipe)}
    for gemm in Gemm:
        alone = {gemm: recipe[gemm]}
        others = {each: rounding for each, rounding in recipe.items() if each is not gemm}
        found[f"{gemm.value} alone"] = dict.fromkeys(sites, alone)
        found[f"all but {gemm.value}"] = dict.fromkeys(sites, others)
    return found


def site_cases(sites: Sequence[str], recipe: SiteRoundings) -> dict[str, Case]:
    """Each site alone in FP8, and all but each."""
    found: dict[str, Case] = {}
    for site in sites:
        found[f"{site} alone"] = {site: recipe}
        found[f"all but {site}"] = dict.fromkeys((each for each in sites if each != site), recipe)
    return found


def report(command: str, rows: Sequence[Row]) -> str:
    """A table for each model: the change of NE by each case, with its standard error over seeds."""
    lines = [f"Made by `{command}`.", ""]
    for model, by_case in trained_changes(rows).items():
        lines += [f"## {model}", "", "| in FP8 | seeds | NE, % | +- | of a pair |", "|---|---|---|---|---|"]
        for case, changes in by_case.items():
            spread = stdev(changes) if len(changes) > 1 else math.nan
            error = spread / math.sqrt(len(changes))
            lines.append(f"| {case} | {len(changes)} | {fmean(changes):+.4f} | {error:.4f} | {spread:.3f} |")
        lines.append("")
    return "\n".join(lines)


def study(options: argparse.Namespace, command: str) -> str:
    """Train what the file lacks; the tables of all that it has. Raises LokaError."""
    torch.set_num_threads(1)  # the order of summation, and so the last digits, depends on the number of threads
    file = RowFile(options.file)
    recipe = {gemm: recipe_rounding(candidates(gemm)[-1]) for gemm in Gemm}  # with transposed operands
    for name in options.model or MODELS:
        job, examined = prepared(MODELS[name])
        sites = fp8_sites(examined)
        cases = gemm_cases(sites, recipe) | (site_cases(sites, recipe) if options.sites else {})
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            train_cases(MODELS[name], job, examined, seed, cases, file, tell)
    return report(command, file.rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ne_sources", description="Where FP8 loses quality.")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines; rows that it has are not made again")
    parser.add_argument("--model", action="append", choices=MODELS, help="one of the models; all")
    parser.add_argument("--sites", action="store_true", help="each site, too")
    parser.add_argument("--seeds", type=int, default=5, help="paired trainings of each case (%(default)s); 0: report")
    parser.add_argument("--first-seed", type=int, default=100, help="of weights and batches (%(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    return run_study(lambda: study(options, " ".join(["python -m benchmarks.ne_sources", *given])))


if __name__ == "__main__":
    sys.exit(main())

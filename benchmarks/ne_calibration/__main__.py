"""`python -m benchmarks.ne_calibration FILE`: predicted changes of NE against trained ones, as a table.

Rows go to FILE as they are made; run again, it goes on where it was. With `LOKA_DATA` for MovieTweetings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.ne_calibration.predicted import predict_rows
from benchmarks.ne_calibration.recipes import recipes
from benchmarks.ne_calibration.report import markdown
from benchmarks.ne_calibration.trained import MODELS, RowFile, train_rows
from benchmarks.study import run_study, tell


def study(options: argparse.Namespace, command: str) -> str:
    """Train and predict what the file lacks; the tables of all that it has. Raises LokaError."""
    torch.set_num_threads(1)  # the order of summation, and so the last digits, depends on the number of threads
    file = RowFile(options.file)
    wanted = [recipe for recipe in recipes() if options.recipe is None or recipe.name in options.recipe]
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.model or MODELS:
            predict_rows(MODELS[name], seed, wanted, file, tell)
            train_rows(MODELS[name], seed, wanted, file, tell)
    return markdown(command, file.rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, predict and print; returns the exit status."""
    names = [recipe.name for recipe in recipes()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ne_calibration", description="Predicted changes of NE against trained ones."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines; rows that it has are not made again")
    parser.add_argument("--model", action="append", choices=MODELS, help="one of the models; all")
    parser.add_argument("--recipe", action="append", choices=names, metavar="NAME", help="one of the recipes; all")
    parser.add_argument("--seeds", type=int, default=2, help="paired trainings of each recipe (%(default)s); 0: report")
    parser.add_argument("--first-seed", type=int, default=0, help="of weights and batches (%(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    return run_study(lambda: study(options, " ".join(["python -m benchmarks.ne_calibration", *given])))


if __name__ == "__main__":
    sys.exit(main())

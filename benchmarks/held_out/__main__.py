"""`python -m benchmarks.held_out`: Probe's predictions against held-out real batches, as a table and as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.held_out.held_out import judge, save, write_table
from benchmarks.held_out.held_out_cases import CASES, StudySizes
from benchmarks.held_out.held_out_report import markdown
from benchmarks.study import run_study


def compare(options: argparse.Namespace, command: str) -> str:
    """Judge the models and write the requested files; returns the tables. Raises LokaError."""
    torch.set_num_threads(1)  # the order of summation, and so the last digits, depends on the number of threads
    sizes = replace(StudySizes(), batches=options.batches, draws=options.draws, seed=options.seed)
    judged = [judge(CASES[name], sizes, whole_run=options.whole_run) for name in options.model or CASES]
    if options.out is not None:
        save(judged, sizes, options.out)
    text = markdown(command, judged, sizes)
    if options.table is not None:
        write_table(text, options.table)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, print and write; returns the exit status."""
    sizes = StudySizes()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.held_out", description="Predicted errors against those on held-out real batches."
    )
    parser.add_argument(
        "--model", action="append", choices=CASES, metavar="NAME", help=f"one of {', '.join(CASES)}; all"
    )
    parser.add_argument("--out", type=Path, help="write every row to this JSON file")
    parser.add_argument("--table", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--whole-run", action="store_true", help="judge a profile of the whole training as well")
    parser.add_argument("--batches", type=int, default=sizes.batches, help="held-out batches (%(default)s)")
    parser.add_argument("--draws", type=int, default=sizes.draws, help="sampled pairs for each GEMM (%(default)s)")
    parser.add_argument("--seed", type=int, default=sizes.seed, help="of weights, order and draws (%(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    return run_study(lambda: compare(options, " ".join(["python -m benchmarks.held_out", *given])))


if __name__ == "__main__":
    sys.exit(main())

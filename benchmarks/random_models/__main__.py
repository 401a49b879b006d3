"""`python -m benchmarks.random_models`: random models bound and unbound, as JSON lines and a table.

    python -m benchmarks.random_models --models 2000 --seed 7 --jobs 2 -o build/random_models
    python -m benchmarks.random_models --models 1 --seed 1234          # again the one of seed 1234

A model of each seed from SEED on is judged; sources of those that fail are kept, whole and reduced, in the folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

from benchmarks.random_models.generator import draw
from benchmarks.random_models.judge import Verdict
from benchmarks.random_models.report import judge_seed, start_process, table
from benchmarks.study import run_study, tell

MODELS_OF_A_PROCESS = 50  # what torch registers for a package stays
SECONDS = 600  # that a model, failing and reduced, may take


def study(options: argparse.Namespace) -> str:
    """Judge all models and write their lines; returns the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.models)
    rows, spawn = [], multiprocessing.get_context("spawn")
    with (
        spawn.Pool(options.jobs, start_process, maxtasksperchild=MODELS_OF_A_PROCESS) as pool,
        (options.out / "models.jsonl").open("w", encoding="utf-8") as lines,
    ):
        judged = [(seed, pool.apply_async(judge_seed, (seed, options.out))) for seed in seeds]
        for seed, result in judged:
            try:
                row = result.get(SECONDS)
            except multiprocessing.TimeoutError:  # the process died, or hangs
                row = {
                    "seed": seed,
                    "verdict": Verdict.TRACEBACK,
                    "reason": "no answer",
                    "steps": [*map(str, draw(seed).steps)],
                }
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)
            if row["verdict"] not in (Verdict.EQUAL, Verdict.REFUSED):
                tell(f"{row['seed']} {row['verdict']}: {row.get('reduced', row['steps'])}: {row['reason'][:200]}")
    return table(rows)


def main(arguments: list[str] | None = None) -> int:
    """Judge, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_models", description="Random models, bound and unbound."
    )
    parser.add_argument("--models", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/random_models"), help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    return run_study(lambda: study(options))


if __name__ == "__main__":
    sys.exit(main())

"""Run by test_interpreted.py with TRITON_INTERPRET=1: the programs of this package, as if on three multiprocessors.

Each is a process of its own, for it changes what operators ask of a GPU; the import of Triton is that of all.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib import import_module
from pathlib import Path

from tests.support.interpreted.faster_interpreter import as_on_a_gpu


def run(family: str, folder: Path) -> None:
    """Print a family's name, and how many results its program compared."""
    as_on_a_gpu()
    print(family, import_module(f"tests.support.interpreted.{family}_interpreted").main(folder / family), flush=True)


def main(folder: Path, families: list[str]) -> bool:
    """Whether all are as they should be; the traceback of one that is not is on stderr."""
    processes = [multiprocessing.get_context("fork").Process(target=run, args=(each, folder)) for each in families]
    for process in processes:
        process.start()
        process.join()
    return all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), sys.argv[2:]))

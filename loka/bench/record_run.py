"""`loka bench kernels --record FILE`: the parts are chosen, compiled and measured on this machine's GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loka.bench.comparison import Progress
from loka.bench.machine import environment, require_gpu, version_of
from loka.bench.record import AllParts, Book, Tally, in_order, record
from loka.bench.record_clock import GraphClock
from loka.bench.record_gemms import FBGEMM, Gemms
from loka.bench.record_grid import grid
from loka.bench.record_kernels import Kernels
from loka.bench.record_producers import Producers
from loka.kernels.parts import Part

MOST_JOBS = 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be recorded, as it was asked for."""

    file: Path
    works: tuple[str, ...] = ()  # kinds of parts; all of them where none is named
    seconds: float = float("inf")  # after which it stops, to go on in the next run
    jobs: int = 0  # processes that compile; by the CPUs where 0


def libraries() -> dict[str, str]:
    """The version of each kernel's own library, where it is installed."""
    found = version_of("fbgemm-gpu-genai", "fbgemm-gpu-genai-nightly")
    return {FBGEMM: found} if found is not None else {}


def parts_of(wanted: Wanted) -> tuple[Part, ...]:
    """The parts that a request means. Raises InputError for a kind that does not exist."""
    return grid(wanted.works, FBGEMM in libraries()) if wanted.works else grid(fbgemm=FBGEMM in libraries())


def run_record(wanted: Wanted, book: Book, parts: Sequence[Part], progress: Progress) -> Tally:
    """Compile and measure what the book has not got. Raises InputError without a Hopper GPU."""
    require_gpu()
    start = time.monotonic()
    left = [part for part in in_order(parts) if not book.has(part)]
    progress(f"{environment()}\n{len(left)} of {len(parts)} parts are to be measured")
    with tempfile.TemporaryDirectory(prefix="loka-record-") as folder:
        kernels = Kernels(left, Path(folder))
        kernels.compile(wanted.jobs or min(os.cpu_count() or 1, MOST_JOBS), progress)
        progress(f"compiled after {time.monotonic() - start:.0f} s")
        bench = AllParts(Gemms(), Producers(kernels.module))
        tally = record(parts, book, bench, GraphClock(), progress, wanted.seconds - (time.monotonic() - start))
    progress(f"{tally}, in {time.monotonic() - start:.0f} s")
    return tally

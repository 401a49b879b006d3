"""Processes that record made-up measurements, and can be killed at any moment.

They are forked from a server that has imported all of it, so that one starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from loka.kernels.measurements.lookup import Recording
from tests.support.plan.measured_cases import HOPPER, gemm, measurement


def write_parts(path: str, first: int, count: int, told: Connection) -> None:
    """Measure `count` parts from `first` on, and tell which are finished."""
    with Recording(path, HOPPER) as recording:
        for index in range(first, first + count):
            part = gemm(16 * (index + 1), 64, 64)
            if not recording.has(part):
                recording.add(measurement(part, us=1.0 + index))
            told.send(index)


class Writer:
    """A process that measures `count` parts of a file from `first` on."""

    def __init__(self, path: Path, first: int, count: int) -> None:
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload([__name__])
        self._told, told = forked.Pipe(duplex=False)
        self._process = forked.Process(target=write_parts, args=(str(path), first, count, told), daemon=True)
        self._process.start()
        told.close()  # so that reading ends when the process does

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def finished(self, count: int | None = None) -> list[int]:
        """The next `count` parts that it told of as finished, or all until it ends."""
        found: list[int] = []
        try:
            while count is None or len(found) < count:
                found.append(self._told.recv())
        except (EOFError, OSError):  # it ended, or was killed while it told
            pass
        return found

    def kill(self) -> None:
        """With SIGKILL."""
        self._process.kill()

    def end(self) -> int | None:
        """Wait until it ended, two minutes at most; its exit status, None where it still runs."""
        self.finished()
        self._process.join(timeout=120)
        return self._process.exitcode

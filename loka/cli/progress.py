"""Progress of long work on stderr: a bar on a terminal, elsewhere a plain line from time to time."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from loka.policy.problems import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY = 10.0  # seconds between plain lines


def announce_plan(policy: str) -> None:
    """Say on a terminal, before anything slow is imported, what takes a few seconds now."""
    if sys.stderr.isatty():
        print(f"planning {printable(policy)} ...", file=sys.stderr, flush=True)


class Shown:
    """Context manager of the progress display; `unit` names what is counted."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}

    def __enter__(self) -> Shown:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TextColumn(self._unit), TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, label: str, done: int, total: int | None) -> None:
        """Show progress of the work called `label`; `total` None: unknown."""
        if self._bar is not None:
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=total)
            self._bar.update(self._tasks[label], completed=done)
            return
        now = time.monotonic()
        if done == total or now - self._said.get(label, 0.0) >= LINE_EVERY:
            self._said[label] = now
            of = f" of {total}" if total is not None else ""
            print(f"{label}: {done}{of} {self._unit}", file=sys.stderr, flush=True)

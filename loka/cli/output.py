"""Output of verbs: tables, lines and progress for people, JSON for programs, atomic files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from loka.cli.table_layout import table_lines, wrapped
from loka.errors import InputError
from loka.policy.problems import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_STDOUT, _STDERR = 1, 2
_results: ContextVar[TextIO | None] = ContextVar("_results", default=None)  # where print_json prints; None: sys.stdout
PIPED_WIDTH = 400  # columns of a table that goes to a file or a pipe, so that nothing is cut

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PolicyPath = Annotated[str, typer.Argument(metavar="POLICY", help="The policy, a YAML file.", show_default=False)]


def print_json(value: Any) -> None:
    """Print dataclasses, enums, tuples and plain values as JSON on stdout; NaN and infinities become null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False), file=_results.get(), flush=True)


@contextmanager
def results_alone() -> Iterator[None]:
    """Context that reserves stdout for `print_json`: other output, including that of a model's code, goes to stderr.

    This covers Python's `sys.stdout`, and what libraries and child processes write to the file descriptor.
    """
    stdout, descriptor = sys.stdout, os.dup(_STDOUT)
    same = _is_descriptor(stdout, _STDOUT)  # a test's own stream is not the process's
    try:
        stdout.flush()
        os.dup2(_STDERR, _STDOUT)
        results = os.fdopen(os.dup(descriptor), "w", encoding="utf-8") if same else stdout
        token = _results.set(results)
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            _results.reset(token)
            sys.stdout = stdout
            if same:
                results.close()
    finally:
        os.dup2(descriptor, _STDOUT)
        os.close(descriptor)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    return None if isinstance(value, float) else value  # JSON has no NaN and no infinity


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = (), tight: bool = False
) -> None:
    """Print a table on stdout. Columns in `numbers` are right-aligned. Cells are text, never markup.

    A terminal that is too narrow wraps cells between words, and gets one paragraph a row where that is not enough.
    """
    room = terminal_width() or PIPED_WIDTH
    print("\n".join(table_lines(columns, [[printable(cell) for cell in row] for row in rows], numbers, tight, room)))


def print_line(text: str) -> None:
    """Print a line on stdout; a narrower terminal gets it in several, which break between words.

    It may hold a model's names: unprintable characters, including newlines, are escaped.
    """
    line, room = printable(text), terminal_width()
    print(line if room is None else "\n".join(wrapped(line, room)))


def terminal_width() -> int | None:
    """Width of the terminal on stdout; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def note(text: str) -> None:
    """Print lines for people on stderr: stdout is for results. Unprintable characters are escaped."""
    for line in text.split("\n"):
        print(printable(line), file=sys.stderr)


def check_not_own(path: str, own: Iterable[str | os.PathLike[str]]) -> None:
    """Raise InputError where a result would take the place of a file that it was made from."""
    for each in own:
        if os.path.exists(path) and os.path.exists(each) and os.path.samefile(path, each):
            raise InputError(f"-o: {path} is a file of the policy, which the result would replace; name another")


LINE_EVERY = 10.0  # seconds between plain lines


def announce(what: str) -> None:
    """Say on a terminal, before anything slow is imported, what takes a few seconds now: `planning my.yaml`."""
    if sys.stderr.isatty():
        print(f"{printable(what)} ...", file=sys.stderr, flush=True)


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

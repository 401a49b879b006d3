"""Common code of the studies' command lines: errors become a message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from loka.errors import LokaError


def run_study(study: Callable[[], str | None]) -> int:
    """Run a study and print its text, if any; returns the exit status.

    A LokaError is printed on stderr.
    """
    try:
        text = study()
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if text is not None:
        print(text)
    return 0


def tell(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)

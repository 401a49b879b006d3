"""Patterns over fully qualified names: globs, and regular expressions after "re:"."""

from __future__ import annotations

import fnmatch
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REGEX_PREFIX = "re:"


MATCHING_SECONDS = 1.0  # limit for matching one name; a pattern that does not backtrack needs microseconds


class PatternError(ValueError):
    """A pattern that cannot be used; the message has the reason and advice."""


def compile_pattern(text: str) -> re.Pattern[str]:
    """The pattern as a regular expression, to be used with `fullmatch`.

    In a glob, `*` and `?` take any characters, dots too; `[...]` is one of a set. Case matters.
    Raises PatternError for an empty pattern and for a regular expression that does not compile.
    """
    if not text.removeprefix(REGEX_PREFIX).strip():
        raise PatternError('an empty pattern matches nothing; write "*" for every site')
    if text.startswith(REGEX_PREFIX):
        try:
            return re.compile(text.removeprefix(REGEX_PREFIX))
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"{text!r} is no regular expression ({error}); correct it, or use a glob") from None
    try:
        return re.compile(fnmatch.translate(text))
    except re.error as error:
        raise PatternError(f"{text!r} is no glob ({error}); correct the part in brackets") from None


def matches_whole(compiled: re.Pattern[str], name: str) -> bool:
    """True if the pattern matches the whole name. Raises PatternError where that takes over `MATCHING_SECONDS`."""
    try:
        with _bounded(MATCHING_SECONDS):
            return compiled.fullmatch(name) is not None
    except _TooLongError:
        raise PatternError(
            f"matching {compiled.pattern!r} takes over {MATCHING_SECONDS:g} s on {len(name)} characters; "
            "take out a repeat within a repeat, as in (a+)+, or use a glob"
        ) from None


class _TooLongError(Exception):
    pass


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise _TooLongError in the block after a time. Other threads than the main one, and Windows, have no bound."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restore another timer
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)

"""Patterns over fully qualified names: globs, and regular expressions after "re:"."""

from __future__ import annotations

import fnmatch
import re

REGEX_PREFIX = "re:"


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

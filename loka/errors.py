"""The errors and warnings that a person at the command line or in a training script can meet."""

from __future__ import annotations

LONGEST_LINE = 1000  # characters of one line of a message


class LokaError(Exception):
    """Anything LoKA refuses to do. The message says what is wrong, where, and what to do.

    The command line prints the message without a traceback and leaves with status `exit_status`. A message repeats
    names and values of a user's files, which can be of any length: a line over `LONGEST_LINE` is cut in its middle.
    """

    exit_status = 2

    def __str__(self) -> str:
        return "\n".join(map(_cut, super().__str__().split("\n")))


class InputError(LokaError):
    """A policy, model or argument that cannot be used as it is (exit status 2)."""


class CheckFailedError(LokaError):
    """A check that was asked for did not hold: stale output, over budget, quality lost (exit status 1)."""

    exit_status = 1


class IgnoredWarning(UserWarning):
    """A file that a policy brings along does not hold for it any more, and is not used."""


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = (LONGEST_LINE - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"

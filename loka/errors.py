"""The errors and warnings that a person at the command line or in a training script can meet."""

from __future__ import annotations

from enum import StrEnum

LONGEST_LINE = 1000  # characters of one line of a message


class Code(StrEnum):
    """The kinds of errors of policies, plans, `apply` and `verify`; docs/errors.md has a section for each."""

    # The text of a policy.
    FILE = "LK001"
    YAML = "LK002"
    UNKNOWN_KEY = "LK003"
    MISSING = "LK004"
    VALUE = "LK005"
    EXTENDS = "LK006"
    CONTRADICTION = "LK007"
    # The model that it names.
    CALLABLE = "LK010"
    MODEL = "LK011"
    INPUTS = "LK012"
    # Its rules and mods.
    NO_MATCH = "LK020"
    SLOW_PATTERN = "LK021"
    IMPOSSIBLE = "LK022"
    MOD_REFUSED = "LK023"
    MOD_IDLE = "LK024"
    MOD_TWICE = "LK025"
    UNIT = "LK026"
    # What a plan is made from, and what it says.
    PROFILE = "LK030"
    OTHER_PROFILE = "LK031"
    MEASUREMENTS = "LK032"
    OVER_BUDGET = "LK033"
    PLAN_FILE = "LK034"
    # The package.
    STALE = "LK040"
    PACKAGE = "LK041"
    # `apply`, and what a patch does.
    OTHER_MODEL = "LK050"
    MACHINE = "LK051"
    UNPLANNED = "LK052"
    WRAPPED = "LK053"
    ARGUMENT = "LK054"
    NOT_ADAPTED = "LK055"
    NOT_BOUND = "LK056"
    SHARED_FORWARD = "LK057"
    RANKS = "LK058"
    GATHER = "LK059"
    EXPORT = "LK060"
    BOUND_MODULE = "LK061"
    # A bound model that runs, and `verify`.
    FROZEN = "LK070"
    CALL = "LK071"
    NOT_RUN = "LK072"
    CHANGED = "LK073"
    NOT_FINITE = "LK074"


class LokaError(Exception):
    """Anything LoKA refuses to do. The message says what is wrong, where, and what to do.

    Its first line ends with the error's `code`, as `[LK020]`, if it is of a kind that has one.
    The command line prints the message without a traceback and leaves with status `exit_status`. A message repeats
    names and values of a user's files, which can be of any length: a line over `LONGEST_LINE` is cut in its middle.
    """

    exit_status = 2

    def __init__(self, message: str = "", code: Code | None = None) -> None:
        self.code = code
        super().__init__(message if code is None else coded(message, code))

    def __str__(self) -> str:
        return "\n".join(map(_cut, super().__str__().split("\n")))


class InputError(LokaError):
    """A policy, model or argument that cannot be used as it is (exit status 2)."""


class CheckFailedError(LokaError):
    """A check that was asked for did not hold: stale output, over budget, quality lost (exit status 1)."""

    exit_status = 1


class IgnoredWarning(UserWarning):
    """A file that a policy brings along does not hold for it any more, and is not used."""


def coded(message: str, code: Code) -> str:
    """The message with a code at the end of its first line, before a colon; as it is if that has one."""
    first, newline, rest = message.partition("\n")
    if f"[{code}]" in first:
        return message
    line = first.removesuffix(":")
    return f"{line} [{code}]{first[len(line) :]}{newline}{rest}"


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = (LONGEST_LINE - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"

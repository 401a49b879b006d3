"""Problems of a policy: one line each, with the position and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.errors import InputError


def printable(text: str) -> str:
    """The text on one line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a policy file; line and column count from 1, columns in characters."""

    file: str  # as named by the user
    line: int  # 0 for the file as a whole
    column: int

    def __str__(self) -> str:
        return printable(self.file) + (f":{self.line}:{self.column}" if self.line else "")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: `file:line:column: what is wrong, what to do`."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{Place(self.file, self.line, self.column)}: {printable(self.message)}"


def problem(place: Place, message: str) -> Problem:
    """A problem at a position."""
    return Problem(place.file, place.line, place.column, message)


class PolicyError(InputError):
    """Raised for an unusable policy. `problems` has everything that was found; str() has a line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(each) for each in self.problems))

    def __reduce__(self) -> tuple[type[PolicyError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

"""What is wrong with a policy: one line a problem, each with its place and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.errors import InputError


def printable(text: str) -> str:
    """The text on one line, with everything escaped that a terminal cannot show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a policy file; line and column count from 1, columns in characters."""

    file: str  # as the user named it
    line: int  # 0 where the file as a whole is meant
    column: int

    def __str__(self) -> str:
        return printable(self.file) + (f":{self.line}:{self.column}" if self.line else "")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `file:line:column: what is wrong, what to do`."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{Place(self.file, self.line, self.column)}: {printable(self.message)}"


def problem(place: Place, message: str) -> Problem:
    """A problem at a place."""
    return Problem(place.file, place.line, place.column, message)


class PolicyError(InputError):
    """A policy that cannot be used as it is. `problems` holds all that was found; str() is one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(each) for each in self.problems))

    def __reduce__(self) -> tuple[type[PolicyError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

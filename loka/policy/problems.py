"""Problems of a policy: one line each, with the position and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.errors import InputError

LONGEST = 1800  # characters of all problems in one message; the rest are counted


def printable(text: str) -> str:
    """The text on one line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True, slots=True, order=True)
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

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {printable(self.message)}"


class PolicyError(InputError):
    """Raised for an unusable policy. `problems` has everything that was found; str() has a line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(_listed(self.problems))

    def __reduce__(self) -> tuple[type[PolicyError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def _listed(problems: Sequence[Problem]) -> str:
    """One line a problem, as many as `LONGEST` has room for, one at least."""
    lines: list[str] = []
    room = LONGEST
    for each in problems:
        line = str(each)
        room -= len(line) + 1
        if lines and room < 0:
            lines.append(f"and {len(problems) - len(lines)} more problems: correct these first")
            break
        lines.append(line)
    return "\n".join(lines)

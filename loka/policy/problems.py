"""Problems of a policy: one line each, with the position and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.errors import Code, InputError, coded

LONGEST = 1800  # characters of all problems in one message; the rest are counted
PLACES = 3  # of further problems with the same reason, that are named


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
    code: Code

    def __str__(self) -> str:
        return coded(f"{self.place}: {printable(self.message)}", self.code)


class PolicyError(InputError):
    """Raised for an unusable policy. `problems` has everything that was found; str() has a line for each reason.

    Its `code` is that of the first problem.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(_listed(self.problems))
        self.code = next((each.code for each in self.problems), None)

    def __reduce__(self) -> tuple[type[PolicyError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def _listed(problems: Sequence[Problem]) -> str:
    """One line a reason, with the places of others that share it; as many as `LONGEST` has room for, one at least."""
    alike: dict[tuple[str, Code], list[Problem]] = {}
    for each in problems:
        alike.setdefault((each.message, each.code), []).append(each)
    lines: list[str] = []
    room, left = LONGEST, len(problems)
    for found in alike.values():
        line = str(found[0]) + _more_places([each.place for each in found[1:]])
        room -= len(line) + 1
        if lines and room < 0:
            lines.append(f"and {left} more problems: correct these first")
            break
        lines.append(line)
        left -= len(found)
    return "\n".join(lines)


def _more_places(places: Sequence[Place]) -> str:
    """` (and 3 more: policies/my.yaml:9:3, ...)`; "" for none."""
    if not places:
        return ""
    rest = ", ..." if len(places) > PLACES else ""
    return f" (and {len(places)} more: {', '.join(map(str, places[:PLACES]))}{rest})"

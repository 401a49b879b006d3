"""Wrapping of long lines of generated Python: statements are broken as by `ruff format`, prose is filled.

Templates write each statement, and each paragraph of a docstring, on one line. Generating code needs no formatter. The
parameters of a kernel share lines, which `ruff format` is told to leave.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise

WIDTH = 120  # columns of a line

_TOKEN = re.compile(r"""[rbfu]*"(?:\\.|[^"\\])*"|[rbfu]*'(?:\\.|[^'\\])*'|[\[({\])},#]|=""")
_LITERAL = re.compile(r"""(?<![\w"'])'(?:\\.|[^'\\])*'""")  # in single quotes, which may hold double ones
_CALLED = re.compile(r"[\w)\]]$")
_KEYWORD = re.compile(r"\b(?:return|in|is|not|and|or|if|else|assert|yield|del|await|for)\s*$")
_TARGET = re.compile(r"\w+ = ")
_TARGETS = re.compile(r"[^=()\[\]{}]+,[^=()\[\]{}]* = ")
_GROUPS = re.compile(r"\([^()]+\)(?:, (?:\([^()]+\)|\w+))+ = ")
_BARE_TUPLE = re.compile(r"(return|del) ([^()\[\]{}]+,[^()\[\]{}]+)")
_COMMENT = re.compile(r" *# ")
_JOINED = "\0"  # stands for a space at which a line is not broken
_OF_KERNEL = re.compile(r"\w+_(?:ptr|desc)|\w+: tl\.constexpr")  # parameters of a kernel, of which there are many


@dataclass(frozen=True, slots=True)
class _Bracket:
    """An outermost bracket of a statement: positions of its start, its end and the commas directly inside."""

    start: int
    end: int
    commas: tuple[int, ...]

    def items(self, line: str) -> list[str]:
        """The items between its commas, without the empty one after a trailing comma."""
        bounds = [self.start, *self.commas, self.end]
        parts = [line[left + 1 : right].strip() for left, right in pairwise(bounds)]
        return parts[:-1] if not parts[-1] else parts


def wrap(text: str) -> str:
    """`text`, whole lines of Python, with each line longer than WIDTH broken.

    A statement is broken at a bracket, and unchanged without one; lines of docstrings and comments on their own lines
    are filled.
    """
    lines: list[str] = []
    in_docstring = False
    for line in text.split("\n"):
        quotes = (line if in_docstring else _LITERAL.sub("", line)).count('"""')
        prose = in_docstring or quotes or _COMMENT.match(line) is not None
        lines += [line] if len(line) <= WIDTH else _filled(line) if prose else wrap_statement(line)
        in_docstring ^= quotes % 2 == 1
    return "\n".join(lines)


def _filled(line: str) -> list[str]:
    """A line of prose, filled at its indentation."""
    margin = line[: len(line) - len(line.lstrip())]
    mark = "# " if _COMMENT.match(line) else ""
    width = WIDTH - len(margin) - len(mark)
    filled = textwrap.wrap(line.strip().removeprefix(mark), width, break_long_words=False, break_on_hyphens=False)
    return [margin + mark + part for part in filled]


def wrap_statement(line: str) -> list[str]:
    """A statement, or an item of a bracket, broken over lines if it is too long."""
    if len(line) <= WIDTH:
        return [line]
    groups = _groups(line)
    if groups is None:
        return [line]
    text = line.lstrip()
    margin = line[: len(line) - len(text)]
    defines = text.startswith(("def ", "async def ", "class "))
    some = [group for group in groups if group.items(line)]
    if text.startswith("return ") and (items := _returned(line, groups)):
        opened = [part for item in items for part in wrap_statement(f"{margin}    {item},")]
        return [f"{margin}return (", *opened, f"{margin})"]
    if defines:
        return _opened(line, some[0], margin, defines=True) if some else [line]
    if some and some[-1].start >= WIDTH and (tuples := _GROUPS.match(text)) is not None:
        return _in_lines(tuples[0].removesuffix(" = "), text[tuples.end() :], margin)
    for group in reversed(some):
        if group.start < WIDTH:
            return _opened(line, group, margin, defines=False)
    if (target := _TARGET.match(text)) is not None:
        inner = wrap_statement(f"{margin}    {text[target.end() :]}")
        if max(map(len, inner)) <= WIDTH:
            return [f"{margin}{target[0]}(", *inner, f"{margin})"]
        return _opened(line, some[-1], margin, defines=False) if some else [line]  # brackets around it do not help
    if (targets := _TARGETS.match(text)) is not None:
        value = f"{margin}    {text[targets.end() :]}"
        if len(margin) + targets.end() + 1 <= WIDTH and len(value) <= WIDTH:
            return [f"{margin}{targets[0]}(", value, f"{margin})"]
        first, *rest = wrap_statement(f"{margin}_ = {text[targets.end() :]}")
        opened = _one_a_line(targets[0].removesuffix(" = "), margin)
        return [f"{margin}(", *opened, first.replace("_", ")", 1), *rest]
    if (names := _BARE_TUPLE.fullmatch(text)) is not None:
        return [f"{margin}{names[1]} (", *_one_a_line(names[2], margin), f"{margin})"]
    return _opened(line, some[-1], margin, defines=False) if some else [line]


def _in_lines(targets: str, value: str, margin: str) -> list[str]:
    """An assignment to tuples, each on a line of its own."""
    items = _items(targets, 0, _groups(targets) or [])
    lines = [line for item in items for line in wrap_statement(f"{margin}    {item},")]
    return [f"{margin}(", *lines, f"{margin}) = {value}"]


def _one_a_line(names: str, margin: str) -> list[str]:
    return [f"{margin}    {name.strip()}," for name in names.split(",") if name.strip()]


def _opened(line: str, group: _Bracket, margin: str, *, defines: bool) -> list[str]:
    """The statement broken at one bracket: arguments that fit on a line share it, other items get a line each."""
    before, after = line[: group.start + 1], line[group.end :]
    items = group.items(line)
    inner = margin + "    "
    together = inner + ", ".join(items)
    head = before[:-1]
    called = before.endswith("(") and _CALLED.search(head) is not None and _KEYWORD.search(head) is None
    alone = defines and len(items) == 1  # a function's only parameter gets a comma
    trailing = len(group.commas) == len(items)
    closed = _closed(margin + after) if defines else wrap_statement(margin + after)
    if called and len(together) <= WIDTH and not alone and not trailing:
        return [before, together, *closed]
    if called and after in (")", "):") and any(map(_OF_KERNEL.fullmatch, items)):
        whole = ", ".join(item.replace(" ", _JOINED) for item in items) + ","
        filled = textwrap.wrap(whole, WIDTH, initial_indent=inner, subsequent_indent=inner)
        return [before, *(part.replace(_JOINED, " ") for part in filled), f"{margin}{after}  # fmt: skip"]
    bare = len(items) == 1 and not trailing and (not called or re.search(r"\bfor\b", items[0]) is not None)
    lines = [before]
    for item in items:
        whole = item + ("" if bare else ",")
        for part in [whole] if len(inner + whole) <= WIDTH else _alternatives(whole):
            lines += wrap_statement(inner + part)
    return [*lines, *closed]


def _alternatives(item: str) -> list[str]:
    """`a or b` as `a` and `or b`, each for a line of its own; anything else as it is."""
    first, word, second = item.partition(" or ")
    return [first, f"or {second}"] if word and _groups(first) is not None else [item]


def _closed(line: str) -> list[str]:
    """What follows a function's parameters: `) -> tuple[...]:`, its type broken if it is too long."""
    first, *rest = wrap_statement(line.replace(")", "_", 1))
    return [first.replace("_", ")", 1), *rest]


def _returned(line: str, groups: list[_Bracket]) -> list[str]:
    """The items of a tuple that is returned without brackets; [] for a single value."""
    items = _items(line, line.index("return ") + len("return "), groups)
    return items if len(items) > 1 else []


def _items(line: str, start: int, groups: list[_Bracket]) -> list[str]:
    """The items of a tuple without brackets that ends a line."""
    inside = [range(group.start, group.end) for group in groups]
    commas = [
        token.start()
        for token in _TOKEN.finditer(line, start)
        if token[0] == "," and not any(token.start() in part for part in inside)
    ]
    bounds = [start - 1, *commas, len(line)]
    return [line[left + 1 : right].strip() for left, right in pairwise(bounds)]


def _groups(line: str) -> list[_Bracket] | None:
    """The outermost brackets of a line, in order; None if it ends in a comment or inside a bracket."""
    found: list[_Bracket] = []
    depth, start = 0, 0
    commas: list[int] = []
    for token in _TOKEN.finditer(line):
        match token[0]:
            case "#":
                return None
            case "(" | "[" | "{":
                if depth == 0:
                    start, commas = token.start(), []
                depth += 1
            case ")" | "]" | "}":
                depth -= 1
                if depth < 0:
                    return None
                if depth == 0:
                    found.append(_Bracket(start, token.start(), tuple(commas)))
            case "," if depth == 1:
                commas.append(token.start())
    return found if depth == 0 else None

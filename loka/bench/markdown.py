"""Markdown of reports: names of a model and texts of files stand in it as text, whatever characters they have."""

from __future__ import annotations

import re

from loka.policy.problems import printable

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # columns and rows

# An underscore inside of a word means nothing, nor do brackets without a link's parenthesis after them.
_MEANS = re.compile(r"[\\`*<&|~$]|\](?=\()|(?<![^\W_])_|_(?![^\W_])")
_RUNS = re.compile("`+")


def escaped(text: str) -> str:
    """The text on one line, without anything that Markdown or HTML would take for its own."""
    return _MEANS.sub(r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """The text as code, on one line; for use outside of tables, where a bar would end the cell."""
    line = printable(text)
    fence = "`" * (1 + max(map(len, _RUNS.findall(line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def markdown_table(table: Table) -> str:
    """A table, with its cells escaped."""
    columns, rows = table
    cells = [tuple(map(escaped, line)) for line in (columns, *rows)]
    lines = [cells[0], tuple("---" for _ in columns), *cells[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

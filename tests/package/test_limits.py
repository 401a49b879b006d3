"""docs/limits.md: the words of each refusal are in the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support import markdown

PAGE = markdown.read(markdown.REPOSITORY / "docs" / "limits.md")
ROWS = [row for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE) if row != "the words | what to do"]
NO_TEXT = ("recurrent layers and cells", "torch's own explanation")  # kinds whose rows quote names of torch


@cache
def texts() -> tuple[str, ...]:
    """Every text in the package, with `...` for what it is formatted with; docstrings are none."""
    found = []
    for path in (markdown.REPOSITORY / "loka").rglob("*.py"):
        tree = ast.parse(markdown.read(path))
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | said:
                found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("row", ROWS)
def test_the_words_of_a_refusal_are_in_the_source(row: str) -> None:
    words, _, advice = row.partition(" | ")
    assert advice
    if words.startswith(NO_TEXT):
        return
    quoted = re.findall(r"`([^`]+)`", words)
    assert quoted
    for each in quoted:
        pattern = ".*".join(re.escape(part) for part in each.split("..."))
        assert any(re.search(pattern, text) for text in texts()), each


def test_the_page_has_a_table_for_each_step() -> None:
    assert PAGE.count("| the words | what to do |") == PAGE.count("\n## ") == 8
    assert len(ROWS) > 40

"""Names in Markdown are shown as they are: rendered, and read back from the HTML."""

from __future__ import annotations

import html
import re

import pytest

from loka.bench.markdown import code, escaped, markdown_table

markdown_it = pytest.importorskip("markdown_it", reason="it comes with rich")

NAMES = [
    "layers.0.up",
    "layers.*.up.*",
    "a|b",
    "a`b",
    "``",
    "<script>alert(1)</script>",
    "<img src=x onerror=y>",
    "&lt;b&gt; &amp;",
    "[text](javascript:x)",
    "![text](http://there)",
    "[x]: http://there",
    "[ ] done",
    "MERE 0.3 [0.29, 0.31]",
    "[a][b]",
    "_up_",
    "up_proj.2_x_",
    "__init__",
    "a\\|b",
    "a\\",
    "~~gone~~",
    "$x$",
    "# head",
    "- item",
    "1. item",
    "2) item",
    "> quote",
    "+ item",
    "=",
    "a#0",
    "é|ü",
    "1.33",
]
CONTROLS = ["a\nb", "a\r\n\n# b", "a\u2028b", "a\x1b[31mb", "a\u202eb", "\t"]


def rendered(text: str) -> str:
    """Markdown as GitHub renders it: CommonMark with tables and struck-out text."""
    return str(markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def text_in(made: str, *tags: str) -> list[str]:
    """The contents of elements, in which no other element is."""
    found = re.findall(rf"<({'|'.join(tags)})>(.*?)</\1>", made, re.DOTALL)
    assert not any("<" in inner for _, inner in found)
    return [html.unescape(inner) for _, inner in found]


@pytest.mark.parametrize("name", NAMES + CONTROLS)
def test_names_are_shown_as_they_are_in_tables_and_text(name: str) -> None:
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    table = rendered(markdown_table(((name, "us"), [(name, "1"), ("x", name)])))
    assert [each.strip() for each in text_in(table, "th", "td")] == [shown, "us", shown, "1", "x", shown]
    assert text_in(rendered(f"Model {escaped(name)}."), "p") == [f"Model {shown}."]


@pytest.mark.parametrize("name", NAMES + CONTROLS)
def test_code_is_shown_as_it_is(name: str) -> None:
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    made = rendered(f"Policy {code(name)}, here")
    assert text_in(made.replace("<p>", "").replace("</p>", ""), "code") == [shown]
    assert made.endswith(", here</p>\n")

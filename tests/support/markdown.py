"""Markdown as tests read it: the code blocks of a page, and its prose without them."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [page for folder in ("", "docs", "examples") for page in (REPOSITORY / folder).glob("*.md")],
    key=lambda page: page.relative_to(REPOSITORY),
)
GUIDE = REPOSITORY / "docs" / "guide.md"


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A page without its code: fenced, indented by four or more after an empty line, and in a sentence."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?<=\n\n)(?: {4,}[^\n]*\n)+", "", text)
    return re.sub(r"`[^`]*`", "", text)


def prose_lines(text: str) -> list[tuple[int, str]]:
    """The lines that a writer can break, with their numbers from 1: no code, no table, no heading of a log's entry."""
    found = []
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")):
            found.append((number, line))
    return found


def json_keys(verb: str) -> list[str]:
    """The keys of a verb's `--json` in the table of docs/cli.md, up to the first remark."""
    (row,) = re.findall(rf"^\| `{verb}` \| (.*) \|$", read(REPOSITORY / "docs" / "cli.md"), re.MULTILINE)
    return re.findall(r"`(\w+)`", row.partition(";")[0])


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def paths(text: str) -> list[str]:
    """The paths in code spans that start at a folder or file of the repository, without those that are a pattern."""
    found = re.findall(r"`([\w.\-]+(?:/[\w.\-]+)*/?)`", text)
    top = {path.name for path in REPOSITORY.iterdir()}
    return [path for path in found if path.split("/")[0] in top and "NAME" not in path]

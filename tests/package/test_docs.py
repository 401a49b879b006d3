"""The pages for readers: lines that fit, links that lead somewhere, and guides whose every step works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from loka.numerics.enums import Format, Scaling
from loka.numerics.metrics import mere
from loka.numerics.quantize import dequantize, quantize
from tests.support import guide_pages, markdown

WIDTH = 100  # columns
GLOSSARY = " ".join(markdown.read(markdown.REPOSITORY / "docs" / "glossary.md").split())
LOG = markdown.REPOSITORY / "docs" / "results" / "LOG.md"


def _name(page: Path) -> str:
    return page.relative_to(markdown.REPOSITORY).as_posix()


@pytest.mark.parametrize("page", [*markdown.PAGES, LOG], ids=_name)
def test_lines_fit_where_they_can_be_broken(page: Path) -> None:
    long = [
        f"{_name(page)}:{number}"
        for number, line in markdown.prose_lines(markdown.read(page))
        if len(line) > WIDTH and " " in line.strip() and not (page == LOG and line.startswith("#"))
    ]
    assert long == []


@pytest.mark.parametrize("page", markdown.PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", markdown.prose(markdown.read(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{_name(page)}: {target}"
        if anchor:
            assert anchor in markdown.anchors(markdown.read(linked)), f"{_name(page)}: {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = markdown.prose(markdown.read(markdown.REPOSITORY / "README.md"))
    linked = re.findall(r"\]\(([^)#\s]+)", readme)
    missing = [_name(page) for page in markdown.PAGES if _name(page) not in (*linked, "README.md")]
    assert missing == []
    assert readme.index("docs/guide.md") == min(readme.index(f"docs/{page}") for page in ("guide.md", "policy.md"))


def test_every_page_of_docs_is_in_the_navigation_of_the_site() -> None:
    """And those beside docs/ that docs/site_pages.py adds."""
    site = yaml.safe_load(markdown.read(markdown.REPOSITORY / "mkdocs.yml"))

    def listed(entries: list[object]) -> Iterator[str]:
        for entry in entries:
            for under in entry.values() if isinstance(entry, dict) else (entry,):
                yield from listed(under) if isinstance(under, list) else (str(under),)

    docs = markdown.REPOSITORY / "docs"
    pages = [page.relative_to(docs).as_posix() for page in docs.rglob("*.md")]
    beside = ("index.md", "examples.md", "contributing.md", "security.md", "changelog.md")
    assert sorted(listed(site["nav"])) == sorted([*pages, *beside])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors are checked as mkdocs makes them."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'loka[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=markdown.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="examples/"' in home
    assert 'src="chart.svg"' in home


# Pages that go on from the guide, in its folder, with the scripts that they make.
FOLLOWED = {"guide": ("two_lines.py", "train.py", "guarded.py"), "serving": ("serve.py", "refresh.py", "export.py")}


@pytest.mark.slow
def test_the_guides_work_step_by_step(tmp_path: Path) -> None:
    """Their files, commands and scripts, at small sizes."""
    made = {}
    with guide_pages.reading_in(tmp_path):
        for page, scripts in FOLLOWED.items():
            found = guide_pages.follow(markdown.read(markdown.REPOSITORY / "docs" / f"{page}.md"), tmp_path)
            assert tuple(found) == scripts
            made |= found
        assert (tmp_path / "policies" / "profiles" / "tower.safetensors").is_file()
        assert (tmp_path / "tower.html").is_file()
        assert all(names["patch"].sites == ("0", "3") for names in made.values())
        assert made["guarded.py"]["guard"].report.step == 9
        assert made["guarded.py"]["guard"].events == ()


def test_every_block_and_command_of_the_guides_is_followed() -> None:
    """A code block without a file, or a command that the test does not know, would be shown and never run."""
    for name in FOLLOWED:
        page = markdown.read(markdown.REPOSITORY / "docs" / f"{name}.md")
        shown = re.findall(r"^```(?!$).*\n", page, re.MULTILINE) + re.findall(
            r"(?<=\n\n)    (?! )\S.*$", page, re.MULTILINE
        )
        assert len(shown) == len(guide_pages.steps(page)) + page.count("\n    pip install .\n")


@pytest.mark.parametrize("name", ["cli", "frameworks", "glossary", "results", "troubleshooting"])
def test_pages_that_nobody_follows_have_no_scripts(name: str) -> None:
    page = markdown.read(markdown.REPOSITORY / "docs" / f"{name}.md")
    assert guide_pages.steps(page) == []
    assert not re.search(r"^```(python|yaml|bash)", page, re.MULTILINE)


def test_the_figures_of_the_glossary() -> None:
    """MERE on normal matrices, by recipe, as the reason for its budget has it."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 1024, generator=random) for _ in range(2))
    exact = a.double() @ b.double().t()

    def error(formats: tuple[Format, Format], power_of_two: bool = False) -> float:
        rows = [
            dequantize(quantize(x, format=each, scaling=Scaling.ROWWISE, power_of_two=power_of_two)).double()
            for x, each in zip((a, b), formats, strict=True)
        ]
        return mere(rows[0] @ rows[1].t(), exact).value

    e4m3, e5m2 = Format.E4M3, Format.E5M2
    found = [error((e4m3, e4m3)), error((e4m3, e4m3), True), error((e5m2, e4m3)), error((e5m2, e5m2))]
    said = re.search(r"has a MERE of ([\d.]+) \(([\d.]+) .*?operand ([\d.]+), for both ([\d.]+)\b", GLOSSARY, re.DOTALL)
    assert said is not None
    assert [float(figure) for figure in said.groups()] == pytest.approx(found, abs=0.002)

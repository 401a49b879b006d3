"""The pages for readers: lines that fit, links that lead somewhere, and a guide whose every step works."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka.cli import main
from loka.dispatch import LokaWarning
from tests.support import markdown

WIDTH = 100  # columns
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
    more = readme.partition("## More")[2]
    assert more.index("docs/guide.md") == min(more.index(f"docs/{page}") for page in ("guide.md", "policy.md"))


# The guide's sizes are those of a real layer; these take seconds.
SMALL = {"16384": "64", "2048": "64", "1024": "32", "batch_size: 256": "batch_size: 32", "batches(256": "batches(32"}


def _small(text: str) -> str:
    for size, small in SMALL.items():
        text = text.replace(size, small)
    return text


@pytest.mark.slow
def test_the_guide_works_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, commands and scripts, at small sizes, where FP8 has to be forced to be used at all."""
    guide = markdown.read(markdown.GUIDE)
    model, train, serve, guarded = markdown.blocks(guide, "python")
    (policy,) = markdown.blocks(guide, "yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("generated"), "__path__", [str(tmp_path / "generated")])
    (tmp_path / "tower.py").write_text(_small(model), encoding="utf-8")
    path = tmp_path / "policies" / "tower.yaml"
    path.parent.mkdir()
    path.write_text(_small(policy).replace("compute: auto", "compute: fp8", 1) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for verb in re.findall(r"^    loka (.+)$", guide, re.MULTILINE):
            done = CliRunner().invoke(main.app, verb.split())
            assert done.exit_code == 0, done.output
            if verb.startswith("probe"):
                assert (path.parent / "profiles" / "tower.safetensors").is_file()
        assert CliRunner().invoke(main.app, ["generate", "--check", "policies/tower.yaml"]).exit_code == 0
        for script in (train, serve, guarded.replace("every=1000", "every=5")):
            names: dict[str, object] = {}
            with pytest.warns(LokaWarning, match="reference path"):
                exec(_small(script), names)  # noqa: S102 - the guide's own lines
            assert names["patch"].sites == ("0", "3")  # type: ignore[attr-defined]
        assert names["guard"].report.step == 9  # type: ignore[attr-defined]
        assert names["guard"].events == ()  # type: ignore[attr-defined]
    finally:
        for name in ("tower", *(name for name in sys.modules if name.startswith("generated.tower"))):
            sys.modules.pop(name, None)

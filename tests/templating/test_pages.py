"""Pages are escaped whatever is put in, and belong to no package of generated code."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from loka.templating import templates
from loka.templating.templates import PAGES, load_templates, render_page


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Renders a template with a value."""
    folder = tmp_path / PAGES
    folder.mkdir()
    monkeypatch.setattr(templates, "templates_folder", lambda: tmp_path)

    def render(text: str, value: object) -> str:
        (folder / "page.html.j2").write_text(text, encoding="utf-8")

        def shown(text: str) -> str:  # one of its own for each page, as environments are kept by it
            return text.replace("\n", "\\n")

        return render_page("page.html.j2", {"value": value}, shown)

    return render


def test_values_are_shown_and_escaped_in_text_and_attributes(page) -> None:
    assert page('<p title="{{ value }}">{{ value }}</p>', '"<b>\n&') == (
        '<p title="&#34;&lt;b&gt;\\n&amp;">&#34;&lt;b&gt;\\n&amp;</p>'
    )


def test_what_a_macro_makes_is_escaped_once(page) -> None:
    assert page("{% macro bold(x) %}<b>{{ x }}</b>\n{% endmacro %}{{ bold(value) }}", "<&>") == "<b>&lt;&amp;&gt;</b>\n"


def test_an_unknown_name_is_an_error(page) -> None:
    with pytest.raises(jinja2.UndefinedError):
        page("{{ valeu }}", 1)


def test_pages_are_no_templates_of_code() -> None:
    """Otherwise a new colour would make every generated package stale."""
    names = [name for name, _ in load_templates().texts]
    assert names
    assert not any(name.startswith(PAGES) for name in names)

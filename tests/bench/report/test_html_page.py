"""The page as HTML: whole, alone, readable and safe, whatever modules are called."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from loka.bench.report.loss_curves import KeptRuns
from loka.bench.report.model_tree import Precision
from loka.bench.report.page import Report, gather, is_html_report, to_html
from loka.plan.planner import Planned
from tests.support.plan.report_plans import plan_of_sites, site_plan

VOID = {"meta", "line", "circle", "rect", "path", "use", "br"}  # and shapes of SVG that end themselves
SECTIONS = ["model", "times", "errors", "quality", "distributions", "mods", "findings", "decisions", "sources"]
COLOURS = ("page", "surface")
TEXTS = ("ink", "ink-soft", "link", "good", "bad")
SHAPES = (*(each.value for each in Precision), "plot", "line-strong", "bad")


class Page(HTMLParser):
    """The elements of a page, checked for balance while they are read."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]


@pytest.fixture(scope="module", params=["hostile", "bare"])
def text(request: pytest.FixtureRequest) -> str:
    return to_html(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def hostile_text(hostile: Report) -> str:
    return to_html(hostile)


@pytest.fixture(scope="module")
def hostile_page(hostile_text: str) -> Page:
    return Page(hostile_text)


@pytest.mark.parametrize("name", ["plain", "bare"])
def test_a_page_as_a_whole(name: str, request: pytest.FixtureRequest) -> None:
    """All but the style. After a change that is meant: LOKA_GOLDEN=write, and read the diff."""
    path = Path(__file__).with_name("golden") / f"{name}.html"
    page = re.sub(r"<style>.*</style>", "", to_html(request.getfixturevalue(name)), flags=re.DOTALL)
    text = "".join(f"{line.strip()}\n" for line in page.splitlines() if line.strip())
    if os.environ.get("LOKA_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_tags_are_balanced_and_names_unique(page: Page) -> None:
    assert page.open == []
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    targets = {attributes["href"] for tag, attributes in page.elements if tag in ("a", "use")}
    assert {target for target in targets if target is None or target[1:] not in ids} == set()


def test_nothing_is_loaded_and_nothing_runs(text: str, page: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in page.elements
    }
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), (tag, attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall(r"(?:https?:)?//\w", re.sub(r"\s//\s", " ", text)) == []
    (policy,) = (each for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_hostile_names_are_text(hostile_text: str, hostile_page: Page) -> None:
    assert "<script" not in hostile_text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hostile_text
    assert {character for character in hostile_text if not character.isprintable()} == {"\n"}
    assert "a\\nb\\x1b[31m\\u202ertl\\u2028" in hostile_text
    assert "{{ 7*7 }}{% raw %}" in "".join(hostile_page.texts)


def test_headings_are_in_order_and_sections_have_names(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert [each["id"] for each in page.all("section")] == SECTIONS
    assert all(each["aria-labelledby"] for each in page.all("section"))
    assert [len(page.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert page.all("html") == [{"lang": "en"}]
    links = [each["href"] for each in page.all("a")]
    assert links == ["#main", *(f"#{name}" for name in SECTIONS)]


def test_every_chart_has_words_or_is_hidden(page: Page) -> None:
    for attributes in page.all("svg"):
        hidden = attributes.get("aria-hidden") == "true" and attributes.get("focusable") == "false"
        named = attributes.get("role") == "img" and attributes.get("aria-label")
        assert bool(hidden) != bool(named), attributes


def test_tables_scroll_by_keyboard(hostile_page: Page) -> None:
    scrolled = [each for each in hostile_page.all("div") if each.get("class") == "scroll"]
    assert len(scrolled) == len(hostile_page.all("table")) > 3
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in scrolled)


def test_columns_of_a_histogram_share_the_width_and_stand_on_the_bottom(hostile: Report) -> None:
    assert hostile.distributions is not None
    site, *others = hostile.distributions.sites
    chart = replace(site.operands["input"], heights=(0.5, 0.0, 1.0, 0.001))
    site = replace(site, operands={"input": chart})
    text = to_html(replace(hostile, distributions=replace(hostile.distributions, sites=(site,))))
    small = re.search(r'<svg class="histogram small".*?</svg>', text, re.DOTALL)
    assert small is not None
    assert re.findall(r'<rect x="(.*?)%" y="(.*?)%" width="(.*?)%" height="(.*?)%"/>', small[0]) == [
        ("1.88", "50.0", "21.25", "50.0"),
        ("51.88", "0.0", "21.25", "100.0"),
        ("76.88", "96.0", "21.25", "4.0"),
    ]
    assert others


def test_a_bar_of_the_tree_is_as_long_as_the_share_with_fp8_first() -> None:
    sites = (site_plan("a.x", fp8=False, share=0.25, region=("linear", "relu")), site_plan("a.y", share=0.75))
    text = to_html(gather(Planned(plan_of_sites(*sites), None), "shop.yaml", KeptRuns((), ())))
    bar = re.search(r'<svg class="mini".*?</svg>', text, re.DOTALL)
    assert bar is not None
    assert re.findall(r'<rect class="fill (\w+)" x="(.*?)%" width="(.*?)%"', bar[0]) == [
        ("e4m3", "0.0", "75.0"),
        ("fused", "75.0", "25.0"),
    ]


def test_a_page_is_the_same_for_the_same_report_and_known_by_its_head(bare: Report) -> None:
    text = to_html(bare)
    assert text == to_html(bare)
    assert is_html_report(text.encode())
    assert not is_html_report(b"<!doctype html><title>mine</title>")


def colours(text: str) -> list[dict[str, str]]:
    """The colours of the light and of the dark scheme."""
    blocks = re.findall(r":root \{([^}]*)\}", text)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrasts_are_those_of_wcag_aa_in_both_schemes(bare: Report) -> None:
    light, dark = colours(to_html(bare))
    assert set(light) == set(dark)
    for scheme in (light, dark):
        for below in COLOURS:
            for name in TEXTS:
                assert contrast(scheme[name], scheme[below]) >= 4.5, (name, below, scheme)
            for name in SHAPES:
                assert contrast(scheme[name], scheme[below]) >= 3, (name, below, scheme)
        for name in (*(each.value for each in Precision), "ink"):
            assert contrast(scheme[name], scheme["over"]) >= 3, (name, scheme)
        assert contrast(scheme["ink"], scheme["track"]) >= 4.5
        assert contrast(scheme["ink-soft"], scheme["track"]) >= 4.5

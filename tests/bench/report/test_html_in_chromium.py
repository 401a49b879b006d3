"""The page in a browser: as wide as its window, in both schemes, by keyboard, without a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loka.bench.report.page import Report, to_html
from tests.support.chromium import CHROMIUM, SKIPPED, Browser, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=SKIPPED)]

WIDTHS = (390, 800, 1100, 1600)
BEYOND = """
[...document.querySelectorAll("body *")].filter(each => {
  const box = each.getBoundingClientRect();
  return box.width > 0 && box.right > innerWidth + 1 && !each.closest(".scroll") && !each.closest(".hidden")
    && !(each instanceof SVGElement && each.ownerSVGElement);
}).map(each => `${each.tagName} ${each.className.baseVal ?? each.className}: ${each.textContent.trim().slice(0, 60)}`)
"""
OVERLAPPING = """
[...document.querySelectorAll("summary, .bars > li, .dots li, .headline, .sources > div")].filter(row => {
  const boxes = [...row.children].map(each => each.getBoundingClientRect()).filter(box => box.width && box.height);
  return boxes.some((a, i) => boxes.slice(i + 1).some(b =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1));
}).map(row => row.textContent.trim().slice(0, 80))
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module", params=["hostile", "bare"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    report: Report = request.getfixturevalue(request.param)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_no_wider_than_its_window(width: int, page: Path, opened: Browser) -> None:
    opened.open(page, width)
    for state in ("as it is", "opened"):
        assert opened.value("document.documentElement.scrollWidth") == width, state
        assert opened.value(BEYOND) == [], state
        assert opened.value(OVERLAPPING) == [], state
        opened.value("for (const each of document.querySelectorAll('details')) each.open = true")


def test_both_schemes_have_their_colours(page: Path, opened: Browser) -> None:
    found = []
    for dark in (False, True):
        opened.open(page, dark=dark)
        found.append(opened.value("getComputedStyle(document.body).backgroundColor"))
    assert found == ["rgb(246, 245, 241)", "rgb(19, 21, 25)"]


def test_nothing_is_requested_and_nothing_complains(page: Path, opened: Browser) -> None:
    opened.requests.clear()
    opened.open(page)
    assert opened.requests == [page.resolve().as_uri()]
    assert opened.problems == []


def test_everything_is_reached_and_opened_by_keyboard(page: Path, opened: Browser) -> None:
    opened.open(page)
    opened.press("Tab")
    assert opened.value("document.activeElement.textContent") == "Skip to the content"
    assert opened.value("document.activeElement.getBoundingClientRect().top") >= 0
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.press("Enter")
    assert opened.value("location.hash") == "#main"
    opened.press("Tab")
    assert opened.value("document.activeElement.tagName") == "SUMMARY"
    before = opened.value("document.activeElement.parentElement.open")
    opened.press("Enter")
    assert opened.value("document.activeElement.parentElement.open") is not before
    assert opened.value("getComputedStyle(document.activeElement).outlineWidth") == "3px"

"""Writes docs/chart.svg from the figures in docs/chart.json: `make docs-chart`. A test compares the two.

The picture brings its own background, and has other colours where the reader's system is dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from loka.probe.estimate import t_quantile

FIGURES = Path(__file__).with_name("chart.json")
PICTURE = Path(__file__).with_name("chart.svg")

WIDTH, HEIGHT = 960, 480
TOP, ROW, BAR = 76, 40, 13  # pixels: the first row, a row, a bar
SPEED_LEFT, SPEED_SCALE = 190, 155  # where a speed of 0 is, and pixels for 1.00x
NE_LEFT, NE_MIDDLE, NE_SCALE = 560, 800, 4000  # labels, a change of 0, pixels for 1 %
_COLOURS = {
    "torchao tensorwise": "torchao", "torchao rowwise": "torchao", "LoKA without FP8": "fused", "LoKA FP8": "loka"
}  # fmt: skip
STYLE = """\
  svg { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .page { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; } .title { font-weight: 600; }
  .axis { stroke: #59636e; } .budget { stroke: #cf222e; stroke-dasharray: 4 3; }
  .torchao { fill: #9a6700; } .fused { fill: #1a7f37; }
  .loka { fill: #0969da; } .interval { stroke: #0969da; stroke-width: 2; }
  .graph { fill-opacity: 0.55; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } text { fill: #e6edf3; } .quiet { fill: #9198a1; }
    .axis { stroke: #9198a1; } .budget { stroke: #f85149; }
    .torchao { fill: #d29922; } .fused { fill: #3fb950; } .loka { fill: #4493f8; } .interval { stroke: #4493f8; }
  }"""


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _speed(figures: dict[str, Any]) -> Iterator[str]:
    """Two bars for each variant of each model, one for each launch; BF16 is the line at 1.00x."""
    yield _text(16, 28, figures["title"], "title")
    y = TOP
    one = SPEED_LEFT + SPEED_SCALE
    for entry in figures["models"]:
        yield _text(16, y + 4, entry["model"], "quiet")
        y += 12
        for variant, speeds in entry["variants"].items():
            yield _text(SPEED_LEFT - 10, y + BAR + 5, variant, anchor="end")
            colour = _COLOURS[variant]
            for number, speed in enumerate(speeds):
                top = y + number * (BAR + 1)
                shade = f"{colour} graph" if number else colour
                yield (
                    f'<rect class="{shade}" x="{SPEED_LEFT}" y="{top}" width="{speed * SPEED_SCALE:g}" height="{BAR}"/>'
                )
                yield _text(max(SPEED_LEFT + speed * SPEED_SCALE, one) + 5, top + 11, f"{speed:.2f}x", "quiet")
            y += ROW - 6
        y += 12
    yield _line(one, TOP - 14, one, y - 12, "axis")
    yield _text(one, TOP - 20, "BF16 = 1.00x", "quiet", "middle")
    full, light = figures["launches"]
    yield _text(16, y + 10, f"Full colour: {full}. Pale: {light}.", "quiet")


def _quality(figures: dict[str, Any]) -> Iterator[str]:
    """A point and its 95 % interval for each policy, between no change and the budget."""
    yield _text(NE_LEFT, 28, figures["title"], "title")
    y = TOP + 12
    bottom = y + len(figures["policies"]) * ROW
    for kind, change, words in (("axis", 0.0, "0"), ("budget", figures["budget"], f"budget {figures['budget']:g} %")):
        x = NE_MIDDLE + change * NE_SCALE
        yield _line(x, TOP - 14, x, bottom, kind)
        yield _text(x, TOP - 20, words, "quiet", "middle")
    for entry in figures["policies"]:
        half = t_quantile(0.975, entry["pairs"] - 1) * entry["error"]
        left, middle, right = (NE_MIDDLE + (entry["change"] + by) * NE_SCALE for by in (-half, 0, half))
        yield _text(NE_LEFT, y + 5, entry["policy"])
        yield _text(NE_LEFT, y + 20, f"{entry['change']:+.4f} %, {entry['pairs']} pairs", "quiet")
        yield _line(left, y, right, y, "interval")
        yield f'<circle class="loka" cx="{middle:g}" cy="{y}" r="4.5"/>'
        y += ROW


def picture(figures: dict[str, Any]) -> str:
    """The chart as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img">',
        "<style>",
        STYLE,
        "</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        *_speed(figures["speed"]),
        *_quality(figures["quality"]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")

"""The page of `loka report` as HTML: one file, without a script and without anything from elsewhere."""

from __future__ import annotations

from loka.bench.report.gather import Report
from loka.bench.report.geometry import label
from loka.bench.report.precision import LABELS
from loka.plan.format import format_figure, format_share, format_speedup
from loka.policy.problems import printable
from loka.templating.templates import render_page

_HEAD = 1024  # bytes that the generator stands within
GENERATOR = "LoKA report"  # in the head of every page, by which it is known


def to_html(report: Report) -> str:
    """The page of a report. Deterministic for its argument."""
    values = {
        "report": report,
        "generator": GENERATOR,
        "precision_labels": LABELS,
        "figure": format_figure,
        "share": format_share,
        "speedup": format_speedup,
        "tick": label,
    }
    return render_page("page.html.j2", values, printable)


def is_html_report(head: bytes) -> bool:
    """True for the start of a page that `to_html` made."""
    return f'<meta name="generator" content="{GENERATOR}">'.encode() in head[:_HEAD]

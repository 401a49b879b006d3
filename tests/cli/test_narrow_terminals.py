"""In a narrow terminal no name is broken, no line is longer than the terminal, and nothing of a table is lost."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from loka.cli import output
from loka.cli.table_layout import table_lines, wrapped
from loka.cli.tables import plan_table
from tests.support.plan.report_plans import plan_of_sites, site_plan

ROOM = 60
COLUMNS = ("GEMM", "kernel", "us", "reason")
ROWS = [
    ("fprop", "torch.scaled_mm", "12.9", "chosen, as every other one of them is slower in these shapes"),
    ("wgrad", "as-is", "1040.0", ""),
]


def words(text: str) -> set[str]:
    """The words of an output, without rules and the colon that a paragraph has after a column's name."""
    return {word.rstrip(":") for word in text.split() if not word.startswith("─")} - {""}


def test_a_table_that_fits_is_one() -> None:
    assert table_lines(COLUMNS, ROWS, ("us",), False, 100) == [
        "GEMM    kernel                us   reason",
        "─" * 95,
        "fprop   torch.scaled_mm     12.9   chosen, as every other one of them is slower in these shapes",
        "wgrad   as-is             1040.0",
    ]


def test_text_is_wrapped_between_words_while_twenty_columns_are_left_for_it() -> None:
    lines = table_lines(COLUMNS, ROWS, ("us",), False, 60)
    assert lines[2:] == [
        "fprop   torch.scaled_mm     12.9   chosen, as every other",
        "                                   one of them is slower in",
        "                                   these shapes",
        "wgrad   as-is             1040.0",
    ]


def test_where_less_is_left_a_row_is_a_paragraph_without_its_empty_cells() -> None:
    assert table_lines(COLUMNS, ROWS, ("us",), False, 45) == [
        "GEMM: fprop   kernel: torch.scaled_mm",
        "    us: 12.9",
        "    reason: chosen, as every other one of",
        "        them is slower in these shapes",
        "GEMM: wgrad   kernel: as-is   us: 1040.0",
    ]


def test_without_rows_there_is_nothing_to_wrap() -> None:
    assert table_lines(COLUMNS, [], ("us",), False, 60) == ["GEMM   kernel   us   reason", "─" * 27]
    assert table_lines(COLUMNS, [], ("us",), False, 10) == []


def test_a_name_that_is_wider_than_the_terminal_is_not_broken() -> None:
    name = "towers.user.interaction.cross_layers.0.down_projection"
    lines = table_lines(("site", "us"), [(name, "3")], ("us",), False, 30)
    assert lines == ["site:", f"    {name}", "    us: 3"]
    assert wrapped(f"  the site {name} ends", 30) == ["  the site", f"      {name}", "      ends"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "policies/shop.yaml"),
        ("validate", "policies/shop.yaml"),
        ("explain", "policies/shop.yaml", "layers.0.up"),
        ("diff", "policies/shop.yaml", "policies/other.yaml"),
    ],
)
def test_every_word_is_there_in_whole(arguments, shop, loka, policy_text, monkeypatch):
    (shop.folder / "policies/other.yaml").write_text(policy_text + "  - {match: 'layers.*.up', compute: keep}\n")
    wide = loka(*arguments).out
    monkeypatch.setattr(output, "terminal_width", lambda: ROOM)
    narrow = loka(*arguments).out
    assert words(wide) <= words(narrow) | set(_headers(wide))
    assert max(map(len, narrow.splitlines())) <= ROOM


def _headers(text: str) -> list[str]:
    """The words of the lines above a rule: a row that lacks a cell does not name its column."""
    lines = text.splitlines()
    return [word for head, rule in pairwise(lines) if rule.startswith("─") for word in head.split()]


@pytest.mark.slow
def test_a_plan_names_every_site_and_reason_in_whole(shop, loka, monkeypatch):
    wide = loka("plan", shop.policy, "--all").out
    for module in (output, plan_table):
        monkeypatch.setattr(module, "terminal_width", lambda: ROOM)
    narrow = loka("plan", shop.policy, "--all").out
    assert max(map(len, narrow.splitlines())) <= ROOM
    for name in ("dense", "layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up", "head"):
        assert any(line.split()[:1] == [name] for line in narrow.splitlines()), name
    assert {word for word in words(wide) if "shop.yaml:" in word} <= words(narrow)


def test_the_names_of_a_row_are_wrapped_before_columns_are_left_out(monkeypatch, capsys):
    members = tuple(f"towers.user.attention.{part}" for part in ("query", "key", "value"))
    merged = site_plan("towers.user.attention.query+2")
    merged = replace(merged, site=replace(merged.site, members=members))
    for module in (output, plan_table):
        monkeypatch.setattr(module, "terminal_width", lambda: 80)
    plan_table.show_plan(plan_of_sites(merged, site_plan("towers.user.attention.out")), all_sites=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if line.startswith("site "))
    assert {"BF16", "no", "FP8", "why"} <= set(head.split())
    assert [line.split()[0] for line in lines if line.startswith("towers")][:3] == [
        f"{members[0]},",
        f"{members[1]},",
        members[2],
    ]


@pytest.mark.slow
def test_columns_of_a_real_terminal_count() -> None:
    """The variable COLUMNS goes before the terminal's own size, as everywhere."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environment = os.environ | {"COLUMNS": "70", "TERM": "dumb"}
        command = [sys.executable, "-m", "loka", "doctor"]
        child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
        os.close(theirs)
        text = b""
        try:
            while block := terminal.read(65536):
                text += block
        except OSError:  # Linux says so where the child has closed its end
            pass
        assert child.wait() == 0
    lines = text.decode().replace("\r\n", "\n").splitlines()
    assert any(line.startswith("kernel torch.scaled_mm") for line in lines)
    assert 60 < max(map(len, lines)) <= 70

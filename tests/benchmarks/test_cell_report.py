"""Ratios, tables, JSON and Markdown of a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cell_report import (
    BenchReport,
    Section,
    details,
    geometric_mean,
    ratio,
    side_by_side,
    to_markdown,
    write_files,
)
from benchmarks.cells import Cell, Errors
from benchmarks.replays import Timing
from loka.bench.machine import Environment
from loka.bench.results import usable_folder
from loka.errors import InputError

HERE = Environment("a device", "0.1.0", "3.12.0", "2.11.0", "13.0", "3.6.0", None, "1.6.0")


def timing(median: float) -> Timing:
    return Timing(median, 0.9 * median, 1.1 * median, 40)


CELLS = (
    Cell("small", "bf16", timing(100.0), bound_us=50.0, peak_mib=10.4),
    Cell("small", "peer", None, failure="PeerMissingError: no peer | here"),
    Cell("small", "ours", timing(50.0), 40.0, 9.6, Errors(36.52, 27.14, "linear.weight")),
    Cell("large", "bf16", timing(4000.0), bound_us=3000.0, peak_mib=1000.0),
    Cell("large", "peer", timing(2000.0), peak_mib=2000.0),
    Cell("large", "ours", timing(500.0), 600.0, 900.0, Errors(None, None, "")),
)
SECTION = Section("both", CELLS, baseline="bf16", shown="ours")
REPORT = BenchReport(
    "region", "python -m benchmarks.region", "2026-11-21T08:12Z", HERE, (SECTION,), ("a note",), "a study"
)


def test_ratios_need_a_baseline_that_ran() -> None:
    failed = replace(SECTION, cells=(replace(CELLS[0], timing=None), *CELLS[1:]))
    assert ratio(failed, CELLS[2]) is None
    assert geometric_mean(failed, "ours") is None


def test_side_by_side() -> None:
    columns, rows = side_by_side(SECTION)
    assert columns == ("us", "bf16", "peer", "ours", "bound of ours", "reached")
    assert rows == [
        ("small", "100.0", "failed", "50.0 (2.00)", "40.0", "80 %"),
        ("large", "4000", "2000 (2.00)", "500.0 (8.00)", "600.0", "120 %"),
        ("geometric mean", "1.000", "-", "4.000", "", ""),
    ]


def test_side_by_side_without_a_baseline_has_times_alone() -> None:
    columns, rows = side_by_side(Section("alone", CELLS))
    assert columns == ("us", "bf16", "peer", "ours")
    assert rows == [("small", "100.0", "failed", "50.0"), ("large", "4000", "2000", "500.0")]


def test_details_show_everything_that_is_known() -> None:
    columns, rows = details(SECTION)
    assert columns[:6] == ("work", "variant", "median us", "p10", "p90", "over bf16")
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    assert found[1]["note"] == "PeerMissingError: no peer | here"
    assert found[1]["median us"] == found[1]["over bf16"] == "-"
    ours = found[2]
    assert (ours["p10"], ours["p90"], ours["over bf16"], ours["bound us"]) == ("45.0", "55.0", "2.000", "40.0")
    assert (ours["reached"], ours["peak MiB"], ours["output dB"]) == ("80 %", "10", "36.5")
    assert ours["worst gradient dB"] == "27.1 (linear.weight)"
    assert found[5]["worst gradient dB"] == "-"


def test_files_are_named_after_the_run_and_hold_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    usable_folder(folder)
    assert list(folder.iterdir()) == []
    data, page = write_files(REPORT, folder)
    assert (data.name, page.name) == ("region-2026-11-21T0812.json", "region-2026-11-21T0812.md")
    plain = json.loads(data.read_text())
    assert plain["environment"]["device"] == "a device"
    (section,) = plain["sections"]
    assert section["geometric_means"] == {"bf16": 1.0, "peer": None, "ours": pytest.approx(4.0)}
    timed = {"median_us": 50.0, "p10_us": 45.0, "p90_us": 55.0, "samples": 40}
    assert section["cells"][2]["timing"] == pytest.approx(timed)
    assert section["cells"][2]["ratio"] == 2.0
    assert section["cells"][1]["failure"].startswith("PeerMissingError")
    assert page.read_text() == to_markdown(REPORT)
    assert sorted(path.name for path in data.parent.iterdir()) == [data.name, page.name]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot be written into .*; choose another folder with -o"):
            usable_folder(folder)
    with pytest.raises(InputError, match=r"region-.*json: cannot be written .*; free space, or choose another place"):
        write_files(REPORT, tmp_path / "file")

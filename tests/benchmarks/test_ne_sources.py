"""The study of where FP8 loses quality: its cases, its report, and that it goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ne_calibration.trained import MODELS, NATIVE, RowFile, StudyModel
from benchmarks.ne_sources import gemm_cases, main, report, site_cases
from loka.numerics.enums import Gemm

RECIPE = {gemm: lambda a, b: (a, b) for gemm in Gemm}


def test_cases_are_each_part_alone_and_all_but_it():
    gemms = gemm_cases(("up", "down"), RECIPE)
    assert len(gemms) == 1 + 2 * 3
    assert {site: set(part) for site, part in gemms["dgrad alone"].items()} == {
        "up": {Gemm.DGRAD},
        "down": {Gemm.DGRAD},
    }
    assert all(set(part) == {Gemm.FPROP, Gemm.WGRAD} for part in gemms["all but dgrad"].values())
    sites = site_cases(("up", "down", "head"), RECIPE)
    assert {name: set(case) for name, case in sites.items() if "up" in name} == {
        "up alone": {"up"}, "all but up": {"down", "head"},
    }  # fmt: skip
    assert all(set(part) == set(Gemm) for case in sites.values() for part in case.values())


def test_the_report_has_mean_error_and_spread():
    ne = {NATIVE: (0.8, 0.8), "all": (0.8008, 0.8016)}
    rows = [
        {"kind": "trained", "model": "m", "seed": seed, "recipe": case, "ne": value}
        for case, values in ne.items()
        for seed, value in enumerate(values)
    ]
    assert "| all | 2 | +0.1500 | 0.0500 | 0.071 |" in report("made up", rows)


@pytest.mark.slow
def test_a_study_trains_each_case_once(tmp_path: Path, monkeypatch, capsys):
    tiny = StudyModel("tiny", MODELS["dlrm_dcnv2"].policy, steps=3, batch_size=64)
    monkeypatch.setattr("benchmarks.ne_sources.MODELS", {"tiny": tiny})
    monkeypatch.setattr("loka.zoo.TEST_SAMPLES", 512)
    file = tmp_path / "rows.jsonl"
    assert main([str(file), "--seeds", "1"]) == 0
    rows = RowFile(file).rows
    ne = {row["recipe"]: row["ne"] for row in rows}
    assert len(ne) == len(rows) == 8
    assert ne["fprop alone"] != ne[NATIVE] != ne["wgrad alone"]
    assert ne["all but fprop"] != ne["all"]
    assert main([str(file), "--seeds", "1"]) == 0
    assert RowFile(file).rows == rows
    assert "| all but wgrad | 1 |" in capsys.readouterr().out

"""The sweep of launches of kernels over rows: what it tries, what it writes and how it ranks; without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.row_launches import (
    SWEPT_ROWS,
    WIDTHS,
    LaunchCandidate,
    Timed,
    cases,
    launches,
    main,
    other_programs,
    own_launch,
    ranked,
    table,
    write_kernels,
)
from loka.devices.targets import DEFAULT


def test_every_launch_fits_registers_and_a_multiprocessor() -> None:
    for case in cases(WIDTHS):
        tried = list(launches(case))
        assert tried
        for launch in (*tried, *(other for each in tried for other in other_programs(each))):
            assert 4 <= launch.rows * case.part.columns // (32 * launch.warps) <= 32
            assert launch.programs * launch.warps <= 64


def test_a_candidate_is_rendered_under_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases([512])[0]
    launch = next(each for each in launches(case) if each.warps == 4)
    write_kernels(tmp_path, "swept_rows", LaunchCandidate(case, launch), DEFAULT)
    assert f"warps={launch.warps}" in (tmp_path / "swept_rows" / "fused.py").read_text()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("swept_rows.fused")


def test_the_best_launch_stands_beside_the_devices_own() -> None:
    case = cases([512])[0]
    first, second = list(launches(case))[:2]
    times = {2048: 4.0, 8192: 8.0, 32768: 16.0}
    found = [
        Timed(LaunchCandidate(case, None), times),
        Timed(LaunchCandidate(case, first), {m: us * 2 for m, us in times.items()}),
        Timed(LaunchCandidate(case, second), {m: us / 2 for m, us in times.items()}),
    ]
    assert set(SWEPT_ROWS) < set(times)
    assert [each.candidate.launch for each in ranked(found, case)] == [second, None, first]
    (line,) = [line for line in table(found, DEFAULT).splitlines() if line.startswith("| forward")]
    assert line.endswith("| 2.00 |")
    assert f"{own_launch(case, DEFAULT).programs} programs" in line


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["-o", str(tmp_path / "rows.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err

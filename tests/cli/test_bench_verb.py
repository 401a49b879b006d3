"""`loka bench`: what it refuses, and how it prints and writes what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.bench import kernel_speed, machine
from loka.bench.cells import Cell
from loka.bench.results import Section
from loka.bench.timing import Timing
from loka.kernels.measurements.lookup import Measurements
from tests.support import markdown
from tests.support.plan.made_recordings import small_recording

SECTION = Section(
    "a section",
    (
        Cell("512 x 512 x 512", "bf16", Timing(30.0, 29.0, 31.0, 9), 15.0, 4.0),
        Cell("512 x 512 x 512", "torchao-rowwise", None, failure="PeerMissingError: not installed"),
        Cell("512 x 512 x 512", "loka-fp8", Timing(20.0, 19.0, 21.0, 9), 10.0, 3.0),
    ),
    "bf16",
    "loka-fp8",
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is there, and measuring gives SECTION."""
    monkeypatch.setattr(kernel_speed, "require_gpu", lambda: None)
    monkeypatch.setattr(kernel_speed, "run_kernels", lambda *arguments: (SECTION,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels",), "no CUDA device is visible"),
        (("regions",), "there is no 'regions' to measure; write one of kernels, model"),
        (("kernels", "--parts", "gemm"), "--parts goes with --record; add one, or leave --parts out"),
        (("kernels", "--jobs", "2"), "--jobs goes with --record; add one, or leave --jobs out"),
        (("kernels", "--only", "train"), "--only goes with loka bench model; add one, or leave --only out"),
        (("kernels", "--record", "x.jsonl", "--variants", "bf16"), "--variants says nothing to --record"),
        (("kernels", "--batch", "2"), "--batch goes with loka bench model; add one, or leave --batch out"),
        (("model", "missing.yaml"), "missing.yaml"),
        (("model", "wukong_small"), "no CUDA device is visible"),
        (("kernels", "--variants", "bf17"), "--variants: there is no 'bf17'; there are bf16, "),
        (("kernels", "--variants", " , "), "--variants: names none"),
        (("kernels", "requantize-transpose", "--variants", "bf16"), "those of the family gemm, which is not measured"),
        (("kernels", "norm"), "there is no family 'norm'; there are norm-forward"),
        (("model", "x.yaml", "--record", "x.jsonl"), "--record goes with loka bench kernels"),
        (("kernels", "gemm", "--record", "x.jsonl"), "name kinds of parts with --parts, not 'gemm'"),
        (("kernels", "--record", "x.jsonl", "--parts", "gemms"), "no parts of the kind 'gemms'"),
        (("kernels", "--record", "x.jsonl", "--seconds", "nan"), "--seconds: nan is no time to work in"),
        (("kernels", "--record", "x.jsonl"), "no CUDA device is visible"),
        (("kernels", "--policy", "x.yaml"), "--policy goes with --record"),
        (("kernels", "--export", "x.jsonl"), "name the one file of measurements"),
        (("kernels", "nowhere.jsonl", "--export", "x.jsonl"), "is not there"),
        (("kernels", "a", "--export", "x", "--target", "reference"), "for 'reference'; write h100 or h200"),
    ],
)
def test_what_cannot_be_measured_leaves_with_2_and_writes_nothing(
    loka: Callable[..., Any],
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = loka("bench", *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capability", "triton", "message"),
    [((8, 0), "3.6", "an older one has compute capability 8.0"), ((9, 0), None, "Triton is not installed")],
)
def test_a_machine_that_cannot_run_the_kernels_is_told_so(
    loka: Callable[..., Any],
    capability: tuple[int, int],
    triton: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "an older one")
    monkeypatch.setattr(machine, "version_of", lambda *names: triton)
    ran = loka("bench", "kernels")
    assert (ran.status, message in ran.err) == (2, True)


@pytest.mark.slow
def test_measurements_are_exported_without_a_gpu(loka: Callable[..., Any], tmp_path: Path) -> None:
    recorded, text = small_recording(tmp_path / "h100.jsonl"), tmp_path / "exported.jsonl"
    ran = loka("bench", "kernels", str(recorded), "--export", str(text))
    assert "measurements on NVIDIA H100 80GB HBM3" in ran.out
    assert '"loka bench kernels --record h100.jsonl"' in text.read_text().splitlines()[0]
    assert Measurements.open(text, "h100").sha256 == Measurements.open(recorded, "h100").sha256


@pytest.mark.usefixtures("measured")
def test_tables_are_printed_and_files_written(
    loka: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = loka("bench", "kernels", "gemm", "--variants", "bf16")
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert ran.out.startswith("loka bench kernels gemm --variants bf16\n")
    assert ["512", "x", "512", "x", "512", "30.0", "failed", "20.0", "(1.50)", "10.0", "50", "%"] in lines
    assert "PeerMissingError: not installed" in ran.out
    page, data = sorted((tmp_path / "build" / "bench").iterdir(), reverse=True)
    assert (page.suffix, data.suffix) == (".md", ".json")
    assert "| 512 x 512 x 512 | 30.0 | failed | 20.0 (1.50) | 10.0 | 50 % |" in page.read_text()
    assert json.loads(data.read_text())["command"] == "loka bench kernels gemm --variants bf16"


@pytest.mark.usefixtures("measured")
def test_the_report_is_printed_as_json(loka: Callable[..., Any], tmp_path: Path) -> None:
    ran = loka("bench", "kernels", "--json", "-o", str(tmp_path))
    plain = json.loads(ran.out)
    assert set(plain) == {*markdown.json_keys("bench"), "sections"}
    (data,) = tmp_path.glob("*.json")
    assert plain == json.loads(data.read_text())
    assert plain["sections"][0]["cells"][2]["ratio"] == 1.5

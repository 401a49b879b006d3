"""`loka bench`: what it refuses, and how it prints and writes what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.bench.results import Cell, Section
from loka.bench.speed import request
from loka.bench.speed.timing import Timing
from tests.support import markdown

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
    monkeypatch.setattr(request, "require_gpu", lambda: None)
    monkeypatch.setattr(request.region_speed, "run_regions", lambda *arguments: (SECTION,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("region",), "no CUDA device is visible"),
        (("kernels",), "no CUDA device is visible"),
        (("regions",), "there is no 'regions' to measure; write one of kernels, region, model"),
        (("crossover", "h100.jsonl"), "in LoKA's repository run `python -m benchmarks.crossover`"),
        (("regret", "one.jsonl", "two.jsonl"), "in LoKA's repository run `python -m benchmarks.regret`"),
        (("dispatch", "h100.jsonl"), "in LoKA's repository run `python -m benchmarks.dispatch`"),
        (("region", "512"), "'512' is no shape"),
        (("kernels", "--parts", "gemm"), "--parts goes with --record; add one, or leave --parts out"),
        (("region", "--jobs", "2"), "--jobs goes with --record or --ablate"),
        (("kernels", "--record", "x.jsonl", "--variants", "bf16"), "--variants says nothing to --record"),
        (("region", "--batch", "2"), "--batch goes with loka bench model; add one, or leave --batch out"),
        (("model", "dcn"), "there is no model 'dcn'"),
        (("model", "dcnv2", "--only", "loops"), "--only: there is no 'loops'"),
        (("model", "missing.yaml"), "missing.yaml"),
        (("model", "dcnv2", "--seconds", "0"), "--seconds: 0 is no time to work in"),
        (("model", "wukong_small"), "no CUDA device is visible"),
        (("region", "--variants", "bf15"), "there is no 'bf15'"),
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


@pytest.mark.usefixtures("measured")
def test_tables_are_printed_and_files_written(
    loka: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = loka("bench", "region", "512,512", "--only", "train")
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert ran.out.startswith("loka bench region 512,512 --only train\n")
    assert ["512", "x", "512", "x", "512", "30.0", "failed", "20.0", "(1.50)", "10.0", "50", "%"] in lines
    assert "PeerMissingError: not installed" in ran.out
    page, data = sorted((tmp_path / "build" / "bench").iterdir(), reverse=True)
    assert (page.suffix, data.suffix) == (".md", ".json")
    assert "| 512 x 512 x 512 | 30.0 | failed | 20.0 (1.50) | 10.0 | 50 % |" in page.read_text()
    assert json.loads(data.read_text())["command"] == "loka bench region 512,512 --only train"


@pytest.mark.usefixtures("measured")
def test_the_report_is_printed_as_json(loka: Callable[..., Any], tmp_path: Path) -> None:
    ran = loka("bench", "region", "--json", "-o", str(tmp_path))
    plain = json.loads(ran.out)
    assert set(plain) == {*markdown.json_keys("bench"), "sections"}
    (data,) = tmp_path.glob("*.json")
    assert plain == json.loads(data.read_text())
    assert plain["sections"][0]["cells"][2]["ratio"] == 1.5

"""`loka bench model` from the command to the tables, on the CPU in the place of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.bench.model import model_request
from tests.support import markdown
from tests.support.bench_device import CLICKS, FP8, CpuBench


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_turns: None) -> Path:
    """A policy, and a device for it."""
    monkeypatch.setattr(model_request, "require_gpu", lambda: None)
    monkeypatch.setattr(model_request, "BenchDevice", CpuBench)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a device")
    (tmp_path / "clicks.yaml").write_text(CLICKS + FP8)
    return tmp_path / "clicks.yaml"


@pytest.mark.slow
def test_tables_are_printed_and_files_written(loka: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    arguments = ("bench", "model", str(policy), "--variants", "bf16-eager", "--only", "infer,loop", "--rounds", "1")
    out = tmp_path / "out"
    ran = loka(*arguments, "-o", str(out))
    assert ran.status == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["variant", "loop"] in lines
    assert any(line[:2] == ["loop", "bf16-eager"] for line in lines)
    assert "one inference, autocast to bfloat16, float32 parameters" in ran.out
    assert "infer autocast loop bf16-eager:" in ran.err
    assert f"wrote {out / 'model-'}" in ran.err
    (data,) = out.glob("*.json")
    ran = loka(*arguments, "-o", str(out), "--json")
    plain = json.loads(ran.out)
    assert set(plain) == {*markdown.json_keys("bench"), "baseline", "models"}
    assert [line["variant"] for line in plain["models"][0]["lines"]] == ["bf16", "bf16-eager"]
    assert plain["command"] == json.loads(data.read_text())["command"]


def test_no_time_is_no_report(loka: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    ran = loka("bench", "model", str(policy), "--seconds", "1e-9", "-o", str(tmp_path / "out"))
    assert ran.status == 0
    assert "no time is left for clicks" in ran.err
    assert "nothing was measured" in ran.err
    assert not list((tmp_path / "out").iterdir())

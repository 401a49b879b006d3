"""Every variant of a small model on a Hopper GPU, as whole steps in every launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loka.bench.device import BenchDevice, CaptureError
from loka.bench.machine import environment
from loka.bench.model.model_report import to_plain
from loka.bench.model.model_request import ModelRequest, run
from loka.bench.model.model_variants import MODEL_BASELINE, MODEL_VARIANTS, ModelVariant, StepLaunch
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

MODELS = "tests.support.models.ablation_model"
POLICY = f"""\
version: 1
name: clicks
model: {{factory: "{MODELS}:wide", inputs: "{MODELS}:wide_inputs", batch_size: 4096}}
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
rules:
  - {{match: "head", compute: keep}}
mods:
  - {{use: no_bias}}
  - {{use: hard_swish}}
"""
TABLES = """\
import torch
from torch import nn

from tests.support.models.ablation_model import Clicks


def build():
    model = Clicks(512)
    model.table = nn.Embedding(10, 512, sparse=True)
    return model
"""


def lines_of(request: ModelRequest, out: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Lines of a run by mode, launch and variant."""
    plain = to_plain(run(request, out, print))
    (written,) = out.glob("*.json")
    assert json.loads(written.read_text()) == plain
    lines = plain["models"][0]["lines"]  # type: ignore[index]
    return {(line["mode"], line["launch"], line["variant"]): line for line in lines}


def is_expected(line: dict[str, Any]) -> bool:
    """True for a line with figures, and for one whose library is not installed here."""
    if line["failure"]:
        missing = line["variant"].startswith("torchao") and environment().torchao is None
        return missing and "torchao is not installed" in line["failure"]
    return bool(
        line["step_ms"] > 0
        and line["host_ms"] > 0
        and line["gpu_ms"] > 0
        and line["launches"] > 0
        and line["peak_mib"] > 0
        and line["ratio"] > 0
    )


TUNED = tuple(variant for variant in MODEL_VARIANTS if variant.tunes)  # a minute of compiling each
QUICK = tuple(variant for variant in MODEL_VARIANTS if not variant.tunes)
FEW = tuple(each for each in QUICK if each.name in {"bf16", "bf16-eager", "torchao-rowwise", "loka-bf16", "loka-fp8"})


@pytest.mark.timing
@pytest.mark.parametrize(
    ("casting", "mode", "launches", "variants"),
    [
        ("autocast", "train", "loop,reduce-overhead,captured", QUICK),
        ("bfloat16", "train", "loop,captured", FEW),
        ("autocast", "infer", "loop,captured", FEW),
        ("autocast", "train", "loop", TUNED),
    ],
    ids=["train", "train-bfloat16", "infer", "max-autotune"],
)
def test_every_variant_has_figures_or_a_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    casting: str,
    mode: str,
    launches: str,
    variants: tuple[ModelVariant, ...],
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # where the model is found from
    (tmp_path / "clicks.yaml").write_text(POLICY)
    names = ",".join(variant.name for variant in variants)
    policy = str(tmp_path / "clicks.yaml")
    given = ModelRequest((policy,), only=f"{mode},{launches}", variants=names, casting=casting, rounds=2)
    lines = lines_of(given, tmp_path / "out")
    compared = [variant for variant in MODEL_VARIANTS if variant in variants or variant.name == MODEL_BASELINE]
    assert set(lines) == {
        (mode, launch.value, variant.name)
        for variant in compared
        for launch in variant.launches
        if launch.value in launches.split(",")
    }
    strange = [line for line in lines.values() if not is_expected(line)]
    assert strange == []
    if "captured" in launches:
        loop, whole = (lines[mode, launch, "bf16-eager"] for launch in (StepLaunch.LOOP, StepLaunch.CAPTURED))
        assert whole["host_ms"] < loop["host_ms"], "one launch of a graph against one of each kernel"
    assert all(len(line["rounds"]) == 2 for line in lines.values() if not line["failure"])


def test_a_step_that_waits_for_the_device_is_not_captured_and_the_next_one_is() -> None:
    device, x = BenchDevice(), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="the step cannot be captured"):
        device.capture(lambda: float(x.sum()))
    assert torch.cuda.current_stream() == stream
    replay = device.capture(lambda: x.add_(1.0))
    device.wait()
    before = float(x[0])
    replay()
    device.wait()
    assert float(x[0]) == before + 1.0
    found = device.kernels(replay)
    assert found is not None
    assert found.launches == 1


def test_a_table_with_sparse_gradients_trains_and_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sparse_clicks.py").write_text(TABLES)
    (tmp_path / "clicks.yaml").write_text(POLICY.replace(f'{MODELS}:wide"', 'sparse_clicks:build"'))
    monkeypatch.chdir(tmp_path)
    given = ModelRequest(("clicks.yaml",), "bf16,bf16-eager,loka-fp8-eager", "train,loop,captured", rounds=1)
    lines = lines_of(given, tmp_path / "out")
    assert all(line["failure"] == "" for (_, launch, _), line in lines.items() if launch == "loop")
    assert lines["train", "loop", "loka-fp8-eager"]["ratio"] > 0
    captured = lines["train", "captured", "bf16-eager"]
    assert "cannot be captured" in captured["failure"] or captured["step_ms"] > 0

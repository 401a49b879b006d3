"""Requests of `loka bench model`, checked; and carried out on the CPU, where nothing is compiled or captured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from loka.bench import timing
from loka.bench.device import BenchDevice
from loka.bench.model import model_request
from loka.bench.model.model_request import ModelRequest, check, run
from loka.errors import InputError
from tests.support.bench_device import CLICKS, FP8, CpuBench

POLICY = CLICKS + FP8 + 'rules:\n  - {match: "head", compute: keep}\n'

KNOWN = str(Path(__file__).parents[2] / "policies" / "dlrm_dcnv2.yaml")
pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "clicks.yaml").write_text(POLICY)
    return tmp_path / "clicks.yaml"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CpuBench:
    """The device that the next run measures on, in short turns."""
    made = CpuBench()
    monkeypatch.setattr(model_request, "require_gpu", lambda: None)
    monkeypatch.setattr(model_request, "BenchDevice", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(timing, "STEPS", 1)
    return made


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ModelRequest(()), "name the policy of the model"),
        (ModelRequest(("nowhere.yaml",)), "nowhere.yaml"),
        (ModelRequest((KNOWN,), variants="bf17"), "--variants: there is no 'bf17'"),
        (ModelRequest((KNOWN,), only="graph"), "--only: there is no 'graph'"),
        (ModelRequest((KNOWN,), casting="half"), "--casting: there is no 'half'"),
        (ModelRequest((KNOWN,), batch=0), "--batch: 0 is too few"),
        (ModelRequest((KNOWN,), rounds=0), "--rounds: 0 is too few"),
        (ModelRequest((KNOWN,), seconds=math.nan), "--seconds: nan is no time"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(request_: ModelRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(request_)


def test_a_command_can_be_typed_again() -> None:
    given = ModelRequest(("a b.yaml",), "bf16", "train", "bfloat16", 32, 2, 500.0, 4)
    assert given.command() == (
        "loka bench model 'a b.yaml' --variants bf16 --only train --casting bfloat16 --batch 32 --rounds 2 "
        "--seconds 500 --gpus 4"
    )
    assert ModelRequest(("a.yaml",)).command() == "loka bench model a.yaml"


def test_a_session_lets_every_variant_have_its_compiled_form() -> None:
    before = torch.get_float32_matmul_precision()
    with BenchDevice().session():
        assert torch._dynamo.config.recompile_limit >= 1024
        assert torch.get_float32_matmul_precision() == "high"
    assert torch._dynamo.config.recompile_limit < 1024
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.slow
def test_policies_and_models_that_cannot_be_built_stand_in_one_report(
    policy: Path, tmp_path: Path, device: CpuBench
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(POLICY.replace("name: clicks", "name: broken").replace(":build", ":nothing"))
    written: list[int] = []

    def progress(line: str) -> None:
        written.append(len(list(tmp_path.glob("out/*.json"))))

    given = ModelRequest(
        (str(broken), str(policy)), "bf16-eager,loka-fp8", casting="autocast,bfloat16", batch=8, rounds=1
    )
    report = run(given, tmp_path / "out", progress)
    first, second = report.models
    assert "has no 'nothing'" in first.failure
    assert (second.batch, second.step) == (8, "a synthetic loss, adam")
    assert {each.failure for each in second.outcomes} == {""}
    assert len(second.outcomes) == 4 * (3 + 2 + 3)
    assert written[-1] == 1, "results are written on the way"
    (data,) = tmp_path.glob("out/*.json")
    lines = json.loads(data.read_text())["models"][1]["lines"]
    assert {line["casting"] for line in lines} == {"autocast", "bfloat16"}
    assert device.captures == 4 * 3


@pytest.mark.usefixtures("device")
def test_when_no_time_is_left_the_rest_is_named(policy: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    report = run(ModelRequest((str(policy), KNOWN), seconds=1e-9), tmp_path, lines.append)
    assert report.models == ()
    assert lines == ["no time is left for clicks and what follows"]

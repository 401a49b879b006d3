"""One small run of the studies of regions and of mods on a Hopper GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.ablation import __main__ as ablation
from benchmarks.ablation.ablation_report import to_plain
from benchmarks.region import __main__ as region
from benchmarks.region.region import Form, Shape
from benchmarks.region.region_run import run_regions
from benchmarks.variants import VARIANTS
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

ABLATED = """\
version: 1
name: clicks
model:
  factory: tests.support.models.ablation_model:wide
  inputs: tests.support.models.ablation_model:wide_inputs
  batch_size: 4096
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
rules:
  - {match: "head", compute: keep}
mods:
  - {use: no_bias}
  - {use: block_norm}
  - {use: hard_swish}
"""


def quiet(line: str) -> None:
    """Progress that nobody reads."""


def test_a_small_region_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("tf32", "bf16", "loka-bf16", "loka-fp8", "loka-fp8-fast", "loka-fp8-known", "loka-fp8-known-fast")
    assert region.main(["512,256,128", "--variants", ",".join(wanted), "-o", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (data,) = tmp_path.glob("*.json")
    assert printed == json.loads(data.read_text())
    assert printed["environment"]["device"] == torch.cuda.get_device_name()
    train, infer = printed["sections"]
    for section, training in ((train, True), (infer, False)):
        assert [cell["variant"] for cell in section["cells"]] == list(wanted)
        for cell in section["cells"]:
            assert cell["failure"] == "", cell
            timing = cell["timing"]
            assert 0 < timing["p10_us"] <= timing["median_us"] <= timing["p90_us"]
            assert timing["samples"] >= 10
            assert cell["ratio"] > 0
            least = 20.0 if "fp8" in cell["variant"] else 35.0
            assert cell["errors"]["output"] > least, cell
            assert (cell["peak_mib"] is not None) == training
            assert not training or (cell["peak_mib"] > 0 and cell["errors"]["gradient"] > 15.0), cell


def test_a_region_between_linears_has_a_cell_for_every_variant() -> None:
    (section,) = run_regions(Form.BLOCK_NORM, (Shape(512, 512, 512),), VARIANTS, (True,), quiet)
    for cell in section.cells:
        assert (cell.timing is None) == bool(cell.failure)
    timed = {cell.variant for cell in section.cells if cell.timing is not None}
    assert {"tf32", "bf16", "loka-fp8"} <= timed


def test_memory_of_one_variant_is_not_counted_for_the_next() -> None:
    peaks = []
    for names in (("bf16",), ("tf32", "bf16")):
        variants = [variant for variant in VARIANTS if variant.name in names]
        (section,) = run_regions(Form.LAYER_NORM, (Shape(8192, 1024, 1024),), variants, (True,), quiet)
        peaks.append(next(cell.peak_mib for cell in section.cells if cell.variant == "bf16"))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)  # float32 would hold twice as much


def test_an_ablation_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # where the model is found from, in other processes too
    policy = tmp_path / "clicks.yaml"
    policy.write_text(ABLATED, encoding="utf-8")
    options = ablation.parsed([str(policy), "--only", "none,all", "--jobs", "3", "-o", str(tmp_path)])
    plain = to_plain(ablation.run(options, "", quiet))
    assert len(plain["cells"]) == 6
    for cell in plain["cells"]:
        assert cell["failures"] == {}, cell
        for mode in cell["modes"].values():
            timing = mode["timing"]
            assert 0 < timing["p10_us"] <= timing["median_us"] <= timing["p90_us"]
            assert mode["peak_mib"] > 0
            assert mode["launches"] > 1
            assert mode["ratio"] > 0
        assert cell["modes"]["infer"]["output_db"] > (15 if cell["column"] == "loka-fp8" else 30)
    launches = {(cell["row"], cell["column"]): cell["modes"]["train"]["launches"] for cell in plain["cells"]}
    assert len(set(launches.values())) > 1
    assert plain["cells"][0]["modes"]["train"]["ratio"] == 1.0

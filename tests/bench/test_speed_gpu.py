"""One small run of each benchmark on a Hopper GPU, from the command to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loka.bench.ablation import ablate, ablation_report
from loka.bench.ablation.ablate import AblationRequest
from loka.bench.results import to_markdown, to_plain, write_files
from loka.bench.speed import kernel_speed, library_gemms
from loka.bench.speed.region_speed import Form
from loka.bench.speed.request import Request, run
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


def test_a_small_region_from_end_to_end(tmp_path: Path) -> None:
    wanted = ("tf32", "bf16", "loka-bf16", "loka-fp8", "loka-fp8-fast", "loka-fp8-known", "loka-fp8-known-fast")
    report = run(Request("region", ("512,256,128",), variants=",".join(wanted)), tmp_path, quiet)
    data, _ = write_files(report, tmp_path)
    printed = to_plain(report)
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


def test_a_region_between_linears_has_a_cell_for_every_variant(tmp_path: Path) -> None:
    asked = Request("region", ("512,512,512",), Form.BLOCK_NORM.value, "train")
    report = run(asked, tmp_path, quiet)
    (section,) = report.sections
    for cell in section.cells:
        assert (cell.timing is None) == bool(cell.failure)
    timed = {cell.variant for cell in section.cells if cell.timing is not None}
    assert {"tf32", "bf16", "loka-fp8"} <= timed
    assert "geometric mean" not in to_markdown(report)


def test_memory_of_one_variant_is_not_counted_for_the_next(tmp_path: Path) -> None:
    peaks = []
    for variants in ("bf16", "tf32,bf16"):
        report = run(Request("region", ("8192,1024,1024",), only="train", variants=variants), tmp_path, quiet)
        peaks.append(next(cell.peak_mib for cell in report.sections[0].cells if cell.variant == "bf16"))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)  # float32 would hold twice as much


@pytest.mark.timing
def test_rendered_kernels_and_gemms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "SHAPES", ((256, 512),))
    monkeypatch.setattr(library_gemms, "SHAPES", ((512, 256, 128),))
    report = run(Request("kernels"), tmp_path, quiet)
    rendered, products = report.sections
    assert [cell.work for cell in rendered.cells] == [case.title for case in kernel_speed.CASES]
    assert [cell.failure for cell in rendered.cells] == [""] * len(kernel_speed.CASES)
    assert all(cell.timing is not None and 0 < cell.timing.median_us < 1000 for cell in rendered.cells)
    for cell in rendered.cells:
        assert cell.errors is not None
        assert cell.errors.output is not None
        assert cell.errors.output > 35, cell
    for cell in products.cells:
        if cell.variant.startswith("fbgemm") and report.environment.fbgemm is None:
            assert "FBGEMM GenAI is not installed" in cell.failure
            continue
        assert cell.failure == ""
        assert cell.errors is not None
        assert cell.errors.output is not None
        assert cell.errors.output > 25


def test_an_ablation_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # where the model is found from, in other processes too
    policy = tmp_path / "clicks.yaml"
    policy.write_text(ABLATED, encoding="utf-8")
    request = AblationRequest("model", (str(policy),), "mods", only="none,all", jobs=3)
    plain = ablation_report.to_plain(ablate.run(request, tmp_path, quiet))
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

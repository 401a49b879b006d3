"""Chains that a policy asks for, from the file to training: in FP8, and around GEMMs in the model's dtype."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loka.zoo import ranker
from tests.support.codegen.policy_packages import Make, policy_packages, ranker_step

FP8 = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"
RULES = (
    "  - {match: {max_n: 16}, compute: keep}\n  - {match: {max_k: 16}, compute: keep}\n"
    '  - {match: "layers.*.fmb.*", fuse: always}\n'
)

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The plan of the ranker under these defaults, the files of its package, and the package."""
    monkeypatch.chdir(tmp_path)
    with policy_packages(tmp_path) as package:
        yield lambda name, defaults: package(
            name,
            'version: 1\nname: chained\nmodel: {factory: "loka.zoo:ranker", inputs: "loka.zoo:ranker_inputs", '
            f"batch_size: 64}}\ndefaults: {{{defaults}}}\nrules:\n{RULES}",
        )


@pytest.mark.slow
def test_an_mlp_is_one_chain_in_fp8_and_trains(make: Make) -> None:
    plan, files, package = make("gen_chained_fp8", FP8)
    found = {site.site.name: site for site in plan.sites}
    for layer in range(3):
        assert found[f"layers.{layer}.fmb.0"].region == ("layer_norm", "linear", "layer_norm", "silu")
        assert (found[f"layers.{layer}.fmb.6"].region, found[f"layers.{layer}.fmb.6"].region_note) == ((), "")
    assert "kernels.layers_fmb(" in files["modules.py"]
    assert "kernels.layers_fmb_frozen(" in files["modules.py"]
    (body,) = [text for text in files["kernels.py"].split("\nclass ") if text.startswith("LayersFmbFunction(")]
    assert "layers.0.fmb, layers.1.fmb, layers.2.fmb: layer_norm -> linear -> layer_norm -> silu ->" in body
    forward = body[body.index("def forward") : body.index("def backward")]
    assert forward.count("dispatch.scaled_mm(") == 3
    model = ranker()
    with package.apply(model) as patch:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            ranker_step(model)
            optimizer.step()
        patch.verify()


@pytest.mark.slow
def test_kept_gemms_get_kernels_around_them_and_nothing_else_changes(make: Make) -> None:
    plan, files, package = make("gen_chained_as_is", "compute: keep")
    assert plan.share_fp8 == 0
    assert {binding.modules for binding in plan.bindings} == {("layers.0", "layers.1", "layers.2")}
    regions = {site.site.name for site in plan.sites if site.region}
    assert regions == {f"layers.{layer}.fmb.{place}" for layer in range(3) for place in (0, 3)}
    assert "fused." in files["kernels.py"]
    assert "= dispatch.scaled_mm(" not in files["kernels.py"]
    model = ranker()
    plain = copy.deepcopy(model)
    expected = ranker_step(plain)
    with package.apply(model) as patch:
        torch.testing.assert_close(ranker_step(model), expected, rtol=1e-4, atol=1e-4)
        patch.verify()
    for (name, found), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(ranker_step(model), expected)


@pytest.mark.slow
def test_kept_gemms_without_fuse_always_are_left_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RULES", '  - {match: "head.*", compute: fp8}\n')
    plan, _, _ = make("gen_chained_not", "compute: keep")
    assert not any(site.region or site.region_note for site in plan.sites)
    assert not any(module.startswith("layers") for binding in plan.bindings for module in binding.modules)

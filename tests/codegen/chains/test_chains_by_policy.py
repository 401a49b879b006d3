"""Chains that a policy asks for, from the file to training: in FP8, and around GEMMs in the model's dtype."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.zoo import ranker, ranker_inputs
from tests.support.codegen import codegen_plans as plans

FP8 = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"
RULES = (
    "  - {match: {max_n: 16}, compute: keep}\n  - {match: {max_k: 16}, compute: keep}\n"
    '  - {match: "layers.*.fmb.*", fuse: always}\n'
)

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

Make = Callable[[str, str], tuple[Plan, dict[str, str], ModuleType]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The plan of the ranker under these defaults, the files of its package, and the package."""
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def one(name: str, defaults: str) -> tuple[Plan, dict[str, str], ModuleType]:
        (tmp_path / "policy.yaml").write_text(
            'version: 1\nname: chained\nmodel: {factory: "loka.zoo:ranker", inputs: "loka.zoo:ranker_inputs", '
            f"batch_size: 64}}\ndefaults: {{{defaults}}}\nrules:\n{RULES}"
        )
        plan = make_plan("policy.yaml")
        files = render_package(plan)
        names.append(name)
        return plan, files, plans.import_package(files, tmp_path, name)

    yield one
    for name in names:
        for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            sys.modules.pop(module)


def step(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(3)
    inputs = ranker_inputs(64)
    y = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    model.zero_grad()
    y.float().square().mean().backward()
    found: torch.Tensor = y.detach()
    return found


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
            step(model)
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
    expected = step(plain)
    with package.apply(model) as patch:
        torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-4)
        patch.verify()
    for (name, found), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(step(model), expected)


@pytest.mark.slow
def test_kept_gemms_without_fuse_always_are_left_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RULES", '  - {match: "head.*", compute: fp8}\n')
    plan, _, _ = make("gen_chained_not", "compute: keep")
    assert not any(site.region or site.region_note for site in plan.sites)
    assert not any(module.startswith("layers") for binding in plan.bindings for module in binding.modules)

"""Static scales that a policy asks for, from the file to training; and what cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from loka.codegen import render_package
from loka.errors import InputError
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.zoo import ranker, ranker_inputs
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

STATIC = (
    "fprop: {input: {range: static, amax: 64.0}}, dgrad: {grad_output: {range: static, amax: 1.0}}, "
    "wgrad: {input: {range: static, amax: 64.0}, grad_output: {range: static, amax: 1.0}}"
)
KNOWN = f"compute: fp8, scaling: tensorwise, power_of_two: true, {STATIC}"
RULES = (
    "  - {match: {max_n: 16}, compute: keep}\n  - {match: {max_k: 16}, compute: keep}\n"
    '  - {match: "layers.*.fmb.*", fuse: always}\n'
)

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

Make = Callable[..., tuple[Plan, dict[str, str], ModuleType]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The plan of the ranker under these defaults and rules, the files of its package, and the package."""
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def one(name: str, defaults: str, rules: str = RULES) -> tuple[Plan, dict[str, str], ModuleType]:
        (tmp_path / "policy.yaml").write_text(
            'version: 1\nname: known\nmodel: {factory: "loka.zoo:ranker", inputs: "loka.zoo:ranker_inputs", '
            f"batch_size: 64}}\ndefaults: {{{defaults}}}\nrules:\n{rules}"
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
def test_an_mlp_is_one_chain_and_trains(make: Make) -> None:
    rules = f'{RULES}  - {{match: "layers.1.*", fprop: {{input: {{amax: 32.0}}}}, wgrad: {{input: {{amax: 32.0}}}}}}\n'
    plan, files, package = make("gen_known_ranker", KNOWN, rules)
    found = {site.site.name: site for site in plan.sites}
    assert found["layers.0.fmb.0"].region == ("layer_norm", "linear", "layer_norm", "silu")
    assert files["kernels.py"].count("def layers_fmb(") == 1  # for all layers, whatever their maxima are
    assert files["modules.py"].count("kernels.layers_fmb(") == 2  # a class for each maximum
    assert 'dispatch.StaticScale(0, "input", 32.0, 0.125)' in files["modules.py"]
    model = ranker()
    with package.apply(model) as patch:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            step(model)
            optimizer.step()
        patch.verify()
        assert patch.overflows() == ()
    model = ranker()
    plain = step(model)
    with package.apply(model):
        assert torch.linalg.vector_norm(step(model) - plain) < 0.2 * torch.linalg.vector_norm(plain)


@pytest.mark.slow
def test_linears_that_are_not_fused_are_chains_of_their_own(make: Make) -> None:
    _, files, package = make("gen_known_alone", KNOWN, "  - {match: {max_n: 16}, compute: keep}\n")
    assert {"layers_fmb_0", "layers_0_fmb_3", "head_mlp_0"} <= set(chains.functions(files["kernels.py"]))
    model = ranker()
    with package.apply(model) as patch:
        step(model)
        patch.verify()
        assert patch.overflows() == ()


@pytest.mark.slow
def test_a_known_input_beside_a_rowwise_weight_is_an_error_at_its_place(make: Make) -> None:
    rule = '  - {match: "layers.*.fmb.*", fprop: {input: {scaling: tensorwise, range: static, amax: 8.0}}}\n'
    message = r"policy\.yaml:9:\d+: .*fprop: no kernel multiplies input tensorwise by weight rowwise"
    with pytest.raises(InputError, match=message):
        make("gen_known_mixed", "compute: fp8, scaling: rowwise", RULES + rule)


@pytest.mark.slow
def test_transposed_is_refused_with_what_to_write_instead(make: Make) -> None:
    plan, _, _ = make("gen_known_transposed", f"{KNOWN}, requantize_transpose: true")
    site = next(site for site in plan.sites if site.site.name == "layers.0.fmb.0")
    reasons = {gemm.gemm.value: gemm.reason for gemm in site.gemms}
    assert reasons["fprop"].startswith("fp8 by ")
    said = (
        "input is to be transposed from fprop's, which is e4m3 tensorwise static(64) pow2; give fprop scaling: rowwise"
    )
    assert reasons["wgrad"].startswith(said)
    assert reasons["wgrad"].endswith(
        "or say nothing of requantize_transpose: under one scale, a copy made anew has the same values"
    )


@pytest.mark.slow
def test_a_static_range_without_a_maximum_is_an_error_at_its_place(make: Make) -> None:
    with pytest.raises(InputError, match=r"policy\.yaml:4:\d+: .*range: static needs a maximum"):
        make("gen_known_without", "compute: fp8, scaling: tensorwise, fprop: {input: {range: static}}")

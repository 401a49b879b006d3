"""Chains that a policy asks for, from the file to training: in FP8, under static scales, around native GEMMs."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from loka.errors import InputError
from loka.zoo import small_ranker
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make, ranker_step
from tests.support.exact_numbers import check_exact_numbers
from tests.support.models import sum_models

FP8 = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"
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


@pytest.fixture
def make(package: Make) -> Make:
    """The plan of the ranker under these defaults, the files of its package, and the package."""
    return lambda name, defaults, rules=RULES: package(
        name,
        'version: 1\nname: chained\nmodel: {factory: "loka.zoo:small_ranker", inputs: "loka.zoo:ranker_inputs", '
        f"batch_size: 64}}\ndefaults: {{{defaults}}}\nrules:\n{rules}",
    )


@pytest.mark.slow
def test_an_mlp_is_one_chain_in_fp8_and_trains(make: Make) -> None:
    plan, files, package = make("gen_chained_fp8", FP8)
    found = {site.site.name: site for site in plan.sites}
    for layer in range(3):
        assert found[f"layers.{layer}.fmb.0"].region == ("layer_norm", "linear", "layer_norm", "silu")
        assert (found[f"layers.{layer}.fmb.6"].region, found[f"layers.{layer}.fmb.6"].region_note) == ((), "")
    assert "kernels.layers_fmb(" in files["modules.py"]
    said = chains.functions(files["kernels.py"])["layers_fmb"]
    assert said.startswith("layer_norm -> linear -> layer_norm -> silu ->")
    assert '"""layers.0.fmb, layers.1.fmb, layers.2.fmb: layer_norm -> ' in files["kernels.py"]
    assert said.count("weight_") == 3
    model = small_ranker()
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
    assert "Launch(" in files["kernels.py"]
    assert "StageGemms(" not in files["kernels.py"]
    model = small_ranker()
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
def test_kept_gemms_without_fuse_always_are_left_alone(make: Make) -> None:
    plan, _, _ = make("gen_chained_not", "compute: keep", '  - {match: "head.*", compute: fp8}\n')
    assert not any(site.region or site.region_note for site in plan.sites)
    assert not any(module.startswith("layers") for binding in plan.bindings for module in binding.modules)


@pytest.mark.slow
def test_an_mlp_under_static_scales_is_one_chain_and_trains(make: Make) -> None:
    rules = f'{RULES}  - {{match: "layers.1.*", fprop: {{input: {{amax: 32.0}}}}, wgrad: {{input: {{amax: 32.0}}}}}}\n'
    plan, files, package = make("gen_known_ranker", KNOWN, rules)
    found = {site.site.name: site for site in plan.sites}
    assert found["layers.0.fmb.0"].region == ("layer_norm", "linear", "layer_norm", "silu")
    assert files["kernels.py"].count("def layers_fmb(") == 1  # for all layers, whatever their maxima are
    assert files["modules.py"].count("kernels.layers_fmb(") == 2  # a class for each maximum
    assert 'dispatch.StaticScale(0, "input", 32.0, 0.125)' in files["modules.py"]
    model = small_ranker()
    with package.apply(model) as patch:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            ranker_step(model)
            optimizer.step()
        patch.verify()
        assert patch.overflows() == ()
    model = small_ranker()
    plain = ranker_step(model)
    with package.apply(model):
        assert torch.linalg.vector_norm(ranker_step(model) - plain) < 0.2 * torch.linalg.vector_norm(plain)


@pytest.mark.slow
def test_linears_that_are_not_fused_are_chains_of_their_own(make: Make) -> None:
    _, files, package = make("gen_known_alone", KNOWN, "  - {match: {max_n: 16}, compute: keep}\n")
    assert {"layers_fmb_0", "layers_0_fmb_3", "head_mlp_0"} <= set(chains.functions(files["kernels.py"]))
    model = small_ranker()
    with package.apply(model) as patch:
        ranker_step(model)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mods", "steps"),
    [
        ("swiglu", "auto: false", "linear -> silu -> times -> linear -> residual"),
        ("swiglu", "{use: merge_siblings}", "silu -> times -> linear -> residual"),
        ("masked", "auto: false", "linear -> relu -> linear -> times -> linear -> layer_norm -> relu"),
        ("mask_block", "auto: false", "linear -> relu -> linear -> times -> linear -> layer_norm -> relu"),
        ("gated_tower", "auto: false", "linear -> relu -> linear -> sigmoid -> times -> linear"),
    ],
)
def test_a_gate_is_part_of_the_chain_that_it_multiplies(name: str, mods: str, steps: str, package: Make) -> None:
    text = (
        f'version: 1\nname: gate\nmodel: {{factory: "tests.support.models.sum_models:{name}", inputs: '
        f'"tests.support.models.sum_models:rows_of_128", batch_size: 64}}\n'
        f"mods: {f'[{mods}]' if 'use' in mods else f'{{{mods}}}'}\ndefaults: {{{FP8}, fuse: always}}\n"
    )
    plan, files, made = package(f"gen_gate_{name}{'_merged' * ('use' in mods)}", text)
    assert plan.share_fp8 == 1.0
    assert steps in [said.partition(":")[0] for said in chains.functions(files["kernels.py"]).values()]
    own = getattr(sum_models, name)()
    bound = copy.deepcopy(own)
    with made.apply(bound) as patch:
        check_exact_numbers(own, bound, cast(ModuleType, SimpleNamespace(example_inputs=sum_models.rows_of_128)))
        patch.verify()


@pytest.mark.slow
def test_a_plan_says_of_a_native_linear_with_a_residual_what_is_generated(package: Make) -> None:
    text = (
        'version: 1\nname: kept\nmodel: {factory: "tests.support.models.sum_models:residual", inputs: '
        '"tests.support.models.sum_models:rows_of_128", batch_size: 64}\nmods: {auto: false}\n'
        "defaults: {compute: keep, fuse: always}\n"
    )
    plan, files, _ = package("gen_kept_residual", text)
    assert {site.site.name: site.region for site in plan.sites} == {"0.first": ("linear", "relu"), "0.second": ()}
    assert "torch.nn.functional.layer_norm(" in files["modules.py"]  # left to the compiler, as the plan says

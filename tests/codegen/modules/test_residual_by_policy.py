"""`residual_high_precision` from the policy to training: where it is carried, beside other mods and FP8."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.errors import InputError
from loka.plan.serialize import from_json, to_json
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace, equal_but_for_rounding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

HIGH, FUSED = "{use: residual_high_precision}", "{use: fuse_interaction}"
TRANSPOSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
WUKONG = {"kind": "wukong", "embeddings": 16, "dim": 24, "layers": 2, "rank": 4}


def model_of(workplace: Workplace, name: str) -> tuple[str, str, nn.Module, Tensor]:
    """The factory and the inputs of a model of the zoo, the model, and a batch for it."""
    if name == "dcn":
        return "dcnv2", "inputs", workplace.models.dcnv2(), 4 * torch.randn(64, 6, 16)
    workplace.models.SIZES.update(WUKONG)
    return "sized", "sized_inputs", workplace.models.sized(), 4 * torch.randn(64, 16, 24)


@pytest.mark.parametrize(("name", "mods"), [("dcn", HIGH), ("wukong", HIGH), ("wukong", f"{HIGH}, {FUSED}")])
def test_the_model_in_wide_dtypes_is_the_same_function(workplace: Workplace, name: str, mods: str) -> None:
    factory, inputs, model, x = model_of(workplace, name)
    plan, files, package = workplace.make(factory, mods=mods, inputs=inputs)
    assert [binding.modules for binding in plan.bindings] == [("",)]  # one stream through all layers
    classes = files["modules.py"].split("\nclass ")[1:]
    assert all(text.count("_wide = flatten.to(" if name == "dcn" else "x_wide = x.to(") == 1 for text in classes)
    (said,) = (mod for mod in plan.mods if mod.use == "residual_high_precision")
    assert said.exact
    count, writers = {"dcn": (3, "cross.*"), "wukong": (2, "layers.*")}[name]
    assert [(made.owner, made.what) for made in said.rewritten] == [
        ("", f"{count} residual sums in float32: of {writers} ({count})")
    ]
    assert said.unchanged == ()
    assert all((kernel in files["modules.py"]) == (FUSED in mods) for kernel in ("_fm_interaction(", "_concat_norm("))
    assert render_package(from_json(to_json(plan))) == files
    equal_but_for_rounding(model, package, x, limit=2e-4)


def test_the_sums_of_a_model_in_bfloat16_are_nearer_to_float64(workplace: Workplace) -> None:
    _, _, package = workplace.make("deep", mods=HIGH, inputs="deep_inputs")
    model, x = workplace.models.deep(), 8 * torch.randn(256, 96)
    low = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(low).double()(x.bfloat16().double())
    errors = []
    with torch.no_grad():
        errors.append((low(x.bfloat16()).double() - exact).norm())
        with package.apply(low):
            errors.append((low(x.bfloat16()).double() - exact).norm())
            high = low(x.bfloat16())
            assert high.dtype == torch.bfloat16
        with package.apply(low, mode="infer"):
            assert torch.equal(low(x.bfloat16()), high)
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(
    ("name", "mods", "mode"),
    [
        ("dcn", HIGH, "bfloat16"),
        ("wukong", f"{HIGH}, {FUSED}", "bfloat16"),
        ("dcn", HIGH, "autocast"),
        ("wukong", HIGH, "autocast"),
        ("dcn", HIGH, "compiled"),
        ("wukong", f"{HIGH}, {FUSED}", "compiled"),
    ],
)
def test_dtypes_and_gradients_are_the_models(workplace: Workplace, name: str, mods: str, mode: str) -> None:
    factory, inputs, model, x = model_of(workplace, name)
    _, _, package = workplace.make(factory, mods=mods, inputs=inputs)
    if mode == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()

    def run(each: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = each(x)
        grads = torch.autograd.grad(y.float().square().mean(), list(each.parameters()))
        return {"y": y, **dict(zip(dict(model.named_parameters()), grads, strict=True))}

    expected = run(model)
    try:
        with package.apply(model):
            each = torch.compile(model, fullgraph=True, backend="aot_eager") if mode == "compiled" else model
            found = run(each)
    finally:
        torch._dynamo.reset()
    for key, value in found.items():
        assert value.dtype == expected[key].dtype, key
        assert chains.error(value, expected[key]) < (1e-4 if mode == "compiled" else 0.2), key


@pytest.mark.parametrize(("name", "mods"), [("dcn", HIGH), ("wukong", HIGH), ("wukong", f"{HIGH}, {FUSED}")])
def test_beside_chains_in_fp8_sums_are_float32(workplace: Workplace, name: str, mods: str) -> None:
    factory, inputs, model, x = model_of(workplace, name)
    _, files, package = workplace.make(factory, TRANSPOSED, mods, inputs)
    if name == "dcn":
        assert "add_1_wide = kernels.cross_1(" in files["modules.py"]
    _, _, alone = workplace.make(factory, TRANSPOSED, "", inputs)
    dy = torch.randn(64, 1)
    with alone.apply(model):
        expected = chains.gradients(model, x, dy)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    for key, value in found.items():  # in float32 nothing changes but the roundings of FP8
        assert chains.error(value, expected[key]) < 0.15, key
    low = copy.deepcopy(model).bfloat16()
    with package.apply(low) as patch:
        low(x.bfloat16()).float().sum().backward()
        patch.verify()
    assert all(parameter.grad is None or parameter.grad.dtype == torch.bfloat16 for parameter in low.parameters())
    with package.apply(model, mode="infer") as patch, torch.no_grad():
        assert chains.error(model(x), found["y"]) < 0.05
        patch.verify(backward=False)


def test_each_layer_alone_where_the_layers_are_named(workplace: Workplace) -> None:
    factory, inputs, model, x = model_of(workplace, "wukong")
    plan, files, package = workplace.make(
        factory, mods='{use: residual_high_precision, match: "layers.*"}', inputs=inputs
    )
    assert [binding.modules for binding in plan.bindings] == [("layers.0", "layers.1")]
    assert "return norm_wide.to(norm_dtype)" in files["modules.py"]
    equal_but_for_rounding(model, package, x, limit=2e-4)


def test_where_the_model_cannot_be_traced_the_modules_that_add_are_taken(workplace: Workplace) -> None:
    plan, _, package = workplace.make("hidden", mods=HIGH)
    assert plan.mods[0].unchanged[0].name == ""
    assert "with torch.no_grad()" in plan.mods[0].unchanged[0].reason
    assert {name for binding in plan.bindings for name in binding.modules} == {"cross.0", "cross.1", "cross.2"}
    equal_but_for_rounding(workplace.models.hidden(), package, torch.randn(9, 6, 16))


@pytest.mark.parametrize(
    ("factory", "mods", "said"),
    [
        ("tower", HIGH, "policy.yaml:5:8: the model has nothing that residual_high_precision could change"),
        ("dcnv2", '{use: residual_high_precision, match: "crosses"}', "'crosses' matches no module; did you mean"),
        ("dcnv2", '{use: residual_high_precision, match: "over"}', "residual_high_precision cannot change 'over'"),
        ("in_place", '{use: residual_high_precision, match: "body"}', "cannot change 'body': changes a tensor"),
        ("dcnv2", f'{HIGH}, {{use: residual_high_precision, match: "cross.1"}}', "changes it already (mod 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_an_error_at_its_place(
    workplace: Workplace, factory: str, mods: str, said: str
) -> None:
    with pytest.raises(InputError) as raised:
        workplace.make(factory, mods=mods)
    assert said in str(raised.value)
    assert str(raised.value).startswith("policy.yaml:5:")


@pytest.mark.parametrize(("factory", "said"), [("on_meta", "on the meta device"), ("faked", "a FakeTensor")])
def test_a_model_without_numbers_is_refused_with_what_to_do(workplace: Workplace, factory: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        workplace.make(factory, mods=HIGH, inputs="deep_inputs")
    assert f"the model itself: its inputs cannot be captured: 'norms.0.weight' is {said}" in str(raised.value)
    assert "forwards are run to be checked: build the model with weights, random ones do" in str(raised.value)
    plan, _, _ = workplace.make(factory, mods=f"{HIGH[:-1]}, optional: true}}", inputs="deep_inputs")
    assert len(plan.sites) == 26
    assert [each.name for each in plan.mods[0].unchanged] == [""]


def test_inputs_without_numbers_are_refused(workplace: Workplace) -> None:
    with pytest.raises(
        InputError, match=r"policy.yaml:3:\d+: model.inputs: a tensor that \S+ returned is a FakeTensor"
    ):
        workplace.make("deep", mods=HIGH, inputs="faked_inputs")

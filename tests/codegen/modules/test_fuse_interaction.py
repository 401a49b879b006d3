"""`fuse_interaction` from the policy to training: what is fused, for whom, that it is exact, and what is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loka.errors import InputError
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace, equal_but_for_rounding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]


def test_cross_layers_of_a_model_that_is_kept_are_fused_and_exact(workplace: Workplace) -> None:
    plan, files, package = workplace.make("dcnv2")
    assert [binding.modules for binding in plan.bindings] == [("",)]
    text = files["modules.py"]
    assert "up = torch.nn.functional.linear(down, self.cross[0].up.weight)\n" in text
    assert "add, flatten_passed = kernels.dcnv2_cross(up, self.cross[0].up.bias, flatten)" in text
    assert "add_2 = kernels.dcnv2_cross_3(up_2, self.cross[2].up.bias, " in text
    assert {site.site.name: site.region for site in plan.sites}["cross.1.up"] == ("linear", "mul", "add")
    (said,) = plan.mods
    assert said.exact
    assert [(each.owner, each.sites, each.what) for each in said.rewritten] == [
        (f"cross.{number}", (f"cross.{number}.up",), "a cross layer, 96 wide") for number in range(3)
    ]
    model = workplace.models.dcnv2()
    for batch in (33, 1):
        equal_but_for_rounding(model, package, torch.randn(batch, 6, 16))
    assert type(model).__name__ == "DCNv2"


def test_one_layer_of_those_that_match(workplace: Workplace) -> None:
    _, files, package = workplace.make("dcnv2", mods='{use: fuse_interaction, match: "cross.1"}')
    assert files["modules.py"].count("kernels.cross_1(") == 1
    assert "_passed" not in files["modules.py"]
    equal_but_for_rounding(workplace.models.dcnv2(), package, torch.randn(9, 6, 16))


def test_where_the_whole_cannot_be_traced_each_layer_is_fused_alone(workplace: Workplace) -> None:
    plan, files, package = workplace.make("hidden")
    assert {name for binding in plan.bindings for name in binding.modules} == {"cross.0", "cross.1", "cross.2"}
    assert "return kernels.cross(up, self.up.bias, x0, x)" in files["modules.py"]
    equal_but_for_rounding(workplace.models.hidden(), package, torch.randn(9, 6, 16))


@pytest.mark.parametrize("fuse", ["auto", "always"])
def test_beside_linears_in_fp8(workplace: Workplace, fuse: str) -> None:
    rules = f"compute: fp8, scaling: rowwise, fuse: {fuse}"
    _, files, package = workplace.make("dcnv2", rules)
    assert "kernels.dcnv2_cross_2(up_1, self.cross[1].up.bias, flatten_passed, add)" in files["modules.py"]
    _, _, alone = workplace.make("dcnv2", f"{rules.replace('always', 'never')}", "")
    model, x, dy = workplace.models.dcnv2(), torch.randn(17, 6, 16), torch.randn(17, 1)
    with alone.apply(model):
        expected = chains.gradients(model, x, dy)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    for key, value in found.items():  # a sum that is rounded once may fall to the other side of an FP8 value
        assert chains.error(value, expected[key].double()) < 0.03, key
    with package.apply(model, mode="infer") as patch, torch.no_grad():
        assert chains.error(model(x), expected["y"].double()) < 0.03
        patch.verify(backward=False)


def test_in_a_chain_the_chain_has_it(workplace: Workplace) -> None:
    plan, files, _ = workplace.make(
        "dcnv2", "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
    )
    assert plan.mods[0].rewritten[0].what == "a cross layer, 96 wide, in the chain of its GEMMs"
    assert "_cross" not in files["modules.py"]
    assert "kernels.dcnv2(" in files["modules.py"]


def test_compiled_under_autocast_and_without_gradients(workplace: Workplace) -> None:
    _, _, package = workplace.make("dcnv2")
    model = workplace.models.dcnv2()
    x, dy = torch.randn(8, 6, 16), torch.randn(8, 1)
    exact = chains.gradients(copy.deepcopy(model), x, dy)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    try:
        with package.apply(model):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            found = chains.gradients(compiled, x, dy)
            for key, value in exact.items():
                torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)
            with torch.autocast("cpu", torch.bfloat16):
                cast = model(x)
                cast.sum().backward()
            assert cast.dtype == plain.dtype
            assert (cast - plain).norm() <= 0.02 * plain.norm()
            model.cross[1].up.bias.requires_grad_(False)
            model.zero_grad()
            model(x).sum().backward()
            assert model.cross[1].up.bias.grad is None
            assert model.cross[0].up.bias.grad is not None
    finally:
        torch._dynamo.reset()


SHAPES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["wukong", "dcn"]),
        "embeddings": st.sampled_from([6, 10, 16]),
        "dim": st.integers(3, 20),
        "layers": st.integers(1, 3),
        "rank": st.integers(1, 6),
        "mods": st.booleans(),
    }
)


@pytest.mark.filterwarnings("ignore::loka.dispatch.NewModelWarning")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(  # blocks of the norm cut embeddings, and no embedding divides them
    shape={"kind": "wukong", "embeddings": 16, "dim": 3, "layers": 1, "rank": 3, "mods": True}, batch=2
)
@given(shape=SHAPES, batch=st.integers(1, 9))
def test_any_shape_is_the_same_function(workplace: Workplace, shape: dict[str, object], batch: int) -> None:
    workplace.models.SIZES.clear()
    workplace.models.SIZES.update(shape)
    wukong = shape["kind"] == "wukong"
    normed = "{use: block_norm, optional: true}, " if shape["mods"] else ""
    _, files, package = workplace.make("sized", mods=f"{normed}{{use: fuse_interaction}}", inputs="sized_inputs")
    for kind in ("fm_interaction", "concat_norm") if wukong else ("cross",):
        assert re.search(rf"kernels\.\w*{kind}", files["modules.py"]), kind
    x = workplace.models.sized_inputs(batch)[0]
    model = workplace.models.sized()
    if hasattr(package, "adapt"):
        package.adapt(model)
    equal_but_for_rounding(model, package, x, limit=2e-4)


@pytest.mark.parametrize(("rank", "said"), [(6, "K 6 padded to 8, N 30 left to fuse_interaction"), (16, None)])
def test_pad_alignment_leaves_the_widths_of_cross_layers(workplace: Workplace, rank: int, said: str | None) -> None:
    workplace.models.SIZES.clear()
    workplace.models.SIZES.update(kind="dcn", embeddings=6, dim=5, layers=2, rank=rank, mods=False)
    plan, files, package = workplace.make(
        "sized", mods="{use: pad_alignment}, {use: fuse_interaction}", inputs="sized_inputs"
    )
    pad, fuse = plan.mods
    assert [each.what for each in fuse.rewritten] == ["a cross layer, 30 wide"] * 2
    assert ", flatten_passed = kernels.dcnv2_cross(" in files["modules.py"]
    padded = {each.site: each.what for each in pad.rewritten}
    left = {each.name: each.reason for each in pad.unchanged}
    for layer in range(2):
        assert padded[f"cross.{layer}.down"].startswith("K 30 padded to 32")
        assert padded.get(f"cross.{layer}.up") == said
        assert ("which fuse_interaction takes with N as it is" in left.get(f"cross.{layer}.up", "")) == (said is None)
    for batch in (7, 1):
        equal_but_for_rounding(workplace.models.sized(), package, workplace.models.sized_inputs(batch)[0], limit=2e-4)


@pytest.mark.parametrize(
    ("factory", "mods", "said"),
    [
        ("tower", "{use: fuse_interaction}", "policy.yaml:5:8: the model has nothing that fuse_interaction could"),
        ("dcnv2", '{use: fuse_interaction, match: "crosses.*"}', "'crosses.*' matches no module; did you mean 'cross"),
        ("dcnv2", '{use: fuse_interaction, match: ["over", "cross.*"]}', "fuse_interaction cannot change 'over': "),
        ("dcnv2", '{use: fuse_interaction, match: "over.*"}', "can change nothing of what it matches: 'over.0': "),
        ("in_place", '{use: fuse_interaction, match: "body"}', "'body': its forward changes a tensor in place: "),
        ("dcnv2", '{use: fuse_interaction}, {use: fuse_interaction, match: "cross.*"}', "changes it already (mod 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_fused_is_an_error_at_its_place(
    workplace: Workplace, factory: str, mods: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        workplace.make(factory, mods=mods)
    assert said in str(error.value)
    assert str(error.value).startswith("policy.yaml:5:")


def test_optional_excuses_it(workplace: Workplace) -> None:
    plan, _, _ = workplace.make("tower", mods="{use: fuse_interaction, optional: true}")
    assert plan.bindings == ()


@pytest.mark.parametrize(
    ("inputs", "compute", "said"),
    [
        (
            "thick_inputs",
            "keep",
            "the model itself: no kernel mixes 16 embeddings of 2304 at rank 4: a sample may have 32768",
        ),
        (
            "thin_inputs",
            "fp8",
            "the model itself: its mixing layer multiplies by 'rank' in FP8, and kernels mix in the model's",
        ),
    ],
)
def test_sizes_without_a_kernel_and_sites_in_fp8_are_named(
    workplace: Workplace, inputs: str, compute: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        workplace.make("thick", f"compute: {compute}", inputs=inputs)
    assert said in str(error.value)

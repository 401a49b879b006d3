"""`fuse_interaction` from the policy to training: what is fused, for whom, that it is exact, and what is refused."""

from __future__ import annotations

import copy
import re
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.errors import InputError
from loka.mods.rewriting.fused_interactions import CROSS
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace, equal_but_for_rounding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]


WUKONG = {"kind": "wukong", "embeddings": 16, "dim": 24, "layers": 2, "rank": 4}
CHAINS = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"


def trained(model: nn.Module, package: ModuleType) -> list[Tensor]:
    """The Parameters after three steps of a patched model."""
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(3)
    with package.apply(model) as patch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(17, 6, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        patch.verify()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("match", ["", ', match: "cross.*"', ', match: "cross.1"'])
@pytest.mark.parametrize("defaults", ["compute: keep", "compute: fp8, scaling: rowwise, fuse: auto", CHAINS])
def test_cross_layers_stay_as_they_are_without_the_mod(workplace: Workplace, defaults: str, match: str) -> None:
    plan, files, package = workplace.make("dcnv2", defaults, f"{{use: fuse_interaction{match}}}")
    (said,) = plan.mods
    owners = ["cross.1"] if "1" in match else [f"cross.{number}" for number in range(3)]
    assert [(each.name, each.reason) for each in said.unchanged] == [(owner, CROSS) for owner in owners]
    assert (said.rewritten, plan.interactions) == ((), ())
    without, _, alone = workplace.make("dcnv2", defaults, "")
    assert plan.bindings == without.bindings
    assert ("kernels.dcnv2(" in files["modules.py"]) == (defaults == CHAINS)  # the chain has them
    found, expected = trained(workplace.models.dcnv2(), package), trained(workplace.models.dcnv2(), alone)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_compiled_under_autocast_and_without_gradients(workplace: Workplace) -> None:
    workplace.models.SIZES.update(WUKONG)
    _, _, package = workplace.make("sized", inputs="sized_inputs")
    model = workplace.models.sized()
    x, dy = torch.randn(8, 16, 24), torch.randn(8, 1)
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
            model.layers[1].rank.requires_grad_(False)
            model.zero_grad()
            model(x).sum().backward()
            assert model.layers[1].rank.grad is None
            assert model.layers[0].rank.grad is not None
    finally:
        torch._dynamo.reset()


SHAPES = st.fixed_dictionaries(
    {
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
    shape={"embeddings": 16, "dim": 3, "layers": 1, "rank": 3, "mods": True}, batch=2
)
@given(shape=SHAPES, batch=st.integers(1, 9))
def test_any_shape_is_the_same_function(workplace: Workplace, shape: dict[str, object], batch: int) -> None:
    workplace.models.SIZES.clear()
    workplace.models.SIZES.update(shape, kind="wukong")
    normed = "{use: block_norm, optional: true}, " if shape["mods"] else ""
    _, files, package = workplace.make("sized", mods=f"{normed}{{use: fuse_interaction}}", inputs="sized_inputs")
    for kind in ("fm_interaction", "concat_norm"):
        assert re.search(rf"kernels\.\w*{kind}", files["modules.py"]), kind
    x = workplace.models.sized_inputs(batch)[0]
    model = workplace.models.sized()
    if hasattr(package, "adapt"):
        package.adapt(model)
    equal_but_for_rounding(model, package, x, limit=2e-4)


@pytest.mark.parametrize(
    ("factory", "mods", "said"),
    [
        ("tower", "{use: fuse_interaction}", "policy.yaml:5:8: the model has nothing that fuse_interaction could"),
        ("dcnv2", '{use: fuse_interaction, match: "crosses.*"}', "'crosses.*' matches no module; did you mean 'cross"),
        ("dcnv2", '{use: fuse_interaction, match: ["over", "cross.*"]}', "fuse_interaction cannot change 'over': "),
        ("dcnv2", '{use: fuse_interaction, match: "over.*"}', "can change nothing of what it matches: 'over.0': "),
        ("in_place", '{use: fuse_interaction, match: "body"}', "'body': changes a tensor in place: "),
        ("sized", '{use: fuse_interaction}, {use: fuse_interaction, match: "layers.*"}', "changes it already (mod 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_fused_is_an_error_at_its_place(
    workplace: Workplace, factory: str, mods: str, said: str
) -> None:
    workplace.models.SIZES.update(WUKONG)
    with pytest.raises(InputError) as error:
        workplace.make(factory, mods=mods, inputs="sized_inputs" if factory == "sized" else "inputs")
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

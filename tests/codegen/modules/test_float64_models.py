"""Models in float64: kernels that compute in float32 are not put into what stays as the model has it."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.plan.plan import Plan
from loka.plan.rewrite.rewrites import FLOAT64
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

KEPT = "compute: keep, fuse: always"
TRANSPOSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
WRITTEN = ["layer_norm", "linear", "layer_norm", "silu"]


def regions(plan: Plan) -> dict[str, list[str]]:
    return {site.site.name: list(site.region) for site in plan.sites}


@pytest.mark.parametrize(
    ("factory", "fused"),
    [("mixed_low", ["low.1", "high.1"]), ("mixed", ["low.1"]), ("mixed_high", [])],
)  # fmt: skip
def test_a_kept_linear_in_float64_keeps_its_neighbours(workplace: Workplace, factory: str, fused: list[str]) -> None:
    inputs = "deep_inputs_float64" if factory == "mixed_high" else "deep_inputs"
    plan, _, package = workplace.make(factory, KEPT, mods="", inputs=inputs)
    assert regions(plan) == {name: WRITTEN if name in fused else [] for name in ("low.1", "high.1")}
    assert {site.region_note for site in plan.sites if site.site.name not in fused} <= {FLOAT64}
    model, (x,) = getattr(workplace.models, factory)(), getattr(workplace.models, inputs)(16)
    expected = model(x)
    with package.apply(model):
        found = model(x)
    assert found.dtype == expected.dtype
    if fused:
        assert 0 < chains.error(found, expected) < 1e-6  # the part in float32
    else:
        assert torch.equal(found, expected)


def test_chains_in_fp8_take_the_neighbours_in_float64_too(workplace: Workplace) -> None:
    plan, _, package = workplace.make("mixed_high", TRANSPOSED, mods="", inputs="deep_inputs_float64")
    assert regions(plan) == {"low.1": WRITTEN, "high.1": WRITTEN}  # of one dtype: the cast between them is idle
    model, (x,) = workplace.models.mixed_high(), workplace.models.deep_inputs_float64(64)
    expected = model(x)
    with package.apply(model) as patch:
        found = model(x)
        found.sum().backward()
        patch.verify()
    assert found.dtype == torch.float64
    assert 1e-3 < chains.error(found, expected) < 0.15  # of FP8, next to which float32 is exact


@pytest.mark.slow
def test_interactions_in_float64_are_left_with_the_reason(workplace: Workplace) -> None:
    workplace.models.SIZES.update(kind="wukong", embeddings=16, dim=24, layers=2, rank=4)
    with pytest.raises(InputError) as raised:
        workplace.make("sized_float64", inputs="sized_inputs_float64")
    assert f"fuse_interaction can change nothing of what it matches: 'layers.0', 'layers.1': {FLOAT64}" in str(
        raised.value
    )
    mods = "{use: fuse_interaction, optional: true}"
    plan, _, package = workplace.make("sized_float64", mods=mods, inputs="sized_inputs_float64")
    assert [(each.name, each.reason) for each in plan.mods[0].unchanged] == [(f"layers.{n}", FLOAT64) for n in range(2)]
    model, (x,) = workplace.models.sized_float64(), workplace.models.sized_inputs_float64(16)
    expected = model(x)
    with package.apply(model):
        assert torch.equal(model(x), expected)

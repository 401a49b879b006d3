"""A policy with mods, generated, applied and trained: text as by hand, and the function of the adapted model."""

from __future__ import annotations

import ast
import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen.modules.binding_text import adaptation_text
from loka.mods.adaptation import Adaptation
from loka.templating.wrap import wrap
from loka.zoo.wukong import Wukong, WukongSizes
from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore:.*is on cpu.*:loka.dispatch.dispatch_errors.LokaWarning")

SIZES = WukongSizes(embeddings=16, dim=32, layers=2, rank=4, hidden=48)
MODS = "{use: no_bias}, {use: block_norm, block: 32}, {use: hard_swish}"


def build() -> nn.Module:
    """The model of the policy."""
    return Wukong(SIZES)


def inputs(batch: int) -> tuple[Tensor, ...]:
    """What it is called with."""
    return (torch.randn(batch, SIZES.embeddings, SIZES.dim),)


@pytest.fixture
def make(package: Make) -> Make:
    """The plan under these defaults and mods, the files of its package, and the package."""
    return lambda name, defaults, mods=MODS: package(
        name,
        f'version: 1\nname: modded\nmodel: {{factory: "{__name__}:build", inputs: "{__name__}:inputs", '
        f"batch_size: 32}}\ndefaults: {{{defaults}}}\nmods: [{mods}]\n"
        "rules:\n  - {match: {max_n: 8}, compute: keep}\n",
    )


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    named = dict(model.named_parameters())
    y = model(x)
    dy = torch.linspace(-1, 2, y.numel()).view_as(y)
    return {"y": y, **dict(zip(("x", *named), torch.autograd.grad(y, [x, *named.values()], dy), strict=True))}


@pytest.mark.slow
def test_the_package_adapts_the_model_that_it_was_planned_for(make: Make) -> None:
    plan, _, package = make("modded_keep", "compute: keep, fuse: always")
    assert plan.adaptations == package.ADAPTATIONS
    torch.manual_seed(0)
    model = build()
    with pytest.warns(dispatch.NewModelWarning, match=r"modded_keep changed the model \(no_bias .* has to be trained"):
        package.adapt(model)
    plain = copy.deepcopy(model)
    patch = package.apply(model)
    (x,) = inputs(8)
    x.requires_grad_()
    found, expected = gradients(model, x), gradients(plain, x)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-4, atol=2e-5, msg=name)
    patch.remove()
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_step_in_fp8_after_apply_alone(make: Make) -> None:
    defaults = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
    plan, _, package = make("modded_fp8", defaults)
    torch.manual_seed(0)
    model = build()
    state = copy.deepcopy(model.state_dict())
    with pytest.warns(dispatch.NewModelWarning):
        patch = package.apply(model)
    plain = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.NewModelWarning)
        package.adapt(plain)
    with pytest.raises(dispatch.ConvertError, match="drop=True leaves them out"):
        package.convert(state)
    converted = package.convert(state, drop=True)
    plain.load_state_dict(converted)
    model.load_state_dict(converted)
    (x,) = inputs(32)
    x.requires_grad_()
    found, expected = gradients(model, x), gradients(plain, x)
    patch.verify()
    assert plan.share_fp8 > 0.5
    for name, value in found.items():
        error = (value - expected[name]).norm() / expected[name].norm()
        assert error < 0.3, name
    assert not torch.equal(found["y"], expected["y"])


@pytest.mark.slow
def test_a_package_without_mods_says_nothing_of_them(make: Make) -> None:
    _, files, package = make("modless", "compute: keep, fuse: always", mods="")
    text = files["__init__.py"]
    assert "adapt" not in text.lower()
    assert "convert" not in text
    assert not hasattr(package, "adapt")


REPEATED = {
    "one name a layer": ([f"layers.{i}.norm" for i in range(12)], 1),
    "several names a layer": ([f"layers.{i}.fmb.{j}" for i in range(12) for j in (0, 3, 6)], 1),
    "between others": (["embed.a", *(f"layers.{i}.fmb.{j}" for i in range(9) for j in (1, 4)), "head.norm"], 3),
    "two runs": ([f"a.{i}.norm" for i in range(20)] + [f"b.{i}.norm" for i in range(4, 30, 2)], 2),
    "no pattern": ([f"module_with_a_long_name_{i * i}.norm" for i in range(12)], 12),
    "one line": (["a.0", "a.1", "a.2"], 3),
    "odd names": ([f"größe.{i}.a'\"b" for i in range(20)], 20),
}


@pytest.mark.parametrize("case", REPEATED)
def test_long_lists_of_modules_stay_short_and_are_the_same(case: str) -> None:
    names, items = REPEATED[case]
    adaptation = Adaptation("block_norm", tuple(names), "torch.nn.modules.normalization.LayerNorm", (("block", 64),))
    text = wrap("\n".join(adaptation_text(adaptation)))
    assert eval(f"dispatch.Adaptation({text})", {"dispatch": dispatch}) == adaptation  # noqa: S307 - of our own text
    modules = text[text.index("modules=") + 8 :].split(",\n        replaces=")[0]
    assert len(ast.parse(modules, mode="eval").body.elts) == items
    assert max(map(len, text.split("\n"))) <= 120

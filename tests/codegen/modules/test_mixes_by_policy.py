"""A Wukong whose small products, and whose concatenation, residual and norm, are kernels by policy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.zoo.wukong import Wukong, WukongSizes
from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

SIZES = WukongSizes(embeddings=16, dim=24, layers=2, rank=4, hidden=48)


def build() -> nn.Module:
    """The model of the policy."""
    return Wukong(SIZES)


def inputs(batch: int) -> tuple[Tensor, ...]:
    """What it is called with."""
    return (torch.randn(batch, SIZES.embeddings, SIZES.dim),)


class Mixing(nn.Module):
    """A mixing layer whose products are its result."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, torch.matmul(x.transpose(1, 2), self.rank))


def build_returned() -> nn.Module:
    """A model of one such layer."""
    return nn.Sequential(Mixing(), nn.Flatten(), nn.Linear(36, 1))


def inputs_returned(batch: int) -> tuple[Tensor]:
    """What it is called with."""
    return (torch.randn(batch, 9, 32),)


@pytest.fixture
def make(package: Make) -> Make:
    """The plan under these defaults, the files of its package, and the package."""
    return lambda name, defaults, mods="{use: fuse_interaction}": package(
        name,
        f'version: 1\nname: mixed\nmodel: {{factory: "{__name__}:build", inputs: "{__name__}:inputs", '
        f"batch_size: 32}}\ndefaults: {{{defaults}}}\nmods: [{mods}]\nrules:\n"
        "  - {match: {max_n: 8}, compute: keep}\n  - {match: {max_k: 16}, compute: keep, optional: true}\n",
    )


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    named = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}  # of a compiled model
    y = model(x)
    return {"y": y, **dict(zip(("x", *named), torch.autograd.grad(y, [x, *named.values()], dy), strict=True))}


@pytest.mark.slow
def test_kept_products_are_mixed_and_joined_and_give_what_the_model_gives(make: Make) -> None:
    plan, files, package = make("gen_mixed_plain", "compute: keep, fuse: always")
    sites = {site.site.name: site for site in plan.sites}
    assert sites["layers.0.rank"].region == sites["layers.1.compress"].region == ("transpose", "matmul", "matmul")
    calls = files["modules.py"].count("kernels.layers_0_fm_interaction(")
    assert calls == 2
    assert "torch.cat(" not in files["modules.py"]
    torch.manual_seed(0)
    model = build()
    patched = copy.deepcopy(model)
    x, dy = inputs(7)[0].requires_grad_(), torch.randn(7, 1)
    with package.apply(patched):
        expected, found = gradients(model, x, dy), gradients(patched, x, dy)
        called = torch.compile(patched, fullgraph=True, backend="aot_eager")
        compiled = gradients(called, x, dy)
        with torch.no_grad():
            torch.testing.assert_close(called(x), patched(x))
        for name, value in expected.items():
            for got in (found[name], compiled[name]):
                assert (got - value).norm() <= 1e-4 * value.norm() + 1e-7, name
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x) - patched(x)).norm() <= 0.02 * expected["y"].norm()
    with package.apply(patched, mode="infer"), torch.no_grad():
        assert (patched.eval()(x) - expected["y"]).norm() <= 1e-4 * expected["y"].norm()


@pytest.mark.slow
def test_they_stand_beside_chains_in_fp8(make: Make) -> None:
    _, files, package = make(
        "gen_mixed_fp8", "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
    )
    assert "kernels.layers_0_concat_norm(view" in "".join(files["modules.py"].split())
    torch.manual_seed(0)
    model = build()
    x, dy = inputs(16)[0].requires_grad_(), torch.randn(16, 1)
    expected = gradients(model, x, dy)
    with package.apply(model) as patch:
        found = gradients(model, x, dy)
        patch.verify()
    assert 0.0 < (found["y"] - expected["y"]).norm() <= 0.2 * expected["y"].norm()
    for name in ("x", "layers.0.rank", "layers.1.compress", "layers.0.norm.weight"):
        assert (found[name] - expected[name]).norm() <= 0.3 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["auto", "always"])
def test_without_the_mod_they_stay_as_they_are(make: Make, fuse: str) -> None:
    _, files, _ = make("gen_unmixed", f"compute: fp8, scaling: rowwise, fuse: {fuse}", "")
    assert "fm_interaction" not in files["modules.py"]
    assert "concat_norm" not in files["modules.py"]


@pytest.mark.slow
def test_a_layer_that_returns_what_it_mixed_gives_it(package: Make) -> None:
    _, files, returned = package(
        "gen_mixed_returned",
        f'version: 1\nname: mixed\nmodel: {{factory: "{__name__}:build_returned", '
        f'inputs: "{__name__}:inputs_returned", batch_size: 32}}\ndefaults: {{compute: keep, fuse: always}}\n'
        "mods: [{use: fuse_interaction}]\n",
    )
    assert "return bmm" in files["modules.py"]
    torch.manual_seed(0)
    model = build_returned()
    patched = copy.deepcopy(model)
    x, dy = inputs_returned(7)[0].requires_grad_(), torch.randn(7, 1)
    with returned.apply(patched):
        expected, found = gradients(model, x, dy), gradients(patched, x, dy)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)

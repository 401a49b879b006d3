"""Chains with a BlockNorm, in the forms that models write it: found, generated, and right against float64."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.codegen import render_package
from loka.graph.patterns.linear_chain import StaticOperands, find_chains
from loka.kernels.fused.norm.norm_spec import BLOCK
from loka.mods.norms import BlockNorm
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

pytestmark = pytest.mark.slow

KNOWN = StaticOperands(frozenset({"block_norm", "rms_norm"}), frozenset({"hardswish"}))


class ByShape(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return F.rms_norm(y.view(-1, 256), (256,), None, 1e-6).view(y.shape)


class BySizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, eps=1e-6, elementwise_affine=False)

    def forward(self, y: Tensor) -> Tensor:
        rows, width = y.shape
        out: Tensor = self.norm(y.view(-1, 256)).view(rows, width)
        return out


class ByReshape(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return torch.rms_norm(y.reshape(y.size(0), -1, 256), (256,), eps=1e-6).reshape_as(y)


class OtherShape(nn.Module):
    """The result has another shape than the input: no norm of it."""

    def forward(self, y: Tensor) -> Tensor:
        return F.rms_norm(y.view(-1, 256), (256,), None, 1e-6).view(-1, 2, 256).flatten(1)


class ReadTwice(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        blocks = y.unflatten(-1, (-1, 256))
        return F.rms_norm(blocks, (256,), eps=1e-6).flatten(-2) + blocks.sum()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, eps=1e-6)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.norm(y.unflatten(-1, (-1, 256))).flatten(-2)
        return out


def body(norm: Callable[[], nn.Module], hidden: int = 512, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, hidden, bias=bias), norm(), nn.Hardswish(), nn.Linear(hidden, 32, bias=bias)
    )  # fmt: skip


FORMS = [BlockNorm, ByShape, BySizes, ByReshape]


def stages_of(
    module: nn.Module, sizes: dict[str, tuple[int, int]] | None = None, known: StaticOperands = KNOWN
) -> list[tuple[str | None, ...]]:
    """For each chain, the kinds of its stages' norms."""
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    found = find_chains(forward, forward.regions, known, sizes=sizes)
    return [tuple(stage.after.kind if stage.after else None for stage in chain.stages) for chain in found]


SIZES = {"body.0": (48, 512), "body.3": (512, 32)}


@pytest.mark.parametrize("norm", FORMS)
def test_every_form_is_one_chain(norm):
    assert stages_of(body(norm), SIZES) == [("block_norm", None)]


def test_a_block_that_no_kernel_holds_ends_the_chain():
    small = StaticOperands(KNOWN.norms, KNOWN.activations, largest_block=128)
    assert stages_of(body(BlockNorm), SIZES, small) == [(None,), (None,)]
    assert stages_of(body(BlockNorm), SIZES, StaticOperands(KNOWN.norms, KNOWN.activations, 256)) == [
        ("block_norm", None)
    ]


def test_blocks_divide_as_the_canonical_form_shows():
    assert stages_of(body(BlockNorm)) == stages_of(body(ByShape)) == [("block_norm", None)]
    assert stages_of(body(ByShape), {**SIZES, "body.0": (48, 384)}) == [(None,), (None,)]


@pytest.mark.parametrize("norm", [OtherShape, ReadTwice, Weighted, lambda: BlockNorm(2 * 48)])
def test_what_is_no_block_norm_ends_the_chain(norm):
    hidden = 480 if norm not in (OtherShape, ReadTwice, Weighted) else 512
    assert stages_of(body(norm, hidden), {**SIZES, "body.0": (48, hidden)}) == [(None,), (None,)]


def package_of(module: nn.Module, recipe: dict[str, object], folder, name: str) -> ModuleType:
    return plans.import_package(render_package(chains.chain_plan(module, recipe)), folder, name)


@pytest.mark.parametrize("norm", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_against_float64_with_the_same_quantization(norm, bias, tmp_path):
    module = body(norm, bias=bias)
    package = package_of(module, chains.CHAIN, tmp_path, f"gen_blocks_fp8_{norm.__name__}_{bias}".lower())
    source = (tmp_path / package.__name__.split(".")[-1] / "kernels.py").read_text()
    assert source.count("torch.autograd.Function") == 1
    assert "block_norm_hardswish_e4m3_eps_1e_06(" in source
    # The reference quantizes what float64 made, the chain what float32 made: a value may fall to the other side.
    chains.assert_near(package, module, torch.randn(37, 48), torch.randn(37, 32), chains.simulated(module), 2e-3)


def test_bf16_chains_against_float64(tmp_path):
    module = body(BlockNorm, bias=True)
    package = package_of(module, chains.AS_IS, tmp_path, "gen_blocks_plain")
    exact = copy.deepcopy(module).double()
    chains.assert_near(package, module, torch.randn(37, 48), torch.randn(37, 32), exact, 1e-5)


@pytest.mark.parametrize("recipe", [chains.CHAIN, chains.AS_IS], ids=["fp8", "plain"])
def test_batches_without_rows_and_zero_rows(recipe, tmp_path):
    module = body(BlockNorm)
    package = package_of(module, recipe, tmp_path, f"gen_blocks_empty_{len(str(recipe))}")
    model = chains.Holder(copy.deepcopy(module))
    with package.apply(model):
        empty = torch.randn(0, 48, requires_grad=True)
        model(empty).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (0, 48)
        assert model.body[0].weight.grad.abs().sum() == 0.0
        x = torch.randn(5, 48)
        x[1], x[3, 0] = 0.0, torch.nan
        y = model(x)
    assert y[1].abs().sum() == 0.0
    assert y[3].isnan().all()
    assert y[[0, 2, 4]].isfinite().all()


def test_a_block_norm_before_the_first_linear(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(BlockNorm(16), nn.Linear(48, 24), nn.Linear(24, 8))
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    (chain,) = find_chains(forward, forward.regions, KNOWN)
    assert chain.first == 0
    assert (chain.stages[0].before.kind, chain.stages[0].before.width) == ("block_norm", 16)
    assert BLOCK != 16
    for recipe, limit in ((chains.CHAIN, 2e-3), (chains.AS_IS, 1e-5)):
        package = package_of(module, recipe, tmp_path, f"gen_blocks_before_{limit < 1e-4}".lower())
        exact = chains.simulated(module) if recipe is chains.CHAIN else copy.deepcopy(module).double()
        chains.assert_near(package, module, torch.randn(9, 48), torch.randn(9, 8), exact, limit)


def test_a_changed_eps_is_noticed_at_apply(tmp_path):
    module = body(BlockNorm)
    package = package_of(module, chains.AS_IS, tmp_path, "gen_blocks_eps")
    changed = chains.Holder(copy.deepcopy(module))
    changed.body[1].eps = 1e-3
    with pytest.raises(Exception, match=r"its child '1' has eps = 0.001, planned was 1e-06"):
        package.apply(changed)


MODEL = """
import torch
from torch import nn

from loka.mods.norms import BlockNorm


class Layer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(
            nn.Linear(64, 512, bias=False), BlockNorm(block), nn.Hardswish(),
            nn.Linear(512, 512, bias=False), BlockNorm(block), nn.Hardswish(),
            nn.Linear(512, 64, bias=False),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def build():
    return nn.Sequential(Layer(256), Layer(256))


def inputs(batch_size):
    return (torch.randn(batch_size, 64, generator=torch.Generator().manual_seed(0)),)
"""
DEFAULTS = {
    "fp8": "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always",
    "plain": "compute: keep, fuse: always",
}


@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_a_policy_makes_one_function_of_a_whole_mlp(kind, tmp_path, monkeypatch):
    module = f"block_model_{kind}"
    (tmp_path / f"{module}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "policy.yaml").write_text(
        f'version: 1\nname: blocks\nmodel: {{factory: "{module}:build", inputs: "{module}:inputs", batch_size: 32}}\n'
        f"defaults: {{{DEFAULTS[kind]}}}\n"
    )
    files = render_package(make_plan("policy.yaml"))
    assert "kernels.mlp(" in files["modules.py"]
    steps = "layer_norm -> linear -> block_norm -> hardswish -> linear -> block_norm -> hardswish -> linear"
    last = " -> residual: x" if kind == "fp8" else ": x"  # sums in FP8
    sizes = " (..., 64), weight_0 (512, 64), weight_1 (512, 512), weight_2 (64, 512) -> (..., 64)."
    assert chains.functions(files["kernels.py"])["mlp"].startswith(steps + last + sizes)
    assert files["kernels.py"].count("(torch.autograd.Function)") == 1
    package = plans.import_package(files, tmp_path, f"gen_blocks_by_policy_{kind}")
    built = importlib.import_module(module)
    model = built.build()
    (x,) = built.inputs(32)
    plain = chains.gradients(copy.deepcopy(model).double(), x.double(), torch.ones(32, 64).double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, torch.ones(32, 64))
        patch.verify()
    for key, value in found.items():
        assert chains.error(value, plain[key]) < (0.15 if kind == "fp8" else 1e-4), key


def test_blocks_with_a_gate_and_a_residual_are_one_chain():
    files = render_package(chains.chain_plan(sums.GatedBlocks()))
    assert files["kernels.py"].count("torch.autograd.Function") == 1
    assert "fused.add_times_residual_keep_block_norm_of_16_silu_e4m3" in files["kernels.py"]
    assert "fused.add_times_summed_block_norm_of_16_silu_backward_residual_out_e4m3" in files["kernels.py"]
    assert "y.unflatten(-1, (3, 16))" in files["kernels.py"]

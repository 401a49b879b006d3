"""Chains with SwishNorm, x * sigmoid(norm(x)) or its hard form: found, generated, and right against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.codegen.chains.chain_shapes import KNOWN
from loka.graph.patterns.linear_chain import find_chains
from loka.graph.source import is_swish_norm
from loka.mods.norms import BlockNorm
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.chain_plans import SwishNorm


class Apart(nn.Module):
    """The other way round, with the children beside one another."""

    def __init__(self, norm: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate = norm, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.norm(x)) * x


class OfAnother(Apart):
    """Multiplies something else than what the norm takes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.norm(x)) * (x + 1.0)


class ReadTwice(Apart):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.norm(x))
        return x * gate + gate


class Squared(Apart):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.norm(x))
        return gate * gate + x


NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": lambda width: nn.RMSNorm(width, eps=1e-5), "block_norm": BlockNorm}
GATES = {"gate_sigmoid": nn.Sigmoid, "gate_hardsigmoid": nn.Hardsigmoid}


def norm_of(kind: str, width: int) -> nn.Module:
    return BlockNorm(16, 1e-5) if kind == "block_norm" else NORMS[kind](width)


def body(kind: str = "layer_norm", gate: str = "gate_sigmoid", form: type[nn.Module] = SwishNorm) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(48, 64), form(norm_of(kind, 64), GATES[gate]()), nn.Linear(64, 32, bias=False),
        form(norm_of(kind, 32), GATES[gate]()), nn.Linear(32, 16),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".norm" in name:
                parameter.add_(torch.randn(parameter.shape) / 2)
    return made


def stages_of(module: nn.Module) -> list[list[tuple[str | None, str | None]]]:
    """For each chain, the kinds of its stages' norms and activations."""
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    found = find_chains(forward, forward.regions, KNOWN)
    return [[(s.after.kind if s.after else None, s.activation) for s in chain.stages] for chain in found]


@pytest.mark.slow
@pytest.mark.parametrize("form", [SwishNorm, Apart])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", NORMS)
def test_swish_norms_are_of_the_chain(kind, gate, form):
    assert stages_of(body(kind, gate, form)) == [[(kind, gate), (kind, gate), (None, None)]]


@pytest.mark.slow
@pytest.mark.parametrize("form", [OfAnother, ReadTwice, Squared])
def test_what_is_no_swish_norm_ends_the_chain(form):
    assert all(activation is None for chain in stages_of(body(form=form)) for _, activation in chain)
    assert len(stages_of(body(form=form))) == 3


def test_what_looks_like_a_swish_norm():
    assert is_swish_norm(SwishNorm(nn.LayerNorm(8), nn.Sigmoid()))
    assert is_swish_norm(Apart(BlockNorm(16), nn.Hardsigmoid()))
    assert not is_swish_norm(SwishNorm(nn.LayerNorm(8), nn.Tanh()))
    assert not is_swish_norm(nn.Sequential(nn.LayerNorm(8), nn.Sigmoid()))
    assert not is_swish_norm(SwishNorm(nn.Linear(8, 8), nn.Sigmoid()))


RECIPES = {"fp8": chains.CHAIN, "plain": chains.AS_IS}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", NORMS)
def test_against_float64_with_the_same_quantization(kind, gate, recipe, tmp_path):
    module = body(kind, gate)
    files = render_package(chains.chain_plan(module, RECIPES[recipe]))
    assert files["kernels.py"].count("(torch.autograd.Function)") == 1
    assert gate in files["kernels.py"]
    package = plans.import_package(files, tmp_path, f"gen_swish_{kind}_{gate}_{recipe}")
    exact = chains.simulated(module) if recipe == "fp8" else copy.deepcopy(module).double()
    limit = 3e-3 if recipe == "fp8" else 1e-5
    chains.assert_near(package, module, 3 * torch.randn(37, 48), torch.randn(37, 16), exact, limit)


@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_without_rows_and_rows_of_zeros_and_nan(recipe, tmp_path):
    module = body("block_norm", "gate_hardsigmoid")
    package = plans.import_package(
        render_package(chains.chain_plan(module, RECIPES[recipe])), tmp_path, f"gen_swish_empty_{recipe}"
    )
    model = chains.Holder(copy.deepcopy(module))
    with package.apply(model):
        empty = torch.randn(0, 48, requires_grad=True)
        model(empty).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (0, 48)
        x = torch.randn(5, 48)
        x[1], x[3, 0] = 0.0, torch.nan
        y = model(x)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()


class Gated(nn.Module):
    """A SwishNorm of a product and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(48, 48), SwishNorm(nn.LayerNorm(48), nn.Sigmoid()), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(x * self.up(x) + x))


def test_after_a_product_and_a_residual(tmp_path):
    torch.manual_seed(0)
    module = Gated()
    files = render_package(chains.chain_plan(module))
    assert "fused.add_times_residual_keep_layer_norm_gate_sigmoid_e4m3" in files["kernels.py"]
    package = plans.import_package(files, tmp_path, "gen_swish_sums")
    chains.assert_near(package, module, torch.randn(37, 48), torch.randn(37, 16), chains.simulated(module), 3e-3)


MODEL = """
import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Sigmoid())

    def forward(self, input):
        return input * self.norm(input)


class Perceptron(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self._linear, self._activation_fn = nn.Linear(inputs, outputs), SwishLayerNorm(outputs)

    def forward(self, input):
        return self._activation_fn(self._linear(input))


def build():
    tower = nn.Sequential(nn.Linear(64, 128), SwishLayerNorm(128), nn.Linear(128, 64), SwishLayerNorm(64))
    return nn.Sequential(tower, Perceptron(64, 64), nn.Linear(64, 1))


def inputs(batch_size):
    return (torch.randn(batch_size, 64, generator=torch.Generator().manual_seed(0)),)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
def test_a_policy_fuses_swish_layer_norms(tmp_path, monkeypatch):
    (tmp_path / "swish_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "policy.yaml").write_text(
        'version: 1\nname: swish\nmodel: {factory: "swish_model:build", inputs: "swish_model:inputs", batch_size: 32}\n'
        "defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}\n"
    )
    files = render_package(make_plan("policy.yaml"))
    assert "fused.add_layer_norm_gate_sigmoid_e4m3(" in files["kernels.py"]
    assert "fused.add_layer_norm_gate_sigmoid(" not in files["kernels.py"]  # one chain goes through all modules
    import swish_model

    model, (x,) = swish_model.build(), swish_model.inputs(32)
    expected = model(x)
    package = plans.import_package(files, tmp_path, "gen_swish_by_policy")
    with package.apply(model) as patch:
        found = model(x)
        assert chains.error(found, expected) < 0.1
        found.sum().backward()
        patch.verify()

"""Chains with a BlockNorm or a SwishNorm, x * sigmoid(norm(x)), in the forms that models write them: what is found."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.patterns.linear_chain import StaticOperands, find_chains
from loka.mods.norms import BlockNorm
from loka.plan.rewrite.rewrites import KERNEL_OPERATIONS
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.chain_bodies import BODIES, Gated, block_body, plan_of, swish_body
from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.slow

KNOWN = StaticOperands(frozenset({"block_norm", "rms_norm"}), frozenset({"hardswish"}))


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


class GateReadTwice(Apart):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.norm(x))
        return x * gate + gate


class Squared(Apart):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.norm(x))
        return gate * gate + x


def stages_of(module: nn.Module, known: StaticOperands = KNOWN) -> list[tuple[str | None, ...]]:
    """For each chain, the kinds of its stages' norms."""
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    found = find_chains(forward, forward.regions, known)
    return [tuple(stage.after.kind if stage.after else None for stage in chain.stages) for chain in found]


def test_a_block_that_no_kernel_holds_ends_the_chain():
    small = StaticOperands(KNOWN.norms, KNOWN.activations, largest_block=128)
    assert stages_of(block_body(BlockNorm), small) == [(None,), (None,)]
    assert stages_of(block_body(BlockNorm), StaticOperands(KNOWN.norms, KNOWN.activations, 256)) == [
        ("block_norm", None)
    ]


@pytest.mark.parametrize("norm", [ReadTwice, Weighted, lambda: BlockNorm(2 * 48)])
def test_what_is_no_block_norm_ends_the_chain(norm):
    hidden = 480 if norm not in (ReadTwice, Weighted) else 512
    assert stages_of(block_body(norm, hidden)) == [(None,), (None,)]


def swish_stages_of(module: nn.Module) -> list[list[tuple[str | None, str | None]]]:
    """For each chain, the kinds of its stages' norms and activations."""
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    found = find_chains(forward, forward.regions, KERNEL_OPERATIONS)
    return [[(s.after.kind if s.after else None, s.activation) for s in chain.stages] for chain in found]


@pytest.mark.parametrize(
    ("kind", "gate"),
    [("layer_norm", "gate_hardsigmoid"), ("rms_norm", "gate_sigmoid"), ("block_norm", "gate_sigmoid")],
)
def test_swish_norms_the_other_way_round_are_of_the_chain(kind, gate):
    """In torchrec's form they are in the table of test_chain_numerics.py."""
    assert swish_stages_of(swish_body(kind, gate, Apart)) == [[(kind, gate), (kind, gate), (None, None)]]


@pytest.mark.parametrize("form", [OfAnother, GateReadTwice, Squared])
def test_what_is_no_swish_norm_ends_the_chain(form):
    found = swish_stages_of(swish_body(form=form))
    assert [activation for chain in found for _, activation in chain] == [None] * 3
    assert len(found) == 3


BLOCKS = """
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
SWISH = """
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
FP8 = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
POLICY = (
    'version: 1\nname: towers\nmodel: {{factory: "{0}:build", inputs: "{0}:inputs", batch_size: 32}}\n'
    "defaults: {{{1}}}\n"
)


@pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")
@pytest.mark.parametrize(
    ("kind", "written", "defaults", "limit"),
    [
        ("blocks", BLOCKS, FP8, 0.15),
        ("kept_blocks", BLOCKS, "compute: keep, fuse: always", 1e-4),
        ("swish", SWISH, FP8, 0.1),
    ],
)
def test_a_policy_makes_one_function_of_a_whole_mlp(kind, written, defaults, limit, package: Make, tmp_path):
    (tmp_path / f"towers_{kind}.py").write_text(written)
    _, files, generated = package(f"gen_towers_{kind}", POLICY.format(f"towers_{kind}", defaults))
    if written is BLOCKS:
        steps = "layer_norm -> linear -> block_norm -> hardswish -> linear -> block_norm -> hardswish -> linear"
        last = ": x" if kind.startswith("kept") else " -> residual: x"  # sums in FP8
        sizes = " (..., 64), weight_0 (512, 64), weight_1 (512, 512), weight_2 (64, 512) -> (..., 64)."
        assert chains.functions(files["kernels.py"])["mlp"].startswith(steps + last + sizes)
        assert files["kernels.py"].count(" = constant(") == 1
    else:
        assert '"add_layer_norm_gate_sigmoid_e4m3"' in files["kernels.py"]
        assert '"add_layer_norm_gate_sigmoid"' not in files["kernels.py"]  # one chain goes through all modules
    built = importlib.import_module(f"towers_{kind}")
    model, (x,) = built.build(), built.inputs(32)
    dy = torch.ones_like(model(x))
    plain = chains.gradients(copy.deepcopy(model).double(), x.double(), dy.double())
    with generated.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    assert chains.error(found["y"], plain["y"]) < limit
    if written is BLOCKS:
        chains.assert_within(found, plain, limit)


def test_an_rms_norm_without_an_eps_takes_torchs_own(planned):
    torch.manual_seed(0)
    body = nn.Sequential(nn.RMSNorm(48), nn.Linear(48, 32), nn.RMSNorm(32), nn.SiLU(), nn.Linear(32, 16))
    assert stages_of(body, KERNEL_OPERATIONS) == [("rms_norm", None)]
    package = planned(chains.chain_plan(body, chains.AS_IS, lambda batch: torch.randn(batch, 48)))
    model = chains.Holder(body)
    with torch.no_grad():
        for linear in (body[1], body[4]):
            linear.weight.mul_(1e-3)
            linear.bias.zero_()
    x, dy = 3e-4 * torch.randn(7, 48), torch.randn(7, 16)  # so small that eps counts, twice
    expected = chains.gradients(copy.deepcopy(model), x, dy)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    chains.assert_within(found, expected, 1e-5)


class WithResidual(Gated):
    """What multiplies the norm is read again, and so is what the norm takes."""

    def forward(self, x: Tensor) -> Tensor:
        u, a = F.silu(self.up(x)).chunk(2, -1)
        return torch.relu(self.out(u * self.norm(a))) + (u + a)[:, :32]


class OfItself(Gated):
    def forward(self, x: Tensor) -> Tensor:
        u, a = F.silu(self.up(x)).chunk(2, -1)
        return torch.relu(self.out(self.norm(a) * a)) + u[:, :32]


class NormReadTwice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        u, a = F.silu(self.up(x)).chunk(2, -1)
        n = self.norm(a)
        return torch.relu(self.out(n * u)) + n.mean()


def multipliers_of(module: nn.Module, known: StaticOperands = KERNEL_OPERATIONS) -> list[bool]:
    """For each chain, whether what stands before or behind one of its linears is multiplied by a matrix."""
    forward = chains.traced(module, lambda batch: torch.randn(batch, 48))
    found = find_chains(forward, forward.regions, known)
    return [any(stage.before_multiplier or stage.multiplier for stage in chain.stages) for chain in found]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", [Gated, WithResidual])
@pytest.mark.parametrize("norm", [nn.LayerNorm(48), nn.RMSNorm(48, elementwise_affine=False)])
@pytest.mark.parametrize("recipe", [chains.AS_IS, chains.CHAIN])
def test_a_norm_times_a_matrix_is_the_head_of_a_chain(planned, form, norm, recipe):
    torch.manual_seed(0)
    body = form(copy.deepcopy(norm))
    for parameter in body.norm.parameters():
        nn.init.normal_(parameter)
    assert multipliers_of(body) == [False, True]
    package = planned(chains.chain_plan(body, recipe, lambda batch: torch.randn(batch, 48)))
    model = chains.Holder(body)
    x, dy = torch.randn(33, 48), torch.randn(33, 32)
    exact = chains.Holder(chains.simulated(body)) if recipe is chains.CHAIN else copy.deepcopy(model).double()
    expected = chains.gradients(exact, x.double(), dy.double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        compiled = chains.gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy)
    chains.assert_within(found, expected, 1e-5 if recipe is chains.AS_IS else 0.03)
    chains.assert_within(compiled, found, 1e-6)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["plain", "fp8"])
@pytest.mark.parametrize("name", ["swiglu", "merged_norm_glu", "gate_unit"])
def test_compiled_as_one_graph_a_gate_is_the_eager_one(planned, name, recipe):
    package, model = planned(plan_of(recipe, name)), chains.Holder(copy.deepcopy(BODIES[name]))
    x, dy = chains.operands(model, 33, 48)
    with package.apply(model):
        found = chains.gradients(model, x, dy)
        compiled = chains.gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy)
    chains.assert_within(compiled, found, 1e-6)


class Gates(nn.Module):
    """A matrix of x alone, times an activation of a product or of a part of it: none is for a kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate, self.down, self.norm = kind, nn.Linear(48, 96), nn.Linear(48, 32), BlockNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate(x).chunk(2, -1)
        match self.kind:
            case "activation_read_twice":
                gate = torch.sigmoid(b)
                out = self.down(gate * a) + gate.mean()
            case "of_itself":
                out = self.down(torch.tanh(b) * b)
            case "one_for_all_rows":
                out = self.down(torch.sigmoid(b) * a[:1])
            case "no_activation":
                out = self.down(torch.softmax(b, -1) * a)
            case "of_blocks":
                out = self.down(self.norm(a) * b)
            case _:
                out = self.down(torch.sigmoid(b) * a)
        result: Tensor = out
        return result


@pytest.mark.parametrize("form", [OfItself, NormReadTwice])
def test_other_products_of_a_norm_are_not(form):
    assert not any(multipliers_of(form(nn.LayerNorm(48))))


@pytest.mark.parametrize(
    "kind", ["activation_read_twice", "of_itself", "one_for_all_rows", "no_activation", "of_blocks"]
)
def test_other_products_of_an_activation_are_not(kind):
    assert not any(multipliers_of(Gates(kind)))


def test_more_columns_than_a_kernel_holds_are_not_multiplied():
    body, known = Gates(""), KERNEL_OPERATIONS
    assert multipliers_of(body) == [False, True]
    assert not any(multipliers_of(body, StaticOperands(known.norms, known.activations, 32)))
    gate = BODIES["gate_unit"]  # of 48 columns, behind linears
    assert multipliers_of(gate) == [True]
    assert not any(multipliers_of(gate, StaticOperands(known.norms, known.activations, 32)))

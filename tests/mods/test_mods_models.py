"""Mods on Wukong and DLRM-DCNv2: what they change, that chains are found and fused, and what the models survive."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from loka import zoo
from loka.codegen import render_package
from loka.graph.ir import Refused
from loka.graph.patterns.linear_chain import StaticOperands, find_chains
from loka.graph.patterns.owners import inline_for
from loka.graph.patterns.region import find_regions
from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import GemmKind
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.kernels.fused.norm.norms import NORMS
from loka.model.build_model import BuiltModel
from loka.mods.adapt import adapt, convert, is_adapted
from loka.zoo.dlrm import DLRM
from loka.zoo.wukong import Wukong, WukongSizes
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import adapted_models as models

pytestmark = pytest.mark.slow

PAPER = ("no_bias", "block_norm", "hard_swish")
SIZES = WukongSizes(embeddings=8, dim=16, layers=2, rank=4, hidden=64)
ALL = [(), *((mod,) for mod in (*PAPER, "norm_first")), PAPER, (*PAPER, "norm_first")]
SOME = [(), ("norm_first",), PAPER, (*PAPER, "norm_first")]


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, SIZES.embeddings, SIZES.dim, generator=torch.Generator().manual_seed(batch)),)


def wukong(*mods: str) -> Wukong:
    torch.manual_seed(0)
    model = Wukong(SIZES)
    models.carried_out(mods, model, *inputs(8))
    return model


Stage = tuple[str, str | None, str | None, str | None]


def stages(model: nn.Module) -> list[list[Stage]]:
    """The chains of all linears: for each the sites with the norm before, the norm and the activation after."""
    found_sites = find_sites(BuiltModel(model, inputs(8), {}, 8))
    sites = [site for site in found_sites.sites if site.kind is GemmKind.LINEAR]
    scopes = inline_for(model, sites, {site.name for site in sites}, found_sites.flow)
    batches = {batch: ModelInputs(inputs(batch)) for batch in (5, 8)}
    examples = capture_examples(model, [scope.owner for scope in scopes], batches)
    known, found = StaticOperands(frozenset(NORMS), frozenset(ACTIVATIONS)), []
    for scope in scopes:
        owner = model.get_submodule(scope.owner)
        forward = trace_forward(owner, scope.owner, examples[scope.owner], inline=scope.inline, sites=scope.sites)
        assert not isinstance(forward, Refused), forward
        for chain in find_chains(forward, find_regions(forward, scope.sites), known):
            found.append(
                [
                    (
                        f"{scope.owner}.{stage.site}",
                        stage.before.kind if stage.before else None,
                        stage.after.kind if stage.after else None,
                        stage.activation,
                    )
                    for stage in chain.stages
                ]
            )
    return found


def test_the_papers_three_leave_weights_the_last_bias_and_blocks():
    live, plain = wukong(*PAPER), wukong()
    kept = [(name, p.shape) for name, p in plain.named_parameters() if p.dim() == 2 or name == "head.out.bias"]
    assert [(name, p.shape) for name, p in live.named_parameters()] == kept
    blocks = [module.block for module in live.modules() if hasattr(module, "block")]
    assert blocks == [32, 64, 64, 16] * 2 + [64] * 3  # of widths of 32, 64 and 16
    assert type(live.head.get_submodule("silu")) is nn.Hardswish


@pytest.mark.parametrize("mods", SOME, ids=lambda mods: "_".join(mods) or "none")
def test_chains_stay_whole_with_each_mod(mods):
    norm = "rms_norm" if "block_norm" in mods else "layer_norm"  # its blocks are as wide as the rows here
    activation = "hardswish" if "hard_swish" in mods else "silu"
    found = stages(wukong(*mods))
    sites = [stage for chain in found for stage in chain]
    assert len(sites) == 2 * 3 + 4
    if "norm_first" not in mods:
        for layer in ("layers.0", "layers.1"):
            assert [
                (f"{layer}.fmb.0", norm, norm, activation),
                (f"{layer}.fmb.3", None, norm, activation),
                (f"{layer}.fmb.6", None, None, None),
            ] in found
    else:
        normed = [(before, after, act) for name, before, after, act in sites if name.endswith((".0", ".3"))]
        # In norm_first, the last three are over blocks of a wider row.
        assert [each for _, *each in normed] == [[None, activation]] * 6
        assert {each[0] for each in normed} <= {norm, "block_norm" if "block_norm" in mods else norm}


@pytest.mark.parametrize("mods", SOME, ids=lambda mods: "_".join(mods) or "none")
def test_wukong_adapts_copies_compiles_and_trains(mods):
    live = wukong()
    adaptations = models.carried_out(mods, wukong(), *inputs(8))
    state = {name: value.clone() for name, value in live.state_dict().items()}
    adapt(live, adaptations)
    live.load_state_dict(convert(state, adaptations, drop=True))
    (x,) = inputs(8)
    y = live(x)
    assert y.isfinite().all()
    for twin in (copy.deepcopy(live), pickle.loads(pickle.dumps(live))):  # noqa: S301 - our own bytes
        assert torch.equal(twin(x), y)
        assert is_adapted(twin, adaptations)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(live, backend="eager", fullgraph=True)(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(live(x).float(), y, rtol=0.1, atol=0.1)
    optimizer = torch.optim.SGD(live.parameters(), 0.1)
    losses = []
    for _ in range(20):
        loss = (live(x) - x.mean((1, 2)).unsqueeze(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in live.parameters())


@pytest.mark.parametrize(
    ("mods", "recipe"), [*((mods, chains.CHAIN) for mods in ALL), *((mods, chains.AS_IS) for mods in SOME[2:])]
)
def test_generated_chains_of_adapted_mlps_are_right(mods, recipe, tmp_path):
    torch.manual_seed(3)
    body = models.mlp(48, 64, 32, outputs=16)
    models.carried_out(mods, body, torch.randn(8, 48))
    name = f"gen_mods_{'_'.join(mods)}_{'plain' if recipe is chains.AS_IS else 'fp8'}"
    files = render_package(chains.chain_plan(body, recipe))
    package = plans.import_package(files, tmp_path, name)
    if "norm_first" not in mods:
        assert files["kernels.py"].count("    return run(") == 1
        norm = "rms_norm_unweighted" if "block_norm" in mods else "layer_norm"
        activation = "hardswish" if "hard_swish" in mods else "silu"
        assert f"{norm}_{activation}" in files["kernels.py"]
        assert (f"add_{norm}" in files["kernels.py"]) == ("no_bias" not in mods)
    x, dy = torch.randn(37, 48), torch.randn(37, 16)
    model = chains.Holder(copy.deepcopy(body))
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    exact = copy.deepcopy(body).double() if recipe is chains.AS_IS else chains.simulated(body)
    expected = chains.gradients(chains.Holder(exact), x.double(), dy.double())
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert chains.error(value, expected[key]) < (1e-5 if recipe is chains.AS_IS else 3e-3), key


@pytest.mark.parametrize("mods", SOME[2:], ids="_".join)
def test_dlrm(mods):
    torch.manual_seed(0)
    model: DLRM = zoo.dlrm()
    x = zoo.dlrm_inputs(8)
    adaptations = models.carried_out(mods, model, *x)
    biased = [name for name, module in model.named_modules() if getattr(module, "bias", None) is not None]
    norms = [] if "block_norm" in mods else ["embed.dense.1"]
    assert biased == [*norms, "interact.over.6"]
    live: DLRM = zoo.dlrm()
    state = live.state_dict()
    adapt(live, adaptations)
    live.load_state_dict(convert(state, adaptations, drop=True))
    live(*x).sum().backward()
    assert torch.compile(live, backend="eager", fullgraph=True)(*x).shape == (8,)
    assert {site.name for site in find_sites(BuiltModel(live, x, {}, 8)).sites} == {
        site.name for site in find_sites(BuiltModel(zoo.dlrm(), x, {}, 8)).sites
    }

"""Chains: which statements one function takes whole, and where it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.expression import Ref, RefKind, local
from loka.graph.ir import ForwardIR, Region, Statement
from loka.graph.patterns.linear_chain import LinearChain, StaticOperands, find_chains
from loka.graph.patterns.norm import norm_starting_at
from loka.graph.patterns.owners import RegionScope, inline_for
from loka.graph.patterns.region import find_regions
from loka.graph.sites.discover import find_sites
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.model.build_model import BuiltModel
from loka.zoo.wukong import Wukong, WukongSizes
from tests.support.expressions import expression, site_call
from tests.support.models import ir_models as models

KNOWN = StaticOperands(
    frozenset({"layer_norm", "rms_norm"}), frozenset({"relu", "silu", "sigmoid", "hardswish", "gelu"})
)
TEMPLATES = {
    "layer_norm": "torch.nn.functional.layer_norm({0}, (8,), {1}, {2}, 1e-05)",
    "rms_norm": "torch.nn.functional.rms_norm({0}, (8,), {1}, 1e-06)",
    "linear": "torch.nn.functional.linear({0}, {1}, {2})",
    "silu": "torch.nn.functional.silu({0}, inplace=False)",
    "relu": "torch.nn.functional.relu({0})",
    "tanh": "torch.tanh({0})",
    "add": "{0} + {1}",
    "mul": "{0} * {1}",
    "view": "{0}.view(-1)",
}
AFFINE = {"layer_norm": ("weight", "bias"), "rms_norm": ("weight",), "linear": ("weight", "bias")}


def statement(
    line: str, text: str = "", linear: tuple[str, ...] = ("{0}", "{1}", "{2}"), out: str = "{0}"
) -> Statement:
    """ "y = linear x", "n = layer_norm y", "z = add y x"; a linear is the site called like its target.

    `text` is another expression than that of the operation; `linear` and `out` are other views of a site's call.
    """
    target, _, op, *reads = line.split()
    refs = [Ref(RefKind.LOCAL, name) for name in reads]
    refs += [Ref(RefKind.ATTRIBUTE, f"self.{target}.{name}") for name in AFFINE.get(op, ())]
    call = site_call(target, refs, *linear, out=out) if op == "linear" else None
    return Statement(target, op, expression(text or TEMPLATES[op], refs), call)


def forward(*lines: str | Statement, result: str) -> ForwardIR:
    statements = tuple(statement(line) if isinstance(line, str) else line for line in lines)
    return ForwardIR("", "", ("x",), statements, expression(result), (), "")


def chains(found: ForwardIR) -> tuple[LinearChain, ...]:
    wanted = {step.call.site for step in found.statements if step.call is not None}
    return find_chains(found, find_regions(found, wanted), KNOWN)


def spans(found: ForwardIR) -> list[tuple[int, int, str]]:
    return [(chain.first, chain.last, " ".join(stage.site for stage in chain.stages)) for chain in chains(found)]


def test_norm_linear_norm_activation_linear_is_one_chain() -> None:
    found = forward("n = layer_norm x", "y = linear n", "m = rms_norm y", "a = silu m", "z = linear a", result="z")
    (chain,) = chains(found)
    first, second = chain.stages
    assert (chain.first, chain.last, first.linear, second.linear) == (0, 4, 1, 4)
    assert first.before is not None
    assert (first.before.kind, first.before.width, first.before.eps) == ("layer_norm", 8, 1e-5)
    assert first.before.weight == Ref(RefKind.ATTRIBUTE, "self.n.weight")
    assert first.after is not None
    assert (first.after.kind, first.after.eps, first.after.bias) == ("rms_norm", 1e-6, None)
    assert (first.activation, second.before, second.after, second.activation) == ("silu", None, None, None)


def test_linears_one_after_the_other_are_a_chain() -> None:
    assert spans(forward("y = linear x", "z = linear y", "v = view z", result="v")) == [(0, 1, "y z")]


def with_operands(line: str, x: str, other: str) -> Statement:
    """A statement that reads a local and the Parameters of another statement."""
    step, of = statement(line), statement(other)
    others = dict(zip(step.operands, (local(x), *of.operands[1:]), strict=True))
    return step.reads(others.__getitem__)


def test_a_parameter_is_read_in_one_place_of_a_chain() -> None:
    tied = with_operands("z = linear y", "y", "y = linear x")
    assert spans(forward("y = linear x", tied, "a = linear z", result="a")) == [(0, 0, "y"), (1, 2, "z a")]
    norm = with_operands("m = layer_norm y", "y", "n = layer_norm x")
    around = forward("n = layer_norm x", "y = linear n", norm, "z = linear m", result="z")
    assert spans(around) == [(0, 1, "y"), (2, 3, "z")]


def test_only_wanted_sites_are_taken() -> None:
    found = forward("y = linear x", "z = linear y", result="z")
    assert [c.stages[0].site for c in find_chains(found, (Region("z", 1, 1, ("linear",)),), KNOWN)] == ["z"]
    assert find_chains(found, (), KNOWN) == ()


def test_sites_that_are_not_alike_are_not_joined() -> None:
    found = forward("y = linear x", "a = silu y", "z = linear a", result="z")
    regions = find_regions(found, {"y", "z"})
    kinds = {"y": 1, "z": 2}
    split = find_chains(found, regions, KNOWN, lambda site, other: kinds[site] == kinds[other])
    assert [(chain.first, chain.last) for chain in split] == [(0, 1), (2, 2)]


@pytest.mark.parametrize(
    ("lines", "result", "expected"),
    [
        pytest.param(("y = linear x", "a = relu y", "z = add a x"), "z", [(0, 1, "y")], id="residual"),
        pytest.param(("y = linear x", "z = add y x", "a = relu z"), "a", [(0, 0, "y")], id="residual_first"),
        pytest.param(("y = linear x", "a = silu y", "m = layer_norm a"), "m", [(0, 1, "y")], id="late_norm"),
        pytest.param(("y = linear x", "n = layer_norm y", "m = layer_norm n"), "m", [(0, 1, "y")], id="two_norms"),
        pytest.param(("y = linear x", "a = relu y", "b = silu a"), "b", [(0, 1, "y")], id="two_activations"),
        pytest.param(("y = linear x", "a = tanh y", "z = linear a"), "z", [(0, 0, "y"), (2, 2, "z")], id="tanh"),
        pytest.param(("y = linear x", "a = relu y", "z = linear a"), "(a, z)", [(0, 1, "y"), (2, 2, "z")], id="shared"),
        pytest.param(("y = linear x", "a = relu y", "z = linear a"), "(y, z)", [(0, 0, "y"), (2, 2, "z")], id="both"),
        pytest.param(
            ("y = linear x", "n = layer_norm y", "s = relu n", "z = mul n s"), "z", [(0, 1, "y")], id="swish_norm"
        ),
        pytest.param(
            ("y = linear x", "a = relu y", "z = linear a", "w = linear a", "v = add z w"), "v",
            [(0, 1, "y"), (2, 2, "z"), (3, 3, "w")], id="two_readers",
        ),
        pytest.param(("n = layer_norm x", "y = linear n", "z = add y n"), "z", [(1, 1, "y")], id="norm_read_elsewhere"),
        pytest.param(
            ("y = linear x", "q = view x", "z = linear y", "u = add z q"), "u", [(0, 0, "y"), (2, 2, "z")], id="between"
        ),
        pytest.param(("n = layer_norm x", "m = layer_norm n", "y = linear m"), "y", [(1, 2, "y")], id="norms_before"),
    ],
)  # fmt: skip
def test_what_ends_a_chain(lines: tuple[str, ...], result: str, expected: list[tuple[int, int, str]]) -> None:
    assert spans(forward(*lines, result=result)) == expected


def test_a_norm_that_the_region_before_left_goes_before_the_next_linear() -> None:
    found = forward("y = linear x", "a = silu y", "n = layer_norm a", "z = linear n", result="z")
    assert spans(found) == [(0, 1, "y"), (2, 3, "z")]
    assert chains(found)[1].stages[0].before is not None


def test_a_norm_before_a_linear_that_no_region_holds_stays_outside() -> None:
    found = forward("n = layer_norm x", "y = linear n", result="y")
    (chain,) = find_chains(found, (Region("y", 1, 1, ("linear",)),), KNOWN)
    assert (chain.first, chain.stages[0].before) == (1, None)


def test_views_of_operand_and_product() -> None:
    view = statement("y = linear n", linear=("{0}.transpose(-1, -2)", "{1}"))
    assert spans(forward("n = layer_norm x", view, "a = relu y", result="a")) == [(1, 2, "y")]
    product = statement("y = linear n", out="{0}.t()")
    assert spans(forward("n = layer_norm x", product, "z = linear y", result="z")) == [(0, 1, "y"), (2, 2, "z")]
    later = statement("z = linear y", linear=("{0}.t()", "{1}"))
    assert spans(forward("y = linear x", later, result="z")) == [(0, 0, "y"), (1, 1, "z")]


def test_a_weight_made_in_the_chain_ends_it() -> None:
    own = statement("z = linear y", "torch.matmul({0}, {0})", linear=("{0}", "{0}.t()"))
    assert spans(forward("y = linear x", own, result="z")) == [(0, 0, "y"), (1, 1, "z")]
    norm = statement("n = layer_norm y", TEMPLATES["layer_norm"].format("{0}", "{0}", "{0}"))
    assert spans(forward("y = linear x", norm, result="n")) == [(0, 0, "y")]
    bias = statement("m = layer_norm y", TEMPLATES["layer_norm"].format("{0}", "g", "g"))
    assert spans(forward("g = view x", "y = linear x", bias, result="m")) == [(1, 2, "y")]


@pytest.mark.parametrize(
    "template",
    [
        "torch.nn.functional.layer_norm({0}, (4, 8), {1}, {2}, 1e-05)",
        "torch.nn.functional.layer_norm({0}, (8,), {1} + 1, {2}, 1e-05)",
        "torch.nn.functional.layer_norm({0}, (8,), {1}, {2}, self.eps)",
        "torch.nn.functional.layer_norm({0} * 2, (8,), {1}, {2}, 1e-05)",
        "torch.nn.functional.layer_norm({1}, (8,), {0}, {2}, 1e-05)",
        "torch.nn.functional.layer_norm({0}, (8,), {1}, {2}, None)",
        "torch.instance_norm({0}, {1}, {2})",
    ],
)
def test_norms_that_no_kernel_has(template: str) -> None:
    norm = statement("n = layer_norm y", template)
    assert spans(forward("y = linear x", norm, result="n")) == [(0, 0, "y")]


@pytest.mark.parametrize("eps", ["", ", None"])
def test_an_rms_norm_without_an_eps_has_torchs(eps: str) -> None:
    norm = statement("n = rms_norm y", f"torch.nn.functional.rms_norm({{0}}, (8,), {{1}}{eps})")
    assert spans(forward("y = linear x", norm, result="n")) == [(0, 1, "y")]
    found = norm_starting_at((norm,), 0)
    assert found is not None
    assert found.norm.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=1e-5)


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        ("torch.nn.functional.gelu({0}, approximate='tanh')", False),
        ("torch.nn.functional.gelu({0})", True),
        ("torch.nn.functional.gelu({0}, inplace=self.training)", False),
        ("torch.nn.functional.gelu({0}, 0.5)", False),
        ("torch.nn.functional.gelu(-{0})", False),
    ],
)
def test_activations_in_canonical_words(template: str, taken: bool) -> None:
    activation = Statement("a", "gelu", expression(template, (local("y"),)))
    assert spans(forward("y = linear x", activation, result="a")) == [(0, int(taken), "y")]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("torch.nn.functional.leaky_relu({0})", "leaky_relu"),
        ("torch.nn.functional.leaky_relu({0}, 0.2)", "leaky_relu(0.2)"),
        ("torch.nn.functional.leaky_relu({0}, -0.2)", None),
        ("torch.nn.functional.leaky_relu({0}, 1.0)", None),
        ("torch.nn.functional.leaky_relu({0}, nan)", None),
        ("torch.nn.functional.leaky_relu({0}, self.slope)", None),
        ("torch.nn.functional.leaky_relu(-{0}, 0.2)", None),
    ],
)
def test_a_leaky_relu_with_its_slope(template: str, found: str | None) -> None:
    activation = Statement("a", "leaky_relu", expression(template, (local("y"),)))
    regions = [Region("y", 0, 1, ("linear", "leaky_relu"))]
    operands = replace(KNOWN, activations=frozenset({"leaky_relu"}))
    (chain,) = find_chains(forward("y = linear x", activation, result="a"), regions, operands)
    assert (chain.stages[0].activation, chain.last) == (found, int(found is not None))


def traced(model: nn.Module, owner: str, scope: RegionScope, inputs: Collection[Tensor]) -> ForwardIR:
    batches = {5: ModelInputs(tuple(value[:5] for value in inputs), {}), 8: ModelInputs(tuple(inputs), {})}
    examples = capture_examples(model, [owner], batches)[owner]
    found = trace_forward(model.get_submodule(owner), owner, examples, inline=scope.inline, sites=scope.sites)
    assert isinstance(found, ForwardIR), found
    return found


def test_the_whole_mlp_of_a_wukong_layer_is_one_chain() -> None:
    model = Wukong(WukongSizes(embeddings=8, dim=16, layers=1, rank=4, hidden=24))
    sites = find_sites(BuiltModel(model, (torch.randn(8, 8, 16),), {}, 8))
    wanted = [sites[f"layers.0.fmb.{place}"] for place in (0, 3, 6)]
    (scope,) = inline_for(model, wanted, {site.name for site in wanted}, sites.flow)
    assert (scope.owner, scope.sites) == ("layers.0", ("fmb.0", "fmb.3", "fmb.6"))
    assert inline_for(model, wanted, flow=sites.flow)[0].sites == ("fmb.0", "fmb.3")
    found = traced(model, "layers.0", scope, [torch.randn(8, 8, 16)])
    (chain,) = chains(found)
    steps = [
        (stage.site, stage.before is not None, stage.after is not None, stage.activation) for stage in chain.stages
    ]
    assert steps == [
        ("fmb.0", True, True, "silu"), ("fmb.3", False, True, "silu"), ("fmb.6", False, False, None),
    ]  # fmt: skip
    assert [stage.after.width for stage in chain.stages if stage.after is not None] == [24, 24]


class Functional(nn.Module):
    """Norms and activations as functions, dropout between, hooks on a norm."""

    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if hooked:
            self.norm.register_forward_hook(lambda module, args, out: None)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(F.rms_norm(self.first(self.norm(x)), (8,), eps=1e-6), inplace=True)
        x = F.dropout(self.second(x), 0.5, self.training)
        return F.hardswish(self.third(x)) + x


@pytest.mark.parametrize("hooked", [False, True])
def test_functions_dropout_and_hooks(hooked: bool) -> None:
    model = nn.Sequential(Functional(hooked))
    inline = ("first", "second", "third") + (() if hooked else ("norm",))
    found = traced(model, "0", RegionScope("0", inline, ("first", "second", "third")), [torch.randn(8, 8)])
    first, second = chains(found)
    assert [stage.site for stage in first.stages] == ["first", "second"]
    assert (first.stages[0].before is None, first.stages[0].activation) == (hooked, "silu")
    assert first.stages[0].after is not None
    assert first.stages[0].after.kind == "rms_norm"
    assert [(stage.site, stage.activation) for stage in second.stages] == [("third", "hardswish")]


def test_the_layers_of_the_traps_have_chains_of_their_mlp() -> None:
    model = models.Wukong(1)
    scope = RegionScope("layers.0", ("fmb", "fmb.0", "fmb.1", "fmb.2", "fmb.3", "fmb_norm"), ("fmb.0", "fmb.3"))
    (chain,) = chains(traced(model, "layers.0", scope, [torch.randn(8, 8, 16)]))
    assert [stage.site for stage in chain.stages] == ["fmb.0", "fmb.3"]

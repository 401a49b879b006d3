"""Plans of small models: where regions end, which forward holds what, and interactions outside of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.graph.canonical.forwards import Canonical, canonical_forward
from loka.graph.expression import Call, Ref, function
from loka.plan.plan import NOTHING_AROUND, Plan, SitePlan
from loka.plan.planner import make_plan
from loka.plan.view.explain import explain
from tests.support.models import forward_mods as zoo

PUBLIC = "tests.support.models.public_manner"
FUSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
KEPT = "compute: keep, fuse: never"
INTERACTIONS = "mods: [{use: fuse_interaction}]"
MIXING = "a mixing layer of 16 embeddings of 32, rank 8"

PlanFor = Callable[..., Plan]


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(torch.zeros_like(x), x)


class Clamps(nn.Module):
    """Clamps at zero behind a linear whose products are 0, behind a norm, in a module, and one at another number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 16)
        self.own = nn.Sequential(nn.Linear(64, 64), Relu())
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).clamp(min=0)
        x = torch.clamp_min(self.norm(self.second(x)), 0.0)
        x = self.own(x)
        made: Tensor = self.out(self.third(x).clamp(min=-1))
        return made


class Scaled(nn.Module):
    """A number stands between a linear, or a sum, and what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.scale = nn.LayerNorm(64), 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x) * self.scale)
        y = torch.relu((self.second(y) + x) * self.scale)
        made: Tensor = self.third(self.norm(y)).relu()
        return made


class ScaledByOne(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0


class Clamp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x).clamp(min=0)
        return made


def rows(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64),)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_rank, self.out = nn.Linear(16, 8, bias=False), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        products = x @ self.to_rank(x.transpose(1, 2))
        made: Tensor = self.out(products.flatten(1))
        return made


def contained() -> nn.Module:
    return nn.Sequential(Mixing())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"rank": nn.Linear(16, 8, bias=False), "out": nn.Linear(128, 16 * 32)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            products = x @ block["rank"](x.mT)
            assert products.shape[1] * products.shape[2] == 128
            x = block["out"](products.flatten(1)).unflatten(1, (16, 32))
        return x


def embeddings(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 16, 32),)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weight, x)


class Joined(nn.Module):
    """A multilayer perceptron is a Sequential with its views; the weighted sums have a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Flatten(1), nn.Linear(256, 64), nn.Linear(64, 128), nn.Unflatten(1, (4, 32)))
        self.part, self.norm = Part(), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(torch.cat([self.mlp(x), self.part(x)], 1) + x)
        return made


def eight_embeddings(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 8, 32),)


@pytest.fixture
def plan_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFor:
    """The plan of a model of this file or of `public_manner`, everything in FP8 and fused if nothing else is said."""
    monkeypatch.chdir(tmp_path)

    def make(
        factory: str, inputs: str = "rows", more: str = "", defaults: str = FUSED, batch: int = 64, module: str = PUBLIC
    ) -> Plan:
        model = f'{{factory: "{module}:{factory}", inputs: "{module}:{inputs}", batch_size: {batch}}}'
        text = f"version: 1\nname: p\nmodel: {model}\ndefaults: {{{defaults}}}\n{more}\n"
        (tmp_path / "p.yaml").write_text(text)
        return make_plan("p.yaml")

    return make


def site(plan: Plan, name: str) -> SitePlan:
    return next(each for each in plan.sites if each.site.name == name)


@pytest.mark.parametrize(
    ("model", "regions"),
    [
        ("Scaled", {"first": (), "second": ("linear", "add"), "third": ("layer_norm", "linear", "relu")}),
        (
            "ScaledByOne",
            {
                "first": ("linear", "relu"),
                "second": ("linear", "add", "relu"),
                "third": ("layer_norm", "linear", "relu"),
            },
        ),
        (
            "Clamps",
            {
                "first": ("linear", "relu"),
                "second": ("linear", "layer_norm", "relu"),
                "own.0": ("linear", "relu"),
                "third": (),  # a clamp at another number
            },
        ),
    ],
)
def test_a_region_is_what_kernels_take(model: str, regions: dict[str, tuple[str, ...]], plan_for: PlanFor) -> None:
    plan = plan_for(model, module=__name__)
    assert {name: site(plan, name).region for name in regions} == regions
    if model == "Scaled":
        assert site(plan, "first").region_note == NOTHING_AROUND


class OneEinsum(nn.Module):
    """A mixing layer in one call: nothing multiplies by `rank` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,bmd,mk->bnk", x, x, self.rank)


def test_a_weight_in_a_call_of_several_tensors_is_refused_not_forgotten(plan_for: PlanFor) -> None:
    (product,) = plan_for("OneEinsum", "embeddings", module=__name__).sites
    assert not product.fp8
    assert {gemm.reason for gemm in product.gemms} == {"einsum 'bnd,bmd,mk->bnk' has 3 operands"}


@pytest.mark.parametrize(
    "wrong", [lambda x: function("relu", Call("operator.mul", (x, 1.5))), lambda x: function("gelu", x)]
)
def test_a_relu_that_gives_other_outputs_than_the_clamp_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Ref], Call]
) -> None:
    assert any(step.op == "relu" for step in zoo.traced(Clamp(), rows)[0].statements)

    def with_wrong_relus(*args: Any, **kwargs: Any) -> Canonical:
        made = canonical_forward(*args, **kwargs)
        steps = [
            replace(step, value=wrong(step.operands[0])) if step.op == "relu" else step
            for step in made.forward.statements
        ]
        assert steps != list(made.forward.statements)
        return replace(made, forward=replace(made.forward, statements=tuple(steps)))

    monkeypatch.setattr("loka.graph.trace.trace.canonical_forward", with_wrong_relus)
    with pytest.raises(AssertionError, match="gives other outputs"):
        zoo.traced(Clamp(), rows)


@pytest.mark.parametrize(
    ("model", "inputs", "whats", "owners"),
    [
        ("Mixing", "embeddings", [MIXING], [""]),  # by a linear on the model's input
        ("Layers", "embeddings", [MIXING] * 2, ["", ""]),  # of a loop
        ("contained", "embeddings", [MIXING], ["0"]),  # in a model that is a container
    ],
)
def test_interactions_are_found_without_a_module_around_them(model, inputs, whats, owners, plan_for: PlanFor) -> None:
    plan = plan_for(model, inputs, INTERACTIONS, KEPT, 256, __name__)
    assert [each.what for each in plan.interactions] == whats
    assert [each.owner for each in plan.interactions] == owners
    if model == "Mixing":
        assert plan.interactions[0].sites == ("to_rank", "#0")


def test_what_a_join_reads_is_computed_with_it(plan_for: PlanFor) -> None:
    few = "rules: [{match: {kind: linear, min_k: 1000000}, compute: keep, optional: true}]\n"
    plan = plan_for("Joined", "eight_embeddings", few + INTERACTIONS, batch=256, module=__name__)
    (forward,) = (each.forward for each in plan.bindings if each.forward is not None)
    assert [step.text() for step in forward.statements if step.op == "module"] == []
    assert [step.call.site for step in forward.statements if step.call is not None] == ["mlp.1", "mlp.2", "part.weight"]


def test_regions_inside_a_refused_module_are_fused_as_if_it_were_not_there(plan_for):
    plan = plan_for("BranchingModel")
    assert plan.skipped == ()  # that the model's forward is not read is a note on its sites
    (tower, _) = plan.bindings
    assert (tower.modules, tower.sites) == (("tower",), (("tower.0", "tower.3"),))
    assert site(plan, "tower.0").region == ("linear", "layer_norm", "silu")
    assert site(plan, "tower.3").region == ("linear", "relu")
    assert site(plan, "head").region_note == NOTHING_AROUND


def test_regions_around_a_refused_child_are_fused_and_those_inside_it(plan_for):
    plan = plan_for("AroundABranch")
    assert plan.skipped == ()  # the layer's own statements would only make a chain longer
    forwards = {binding.modules[0]: binding.forward for binding in plan.bindings}
    assert set(forwards) == {"", "layer.tower"}
    assert any("self.layer(" in line for line in forwards[""].fingerprint.calls[0].training)
    assert site(plan, "enter").region == site(plan, "leave").region == ("linear", "layer_norm", "relu")
    assert site(plan, "layer.tower.0").region == ("linear", "layer_norm")


def test_batch_norms_and_dropouts_are_part_of_regions(plan_for):
    plan = plan_for("BatchNormTower")
    for number in range(2):
        explained = explain(plan, f"linears.{number}")
        assert explained.found.region == ("linear", "batch_norm", "relu", "dropout")
        assert explained.region_ends == ()
    assert len(plan.bindings) == 1  # one chain


@pytest.mark.parametrize("odd", ["without_running", "of_its_own", "with_a_hook", "called_twice"])
def test_a_batch_norm_that_no_kernel_takes_ends_a_region_and_explain_says_why(plan_for, odd):
    plan = plan_for(f"batch_norm_{odd}")
    first = explain(plan, "0")
    assert first.found.region == ()
    assert first.region_ends[0].startswith(
        "BatchNorm '1' after it: kernels take an nn.BatchNorm1d right after a linear"
    )


def test_a_dropout_that_is_no_module_ends_a_region_and_explain_says_why(plan_for):
    plan = plan_for("FunctionalDropout")
    first, head = explain(plan, "up"), explain(plan, "down")
    assert first.found.region == ("linear", "relu")
    name = "a dropout in the model's own forward"
    assert [text.partition(":")[0] for text in first.region_ends] == [f"{name} after it"]
    assert head.region_ends == ()  # it is after the other linear


def test_an_activation_that_no_kernel_takes_ends_a_region_and_explain_says_why(plan_for):
    plan = plan_for("prelu_tower")
    known = "of activations kernels take relu, silu, sigmoid, hardswish, gelu, tanh, leaky_relu"
    assert [explain(plan, each.site.name).region_ends for each in plan.sites] == [
        (f"prelu after it: {known}",),
        (f"elu after it: {known}",),
        (),
    ]
    assert [each.region for each in plan.sites] == [("linear", "layer_norm"), (), ()]


def test_a_sum_or_product_that_no_kernel_takes_ends_a_region_and_explain_says_why(plan_for):
    plan = plan_for("Elementwise")
    ends = [explain(plan, each.site.name).region_ends for each in plan.sites]
    assert [text.partition(":")[0] for each in ends for text in each] == [
        "add after it", "mul after it", "mul after it",
    ]  # fmt: skip
    assert [each.region for each in plan.sites] == [("linear", "relu"), (), ("linear", "batch_norm"), ()]


def test_identities_and_dropouts_of_zero_are_no_part_of_a_forward(plan_for):
    plan = plan_for("idle_tower")
    assert [each.region for each in plan.sites] == [("linear", "relu"), ("linear", "layer_norm", "relu"), ()]
    (binding,) = plan.bindings  # one chain
    assert binding.forward is not None
    assert [step.op for step in binding.forward.statements] == [
        "linear", "relu", "linear", "layer_norm", "relu", "linear",
    ]  # fmt: skip
    assert not any(explain(plan, each.site.name).region_ends for each in plan.sites)


def test_fuse_interaction_lists_only_what_nearly_is_an_interaction(plan_for):
    (mod,) = plan_for("NoInteraction", more="mods: [{use: fuse_interaction, optional: true}]\n").mods
    assert [(each.name, each.reason) for each in mod.unchanged] == [
        ("block", "the sum before its norm has 2 dimensions, not 3 (samples, rows, columns)")
    ]

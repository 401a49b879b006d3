"""Which modules of the user's own an owner's forward is traced through."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.graph.patterns.owners import Barriers, RegionScope, inline_for
from loka.graph.sites.flow import Flow
from loka.graph.sites.site import GemmKind, RowCount, Site


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Pick(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[-1]


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], torch.addcmul(pair[1], pair[0], self.linear(pair[1]))


class NormSilu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(x))


class TurnedNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class Layer(nn.Module):
    """All kinds of children around one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleDict({"first": nn.ModuleList([NormSilu()])})
        self.linear, self.beside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turned, self.norm = TurnedNorm(8), nn.LayerNorm(8)
        self.views = nn.Sequential(nn.Flatten(1), nn.Dropout(0.1), nn.Unflatten(1, (1, 8)))
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.turned(self.steps["first"][0](x))))


def site(name: str) -> Site:
    owner, weight, around = name.rpartition(".")[0], f"{name}.weight", ("layer_norm",)
    sizes = (RowCount(1), 8, 8, 1, 1, 0.1, True)
    return Site(name, GemmKind.LINEAR, owner, weight, None, *sizes, around, around, "")


def scope(model: nn.Module, owner: str, *names: str, barriers: Barriers | None = None) -> RegionScope:
    found = inline_for(model, map(site, names), held=dict.fromkeys(names, owner), barriers=barriers)
    return next(each for each in found if each.owner == owner)


def test_modules_that_hold_nothing_or_norms_alone() -> None:
    inline = ("linear", "norm", "steps.first.0", "steps.first.0.norm", "turned", "views", "views.0", "views.2")
    assert scope(Layer(), "", "linear").inline == inline


def test_a_pair_is_passed_on_and_picked_from() -> None:
    model = nn.Sequential(Pair(), Cross(), Pick(), nn.Linear(8, 8))
    assert scope(model, "", "1.linear", "3").inline == ("0", "1", "1.linear", "2", "3")


def test_one_with_hooks_stays_a_call() -> None:
    model = Layer()
    model.turned.register_forward_hook(lambda *_: None)
    model.steps["first"][0].norm.register_forward_hook(lambda *_: None)  # type: ignore[index]
    assert scope(model, "", "linear").inline == ("linear", "norm", "views", "views.0", "views.2")


def test_one_that_tracing_refused_stays_a_call() -> None:
    barriers = Barriers(closed=frozenset({"steps.first.0"}), owners=frozenset({"turned"}))
    assert scope(Layer(), "", "linear", barriers=barriers).inline == ("linear", "norm", "views", "views.0", "views.2")


def test_the_layers_of_other_owners_stay_calls() -> None:
    model = nn.Sequential(Layer(), Pair(), Pick(), nn.Linear(8, 8), nn.LayerNorm(8))
    held = {"0.linear": "0", "3": ""}
    outer, inner = inline_for(model, map(site, held), (), Flow(), held)
    assert (outer.owner, outer.inline) == ("", ("1", "2", "3", "4"))
    assert inner.owner == "0"

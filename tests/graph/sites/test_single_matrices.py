"""A Parameter (1, K, N) is one matrix: a site of its own, whose products flow on through views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.sites.discover import find_sites
from loka.model.build_model import BuiltModel

WIDTH, LOW = 16, 4


class Expert(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(experts, WIDTH, LOW))
        self.up = nn.Parameter(torch.randn(experts, LOW, WIDTH))
        self.bias = nn.Parameter(torch.zeros(experts, 1, WIDTH))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        low = torch.bmm(x.unsqueeze(0).expand(len(self.down), -1, -1), self.down)
        return torch.addcmul(x, x0, torch.baddbmm(self.bias, low, self.up).sum(0))


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.one, self.two = Expert(experts), Expert(experts)

    def forward(self, x0: Tensor) -> Tensor:
        y: Tensor = self.two(x0, self.one(x0, x0))
        return y


@pytest.mark.parametrize(("experts", "blocked"), [(1, False), (2, True)])
def test_one_matrix_is_planned_and_several_are_grouped(experts: int, blocked: bool) -> None:
    found = find_sites(BuiltModel(Experts(experts), (torch.randn(6, WIDTH),), {}, 6)).sites
    assert [site.blocked is not None for site in found] == [blocked] * 4
    assert [(site.k, site.n) for site in found] == [(WIDTH, LOW), (LOW, WIDTH)] * 2


def test_products_flow_from_one_expert_to_the_next() -> None:
    flow = find_sites(BuiltModel(Experts(1), (torch.randn(6, WIDTH),), {}, 6)).flow
    assert flow.into == (("one.down", "one.up"), ("one.up", "two.down"), ("two.down", "two.up"))


class Sliced(nn.Module):
    """Products with rows and pieces of a Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.pieces = (nn.Parameter(torch.randn(2 * WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.pieces.chunk(2)
        x = x @ self.rows[:WIDTH]
        return x @ first


def test_a_slice_of_a_parameter_is_no_site_of_its_own() -> None:
    found = find_sites(BuiltModel(Sliced(), (torch.randn(6, WIDTH),), {}, 6)).sites
    assert {site.weight for site in found} == {None}
    assert [site.blocked for site in found] == [
        "its weight is computed from the Parameter 'rows' by getitem",
        "its weight is computed from the Parameter 'pieces' by chunk",
    ]


class Twice(nn.Module):
    """A Parameter in two products, neither of which has its name for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.w)
        return x @ self.w


class Numbered(nn.Module):
    """Modules with the names that LoKA makes for products."""

    def __init__(self) -> None:
        super().__init__()
        self.t = Twice()
        self.add_module("t#0", nn.Linear(WIDTH, WIDTH))
        self.add_module("t#1", Twice())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, "t#1")(getattr(self, "t#0")(self.t(x)))
        return y


def test_every_product_has_a_name_of_its_own_beside_modules_with_such_names() -> None:
    found = find_sites(BuiltModel(Numbered(), (torch.randn(6, WIDTH),), {}, 6)).sites
    assert [site.name for site in found] == ["t#2", "t#3", "t#0", "t#1#0", "t#1#1"]

"""Which sites' products go into which, and the modules around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.sites.discover import find_sites
from loka.graph.sites.flow import Flow, common_module
from loka.model.build_model import BuiltModel


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight) + self.fc.bias


class Outer(nn.Module):
    """Norms and sums of its own around two inner modules; the result of the second is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = Inner(), Inner(), nn.LayerNorm(16)
        self.head, self.queries, self.keys = nn.Linear(32, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(self.norm(x))
        centred = h - h.mean(-1, keepdim=True)
        h = self.two(centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6))
        h = self.head(torch.cat([h, x], 1)).relu()
        return self.queries(h) * self.keys(h)


def test_products_flow_through_what_kernels_fuse() -> None:
    flow = find_sites(BuiltModel(Outer(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.into == (("one.fc.weight", "two.fc.weight"),)  # not through a concatenation, and not into two sites
    assert flow.before == {"one.fc.weight": ("",), "two.fc.weight": ("",)}
    assert flow.after == {"one.fc.weight": ("",), "head": ("",)}
    assert {name: flow.near[name] for name in ("one.fc.weight", "queries", "keys")} == {
        "one.fc.weight": ("norm", "one"), "queries": ("",), "keys": ("",)
    }  # fmt: skip


class ByHand(Outer):
    """Its norm is made of sums, and of a norm of vectors."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(self.norm(x))
        centred = h - h.sum(-1, keepdim=True) / 16
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / 4
        made: Tensor = self.two(centred / (length.square() + 1e-6) ** 0.5)
        return made


def test_products_flow_through_norms_of_sums() -> None:
    flow = find_sites(BuiltModel(ByHand(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.into == (("one.fc.weight", "two.fc.weight"),)
    assert flow.before == {"one.fc.weight": ("",), "two.fc.weight": ("",)}
    assert flow.around({"one.fc.weight"}).before == {"one.fc.weight": ("",)}
    assert set(flow.around({"one.fc.weight", "two.fc.weight"}).before) == {"one.fc.weight"}


class Residual(nn.Module):
    """A stream that goes on beside its blocks, then a gate and a sum that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out, self.norm = Inner(), Inner(), nn.Linear(16, 4), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        h: Tensor = self.two(self.norm(x))
        return self.out(x * h + x)


def test_blocks_of_a_residual_stream_stay_apart() -> None:
    flow = find_sites(BuiltModel(Residual(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.into == (("two.fc.weight", "out"),)
    assert not any(flow.beside.values())


class Stem(Residual):
    """Both a norm and the stream read what the first product becomes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        h: Tensor = torch.relu(self.two(self.norm(x)))
        return self.out(x + h)


def test_what_follows_a_product_alone_is_beside_it() -> None:
    flow = find_sites(BuiltModel(Stem(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.after["one.fc.weight"] == ("",)
    assert flow.beside == {"one.fc.weight": (), "two.fc.weight": ("",)}


def test_a_module_that_holds_all_around_a_site() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16)), nn.Linear(16, 4)
    )
    flow = find_sites(BuiltModel(model, (torch.randn(6, 16),), {}, 6)).flow
    assert flow == Flow(
        (("0.0", "0.3"), ("0.3", "1")),
        after={"0.0": ("0",)},
        beside={"0.0": ("0.1", "0.2")},
        near={"0.0": ("0.1",)},
        operations={
            **{name: frozenset(["linear"]) for name in ("0.0", "0.3", "1")},
            **{"": frozenset(["input"]), "0.1": frozenset(["layer_norm"]), "0.2": frozenset(["silu"])},
        },
    )


def test_the_innermost_common_module() -> None:
    assert common_module(("a.b.c", "a.b", "a.bc")) == "a"
    assert common_module(("a.b", "a.b.c")) == "a.b"
    assert common_module(("a", "b")) == ""


class Sums(nn.Module):
    """Weighted sums of embeddings, as a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.compress(x.transpose(1, 2))
        return made.mT


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.einsum("bnd,nr->bdr", x, self.rank)


class Mixing(nn.Module):
    """A mixing layer of two modules, and a norm by hand of both results and x."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.products, self.tower = Sums(), Products(), nn.Linear(16 * 8, 12 * 32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.tower(self.products(x).flatten(1)).view(-1, 12, 32)
        joined = torch.hstack([made, self.sums(x)]) + x
        return joined - joined.mean(-1, keepdim=True)


def test_the_sites_of_a_mixing_layer_are_found_in_whatever_modules() -> None:
    flow = find_sites(BuiltModel(nn.Sequential(Mixing()), (torch.randn(6, 16, 32),), {}, 6)).flow
    assert flow.mixing == (("0.products.rank", "0.products#0", "0.sums.compress"),)
    assert flow.joined == {"0.tower": ("0", "0"), "0.sums.compress": ("0", "0")}


class Columns(nn.Module):
    """GEMMs of transposed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second @ (self.first @ x.t()).t().relu().t()).t()


def test_products_flow_through_transposes_around_gemms() -> None:
    flow = find_sites(BuiltModel(Columns(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.into == (("first", "second"),)


class Views(nn.Module):
    """Between the linears: views that keep rows, stacks and sums of one, a bias by the shape of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        self.bias = nn.Parameter(torch.zeros(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([self.linears[0](x)], dim=1).sum(dim=1)
        y = self.linears[1](y)
        y = self.linears[2](y + self.bias.expand_as(y))
        y = self.linears[3](torch.cat([y], -1).view(-1, 16).reshape(x.shape).expand(x.shape))
        y = self.linears[4](y.unsqueeze(1).mean((1,), keepdim=True).squeeze(1).clone())
        return self.linears[5](y.flatten().view(x.shape))


def test_products_flow_through_what_keeps_their_rows() -> None:
    flow = find_sites(BuiltModel(Views(), (torch.randn(6, 16),), {}, 6)).flow
    assert flow.into == tuple((f"linears.{i}", f"linears.{i + 1}") for i in range(4))  # not through a flat vector

"""Products with a Parameter of several matrices, split in a captured graph."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from loka.graph.capture.captured import Captured
from loka.graph.capture.dynamo import capture
from loka.graph.sites.captured_forward import held_at
from loka.graph.sites.groups import group_equation, split_groups
from loka.graph.sites.products.matrix_product import LEAST, MOST
from tests.support.models import product_models as models


class Gated(nn.Module):
    """A gated MLP of each group."""

    def __init__(self, groups: int = 3, size: int = LEAST) -> None:
        super().__init__()
        self.up, self.gate, self.down = (models.drawn(groups, size, size) for _ in range(3))
        self.bias = models.drawn(groups, size)

    def forward(self, x: Tensor) -> Tensor:  # (B, groups, size)
        up = torch.einsum("bti,tio->bto", x, self.up) + self.bias
        return torch.einsum("bto,tod->btd", F.silu(torch.einsum("bti,tio->bto", x, self.gate)) * up, self.down)


class Batched(Gated):
    """The product alone says how many groups the argument has."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.up)


class Shared(Gated):
    """All groups read the same rows, and the products are transposed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = x[:, 0] @ self.up.mT
        return made, torch.bmm(torch.relu(made), self.down.transpose(1, 2))


class Beside(Gated):
    """What stands between two products is read by something else, or along another dimension."""

    def forward(self, x: Tensor) -> Tensor:
        up = torch.relu(torch.einsum("bti,tio->bto", x, self.up))
        turned = torch.relu(torch.einsum("bti,tio->bto", x, self.gate)).transpose(0, 1)
        return torch.einsum("bto,tod->btd", up, self.down) + up + torch.bmm(turned, self.down).transpose(0, 1)


class Written(Gated):
    """Writes into a product, which something else reads, too, and into one that is read by what follows alone."""

    def forward(self, x: Tensor) -> Tensor:
        up = torch.einsum("bti,tio->bto", x, self.up)
        seen = up
        up.add_(self.bias)
        made = torch.einsum("bti,tio->bto", x, self.gate)
        made += self.bias
        both = torch.einsum("bto,tod->btd", F.relu(made, inplace=True), self.down)
        return torch.einsum("bto,tod->btd", up, self.down) + seen + both


def split_of(module: nn.Module, x: Tensor, wanted: set[str] | None = None) -> Captured:
    read = capture(module, (x,), result=True)
    return split_groups(read, module, lambda path: wanted is None or path in wanted)


def counted(captured: Captured) -> Counter[str]:
    return Counter(getattr(node.target, "__name__", str(node.target)) for node in captured.graph.nodes)


@pytest.mark.parametrize(
    ("kind", "stacks", "unbinds"),
    [(Gated, 1, 1), (Batched, 1, 1), (Shared, 2, 0), (Beside, 4, 3), (Written, 3, 2)],
    ids=["gated", "batched", "shared", "beside", "written"],
)
def test_a_graph_computes_the_same(kind: type[Gated], stacks: int, unbinds: int) -> None:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(5, 3, LEAST)
    split = split_of(module, x)
    graph = fx.GraphModule(dict(split.constants), split.graph)
    given = [held_at(module if s.is_of_module else {"x": x}[s.root], s.steps) for s in split.sources.values() if s.root]
    sizes = [5] * (len(list(split.graph.find_nodes(op="placeholder"))) - len(given))
    found, expected = graph(*sizes, *given), module(x)
    for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    names = counted(split)
    assert (names["stack"], names["unbind"], names["bmm"]) == (stacks, unbinds, 0)
    nodes = set(split.graph.nodes)
    results = split.result if isinstance(split.result, tuple) else (split.result,)
    assert nodes.issuperset(results)


def test_only_what_is_wanted_is_split() -> None:
    split = split_of(Gated(), torch.randn(5, 3, LEAST), {"down"})
    assert counted(split)["einsum"] == 2 + 3
    read = capture(Gated(), (torch.randn(5, 3, LEAST),), result=True)
    assert split_groups(read, Gated(), lambda path: False) is read


class Mapped(Gated):
    """A tensor stands for the rows of all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda rows: torch.bmm(rows.unsqueeze(1), self.up).squeeze(1))(x)


def test_products_under_a_transform_stay_together() -> None:
    read = capture(Mapped(), (torch.randn(5, 3, LEAST),), result=True)
    assert split_groups(read, Mapped()) is read


@pytest.mark.parametrize(("groups", "size"), [(3, LEAST - 1), (MOST + 1, LEAST), (1, LEAST)])
def test_small_matrices_many_and_single_ones_stay_together(groups: int, size: int) -> None:
    module = Gated(groups, size)
    read = capture(module, (torch.randn(5, groups, size),), result=True)
    assert split_groups(read, module) is read


@pytest.mark.parametrize(
    ("equation", "rank", "weight_first", "expected"),
    [
        ("bti, tio -> bto", 3, False, (1, "bi,io->bo")),
        ("tio,bti->bto", 3, True, (1, "io,bi->bo")),
        ("...ti,toi->...to", 4, False, (2, "...i,oi->...o")),
        ("tbi,tio->tbo", 3, False, (0, "bi,io->bo")),
        ("bti,tio->tbo", 3, False, None),  # the result has its groups elsewhere
        ("bi,tio->bto", 2, False, None),  # one matrix of t * o columns
        ("bti,iot->bto", 3, False, None),  # no matrix of a group stands together
        ("bti,tio->bt", 3, False, None),
        ("bti,tii->bto", 3, False, None),
        ("btj,tjo", 3, False, None),
        ("bti,bio->bto", 3, False, (0, "ti,io->to")),
        ("bti,tieo->bteo", 3, False, None),
        ("a,b,c->abc", 1, False, None),
    ],
)
def test_einsums_of_one_group(equation: str, rank: int, weight_first: bool, expected: tuple[int, str] | None) -> None:
    assert group_equation(equation, rank, weight_first) == expected

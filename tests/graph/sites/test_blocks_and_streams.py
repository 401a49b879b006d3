"""Sites around norms of blocks, sums and products of tensors of one layout, and of several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import InputError
from loka.mods.norms import BlockNorm


class Views(nn.Module):
    """Changes of view that are a norm's of blocks, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 64), BlockNorm(16), nn.Linear(64, 8)
        self.blocks, self.flat = nn.Linear(16, 4), nn.Linear(512, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # (B, 8, 24)
        y = self.norm(self.up(x))
        cut = y.unflatten(-1, (4, -1)).transpose(-1, -2).unflatten(-1, (2, 2))
        return self.down(F.silu(y)), self.blocks(y.unflatten(-1, (-1, 16))), self.flat(y.flatten(1)), cut.flatten(-2)


def test_sites_around_blocks(find):
    found = find(Views(), torch.randn(6, 8, 24))
    assert {(site.name, site.rows.at(6), site.k, site.n) for site in found.sites} == {
        ("up", 48, 24, 64), ("down", 48, 64, 8), ("blocks", 192, 16, 4), ("flat", 6, 512, 3),
    }  # fmt: skip
    assert all(site.input_grad == (site.name != "up") for site in found.sites)
    assert found["down"].fed_by[:2] == ("silu", "rms_norm")
    assert found["up"].followed_by[0] == "rms_norm"


def test_blocks_that_do_not_divide_a_row_are_refused_as_torch_does(find):
    with pytest.raises(InputError, match="unflatten"):
        find(nn.Sequential(nn.Linear(8, 24), BlockNorm(16), nn.Linear(24, 1)), torch.randn(4, 8))


class Streams(nn.Module):
    """Sums and products of tensors of one layout, and of several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4, 8)
        y = x + self.a(x)
        y = y - torch.mul(y, self.b(y))
        y = torch.add(y, self.c(y), alpha=2) + y[:, :1] + y.mean(0) + 1
        y = y.to(torch.float64) + y
        return self.head(y.float())


def test_sites_behind_sums_and_products(find):
    found = find(Streams(), torch.randn(6, 4, 8))
    assert {(site.name, site.rows.per_sample, site.rows.fixed, site.k, site.n) for site in found.sites} == {
        ("a", 4, 0, 8, 8), ("b", 4, 0, 8, 8), ("c", 4, 0, 8, 8), ("head", 4, 0, 8, 1),
    }  # fmt: skip
    assert {site.name: site.input_grad for site in found.sites} == {"a": False, "b": True, "c": True, "head": True}
    assert found["b"].fed_by[0] == "add"
    assert found["b"].followed_by[:2] == ("mul", "sub")

"""Which modules have forwards of the user's own."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from loka.graph.source import has_own_forward


class Silent(nn.Module):
    """A container without a forward."""


class Named(nn.LayerNorm):
    """A class of the user's own with torch's forward."""


class Wide(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


@pytest.mark.parametrize(
    ("module", "own"),
    [(nn.Linear(2, 2), False), (nn.ModuleList(), False), (Silent(), False), (Named(2), False), (Wide(2), True)],
)
def test_a_forward_of_the_users_own(module: nn.Module, own: bool) -> None:
    assert has_own_forward(module) is own

"""Layers that are alike are traced once; what tells layers apart for a forward tells them apart here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.graph.ir import ForwardIR
from loka.graph.patterns.owners import RegionScope
from loka.graph.trace.tracer import Tracer


class Layer(nn.Module):
    """Two linears, whose weights may be one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def test_a_tied_layer_has_a_forward_of_its_own() -> None:
    model = nn.Sequential(Layer(tied=False), Layer(tied=False), Layer(tied=True))
    tracer = Tracer(model, lambda batch: ((torch.randn(batch, 4),), {}))
    plain, alike, tied = (tracer(RegionScope(str(place), ("one", "two"), ())) for place in range(3))
    assert isinstance(plain, ForwardIR)
    assert isinstance(alike, ForwardIR)
    assert isinstance(tied, ForwardIR)
    assert plain.statements is alike.statements
    assert "self.two.weight" in plain.statements[-1].text()
    assert "self.two.weight" not in tied.statements[-1].text()
    assert tied.fingerprint != plain.fingerprint

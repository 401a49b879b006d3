"""Parts of a concatenation with rows of one tensor added to each: a join of the sums."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

ROWS, WIDTH = 6, 8


class Halves(nn.Module):
    """Each half with its rows of x, then a norm of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x[:, :3]), self.second(x[:, 3:])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(x)
        out: Tensor = self.norm(torch.cat([a + x[:, :3], x[:, 3:] + b], dim=1))
        return out


class Chunks(Halves):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.cat([a + b for a, b in zip(x.chunk(2, 1), self.parts(x), strict=True)], 1))
        return out


class Narrowed(Halves):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(x)
        out: Tensor = self.norm(torch.cat([a.add_(x.narrow(1, 0, 3)), b.add_(x.narrow(1, 3, 3))], 1))
        return out


class OtherNorms(Halves):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(x)
        return torch.cat([self.norm(a), self.other(b)], 1)


class ReadTwice(Halves):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(x)
        top = a + x[:, :3]
        out: Tensor = self.norm(torch.cat([top, b + x[:, 3:]], 1)) + F.pad(top, (0, 0, 0, 3))
        return out


class SizeAfter(Halves):
    """A size of the norm's input is read after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(self.parts(x), 1) + x
        return self.norm(y).view(y.shape[0], -1)


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, ROWS, WIDTH),), {}) for batch in (3, 5)}
    inline = ("first", "second", "norm", "other")
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], inline=inline)
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize(
    ("kind", "joins"),
    [
        *((kind, [(2, False)]) for kind in (Halves, Chunks, Narrowed, ReadTwice)),
        (SizeAfter, [(2, True)]),
        (OtherNorms, []),
    ],
)
def test_joins_with_their_residual(kind: type[Halves], joins: list[tuple[int, bool]]) -> None:
    module = kind()
    forward = traced(module)
    found = [(len(join.parts), join.residual is not None) for join in forward.joins]
    assert found == joins
    x = torch.randn(4, ROWS, WIDTH, requires_grad=True)
    right, got = module(x), with_forward(copy.deepcopy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

"""`torch.finfo(scores.dtype)` in a traced forward is that of the call's own dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

SEEN, WIDTH = 4, 8


class Attention(nn.Module):
    """Masks what a query may not see with the least number of its scores' dtype."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(SEEN, SEEN, dtype=torch.bool).tril())

    def limit(self, scores: Tensor) -> float:
        return torch.finfo(scores.dtype).min

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.q(x) @ self.k(x).mT
        return scores.masked_fill(~self.mask, self.limit(scores))


class ByKeyword(Attention):
    def limit(self, scores: Tensor) -> float:
        return torch.finfo(type=scores.dtype).min  # type: ignore[call-overload, no-any-return]  # stubs name it dtype


class OfIntegers(Attention):
    """Not of its scores, which are none, and of a dtype that is known."""

    def limit(self, scores: Tensor) -> float:
        return torch.iinfo(scores.long().dtype).min / torch.iinfo(torch.int64).max * 1e4


def traced(model: nn.Module) -> ForwardIR | Refused:
    batches = {batch: ModelInputs((torch.randn(batch, SEEN, WIDTH),)) for batch in (3, 5)}
    return trace_forward(model, "", capture_examples(model, [""], batches)[""], (), ("q", "k"))


@pytest.mark.parametrize("kind", [Attention, ByKeyword, OfIntegers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_are_those_of_the_call(kind: type[Attention], dtype: torch.dtype) -> None:
    model = kind()
    forward = traced(model)
    assert isinstance(forward, ForwardIR), forward
    written = copy.deepcopy(model).to(dtype)
    x = torch.randn(2, SEEN, WIDTH, dtype=dtype)
    made = with_forward(copy.deepcopy(written), forward)(x)
    assert torch.equal(made, written(x))
    assert made.dtype == dtype


def test_torch_has_its_own_after_a_trace() -> None:
    finfo, iinfo = torch.finfo, torch.iinfo
    traced(Attention())
    assert (torch.finfo, torch.iinfo) == (finfo, iinfo)

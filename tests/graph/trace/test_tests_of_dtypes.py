"""A test of a tensor's dtype that decides casts alone is answered as in low precision; others are refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

WIDTH = 8


class Block(nn.Module):
    """Normalises in float32 what its linear computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float16, torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        dtype = y.dtype
        if self.is_low(dtype):
            y = y.float()
        return F.layer_norm(y, (WIDTH,), self.norm.weight.to(y.dtype), self.norm.bias.to(y.dtype)).to(dtype)


class InASet(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype in {torch.float16, torch.bfloat16}


class NotIn(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype not in [torch.float32]


class Unequal(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float32


class FromTheLeft(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return torch.float32 != dtype


class OfAnArgument(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.is_low(x.dtype) else x
        made: Tensor = self.linear(F.layer_norm(y, (WIDTH,)).to(x.dtype))
        return made


class OnlyFloat16(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float16


class OnlyBfloat16(Block):
    """A model in float16 would be cast, too."""

    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16


class InADict(Block):
    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype in {torch.float16: 0, torch.bfloat16: 1}


class Doubled(Block):
    """Computes something else in low precision."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if self.is_low(y.dtype) else y


class OfIntegers(Block):
    def forward(self, x: Tensor) -> Tensor:
        places = x.argmax(-1)
        y: Tensor = self.linear(x)
        return y + (places if places.dtype == torch.int64 else places.long())[:, None]


def traced(model: nn.Module) -> ForwardIR | Refused:
    batches = {batch: ModelInputs((torch.randn(batch, WIDTH),)) for batch in (3, 5)}
    return trace_forward(model, "", capture_examples(model, [""], batches)[""], (), ("linear",))


def both(kind: type[Block], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model in a dtype, and the same with the forward that was traced in float32."""
    model = kind()
    forward = traced(model)
    assert isinstance(forward, ForwardIR), forward
    written = copy.deepcopy(model).to(dtype)
    return written, with_forward(copy.deepcopy(written), forward)


@pytest.mark.parametrize("kind", [Block, InASet, NotIn, Unequal, FromTheLeft, OfAnArgument, InADict, OfIntegers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_test_whose_sides_agree(kind: type[Block], dtype: torch.dtype) -> None:
    written, made = both(kind, dtype)
    x = torch.randn(4, WIDTH, dtype=dtype)
    assert torch.equal(made(x), written(x))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Doubled, r"does other operations under autocast at test_tests_of_dtypes.py:\d+ 'return y \* 2 if"),
        (OnlyBfloat16, r"does other operations in float16 than in bfloat16 at test_tests_of_dtypes.py:\d+ "),
        (OnlyFloat16, r"does other operations in float16 than in bfloat16 at test_tests_of_dtypes.py:\d+ "),
    ],
)
def test_a_test_that_makes_a_difference_is_the_reason(kind: type[Block], reason: str) -> None:
    found = traced(kind())
    assert isinstance(found, Refused)
    assert re.match(reason, found.reason), found.reason

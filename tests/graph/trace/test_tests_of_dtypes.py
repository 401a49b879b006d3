"""A test of a tensor's dtype whose two sides agree in float32 is answered as in bfloat16; others are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import InputError
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


class OfOtherDtypes(Block):
    """An argument may have another dtype in another call."""

    def is_low(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float64, torch.uint8)


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


@pytest.mark.parametrize("kind", [Block, InASet, NotIn, Unequal, FromTheLeft, OfAnArgument])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_test_whose_sides_agree(kind: type[Block], dtype: torch.dtype) -> None:
    written, made = both(kind, dtype)
    x = torch.randn(4, WIDTH, dtype=dtype)
    assert torch.equal(made(x), written(x))


def test_float16_alone_is_checked_in_its_place() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        written, made = both(OnlyFloat16, dtype)
        x = torch.randn(4, WIDTH, dtype=dtype)
        assert torch.equal(made(x), written(x))
    _, made = both(OnlyFloat16, torch.float16)
    with pytest.raises(InputError, match="planned for False and meets True"):
        made(torch.randn(4, WIDTH, dtype=torch.float16))


@pytest.mark.parametrize("kind", [Doubled, OfIntegers, OnlyBfloat16, OfOtherDtypes, InADict])
def test_a_test_that_makes_a_difference_is_the_reason(kind: type[Block]) -> None:
    found = traced(kind())
    assert isinstance(found, Refused)
    assert found.reason.startswith("branch on a tensor's dtype at test_tests_of_dtypes.py:")

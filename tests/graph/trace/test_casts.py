"""Casts without which something would have another dtype, with or without autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR
from loka.graph.trace.casts import telling_casts
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.as_written import as_written


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The product has the dtype of x, and so has the sum."""
        out: Tensor = self.linear(x).mul(x).add_(x)
        return out


class Narrows(Body):
    def forward(self, x: Tensor) -> Tensor:
        """Under autocast the linear's product is narrower than x, and what is added to it stays so."""
        out: Tensor = self.linear(x).add_(x)
        return out


class RaisesUnderAutocast(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tensordot(self.linear(x), x, dims=([0], [0])).mul(x[:1]).add_(x[:1])
        return out


class BeforeANorm(Body):
    """A norm computes in float32, whatever it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(self.linear(x).add_(x), (8,))


class OfABias(Body):
    """A product with its bias has the dtype of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.linear(x, self.linear.weight)
        out += self.bias
        return out


class Moves(Body):
    """Where the examples run, this does nothing; on another device it does."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(self.linear(x).to("cpu"))
        return out


class MovesByKeyword(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(self.linear(x).to(device="cpu", dtype=torch.float32))
        return out


class OfAnArgument(Body):
    """The argument may have another dtype, and the linear none but its weight's."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.to(torch.float32))
        return out


class BeforeALinear(Body):
    """Another linear, a module that is called, computes in a dtype of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        out: Tensor = self.head(torch.nn.functional.layer_norm(y.float(), (8,)).to(y.dtype))
        return out


class BeforeAModule(BeforeALinear):
    """What another module makes of it may be of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Dropout(0.0)


KINDS = {
    Moves: 1, MovesByKeyword: 1, Body: 0, Narrows: 1, RaisesUnderAutocast: 0, BeforeANorm: 0, OfABias: 0,
    OfAnArgument: 1, BeforeALinear: 0, BeforeAModule: 1,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "telling"), KINDS.items())
def test_casts_that_tell(kind: type[Body], telling: int) -> None:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (3, 5)}
    examples = capture_examples(module, [""], batches)[""]
    forward = trace_forward(module, "", examples, inline=["linear"], sites=["linear"])
    assert isinstance(forward, ForwardIR), forward
    assert sum(step.op in ("type_as", "to") for step in forward.statements) == telling
    back = as_written(module, "", examples, inline=["linear"])
    assert len(telling_casts(back, examples, kind)) == telling


class AddsItsBias(Body):
    """Under autocast a sum with a Parameter is float32, where a linear with that bias is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class AddsItsBiasInside(AddsItsBias):
    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x)


class NamesItsSum(AddsItsBias):
    """The key of the result is the name of the local."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        add = x @ self.weight + self.bias
        return {"add": add}


def with_folded_bias(module: nn.Module) -> nn.Module:
    """The module with its traced forward, whose GEMM takes the bias along."""
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (3, 5)}
    forward = trace_forward(module, "", capture_examples(module, [""], batches)[""], sites=["weight"])
    assert isinstance(forward, ForwardIR), forward
    (call,) = (step.call for step in forward.statements if step.call is not None)
    assert call.bias is not None
    return with_forward(module, forward)


def test_a_cast_of_a_result_leaves_the_keys_of_a_dictionary() -> None:
    module = with_folded_bias(NamesItsSum())
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(4, 8))["add"].dtype == torch.float32


@pytest.mark.parametrize("kind", [AddsItsBias, AddsItsBiasInside])
def test_a_folded_bias_gives_no_result_another_dtype(kind: type[Body]) -> None:
    module = with_folded_bias(kind())
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(4, 8)).dtype == torch.float32

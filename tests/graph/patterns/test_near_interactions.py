"""What nearly is an interaction is reported with the one thing that is missing; what is nothing of that is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.wide = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(16)
        self.rank = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """A norm of a sum of matrices of two dimensions."""
        out: Tensor = self.norm(self.linear(x[:, 0]) + x[:, 0])
        return out


class AlongColumns(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(torch.cat([self.linear(x), x], -1))
        return out


class ReadTwice(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.linear(x), x], 1)
        out: Tensor = self.norm(y) + y
        return out


class MixReadTwice(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2) @ self.rank
        return torch.cat([(x @ y).flatten(1), y.flatten(1)], 1)


class GramFirst(Body):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)) @ self.rank


class ThreeFactors(Body):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bid,bjd,jr->bir", x, x, self.rank)


class PartOfAProduct(Body):
    """One part for x @ (x^T @ rank), one for weighted sums, and one that a mixing layer has no place for."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (x.transpose(1, 2) @ self.rank).chunk(3, -1)
        return (x @ a).sum(1) + b.sum(1) + c.tanh().sum(1)


class PartAndWhole(Body):
    def forward(self, x: Tensor) -> Tensor:
        whole = x.transpose(1, 2) @ self.rank  # to split it would compute the part twice
        return (x @ whole[:, :, :1]).sum(1) + whole.sum(1).sum(1, keepdim=True)


class ByAModule(Body):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mix(x).transpose(1, 2)


class NormOfTwo(Body):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.LayerNorm((4, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.both(self.linear(x))
        return out


class NormOfFlattened(Body):
    """The same norm, of rows that the forward flattens itself."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.both(self.linear(x).flatten(1))
        return out


class NormOfEach(Body):
    """Rows of samples and of rows in one: the norm is over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x).flatten(0, 1))
        return out


class NormOfRows(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y - y.mean(1, keepdim=True)) * self.rank.sum()


class Join(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.cat([self.linear(x), x], 1))
        return out


class Plain(Body):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))).sum(1)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Body, "the sum before its norm has 2 dimensions, not 3 (samples, rows, columns)"),
        (AlongColumns, "it concatenates along dimension 2 before its norm, and rows (dimension 1) are what is joined"),
        (ReadTwice, "the concatenation before its norm is read by something else as well"),
        (MixReadTwice, "x^T @ rank of its mixing layer is read by something else as well"),
        (GramFirst, "its mixing layer is written (x @ x^T) @ rank: write x @ (x^T @ rank), which kernels take"),
        (
            ThreeFactors,
            "an einsum multiplies all three operands of its mixing layer: write two products, x @ (x^T @ rank)",
        ),
        (
            PartOfAProduct,
            "x^T @ rank of its mixing layer is a part of a larger product: multiply by rank alone",
        ),
        (
            PartAndWhole,
            "x^T @ rank of its mixing layer is a part of a larger product: multiply by rank alone",
        ),
        (ByAModule, "x^T @ rank of its mixing layer is made by a module that stays a call, self.mix(x)"),
        (
            NormOfTwo,
            "layer_norm after it is over the last 2 dimensions, and kernels normalise over the last dimension alone",
        ),
        (
            NormOfFlattened,
            "layer_norm after it is over the last 2 dimensions, and kernels normalise over the last dimension alone",
        ),
        (NormOfRows, "mean after it is over dimension 1, and kernels normalise over the last dimension alone"),
        (NormOfEach, None),
        (Join, None),
        (Plain, None),
    ],
)
def test_the_one_thing_that_is_missing(kind: type[Body], missing: str | None) -> None:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 4, 8),)) for batch in (3, 5)}
    examples = capture_examples(module, [""], batches)[""]
    site = {MixReadTwice: ["rank"], GramFirst: ["rank"], PartOfAProduct: ["rank"], PartAndWhole: ["rank"]}.get(
        kind, ["linear"]
    )
    site = [] if kind in (ThreeFactors, ByAModule) else site
    inline = ["linear", "norm", "wide", *(["both"] if hasattr(module, "both") else [])]
    forward = trace_forward(module, "", examples, inline=inline, sites=site)
    assert isinstance(forward, ForwardIR), forward
    assert [near.missing for near in forward.near] == ([missing] if missing else [])
    assert len(forward.joins) == (kind is Join)

"""(x @ x^T) @ rank is x @ (x^T @ rank) for the kernel of a mixing layer, and as it was traced for everything else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.canonical.forwards import is_canonical
from loka.graph.canonical.splicing import spliced
from loka.graph.equivalence import with_forward
from loka.graph.ir import REASSOCIATED, ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

N, DIM, RANK = 12, 20, 4


class Gram(nn.Module):
    """Products of all pairs first, then at low rank."""

    shape: tuple[int, ...] = (N, RANK)

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(self.shape) / N)
        self.bias = nn.Parameter(torch.randn(self.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT) @ self.rank


class ByBatches(Gram):
    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.bmm(x, x.permute(0, 2, 1))
        return torch.bmm(pairs, self.rank.unsqueeze(0).expand(x.shape[0], -1, -1))


class ByALinear(Gram):
    shape = (RANK, N)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.einsum("bid,bjd->bij", x, x), self.rank)


class FromTheLeft(Gram):
    """The transpose of the products."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rank.t() @ (x @ x.transpose(1, 2))


class OneEinsum(Gram):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,bmd,mk->bnk", x, x, self.rank)


class RankInBetween(Gram):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,mk,bmd->bnk", x, self.rank, x)


class Through(Gram):
    """Operations that stand between these products, and read neither."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        pairs = x @ y
        other = x.relu()
        return (pairs @ self.rank) * other[:, :, :1]


KINDS = (Gram, ByBatches, ByALinear, FromTheLeft, OneEinsum, RankInBetween, Through)


class ReadTwice(Gram):
    def forward(self, x: Tensor) -> Tensor:
        pairs = x @ x.mT
        return pairs @ self.rank + pairs.sum(2, keepdim=True)


class MoreWork(Gram):
    shape = (N, 2 * N)


class MoreWorkInOneEinsum(MoreWork):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,bmd,mk->bnk", x, x, self.rank)


class WithABias(Gram):
    shape = (RANK, N)

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(RANK))

    def forward(self, x: Tensor) -> Tensor:
        """In float32 under autocast, too, where a sum with the bias is, and the linear itself is not."""
        return torch.nn.functional.linear(x @ x.mT, self.rank, self.bias).float()


BOUND = (*KINDS, WithABias)


class OfTwo(Gram):
    """Of two tensors: no Gram matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.tanh().mT) @ self.rank


class InPlace(Gram):
    """Something changes in place between the two products."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        pairs = x @ x.mT
        y[:, 0].mul_(2.0)
        return (pairs @ self.rank) + y[:, :, :1]


LESS = "its mixing layer is written (x @ x^T) @ rank, less work here than x @ (x^T @ rank), which kernels take"


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, N, DIM),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=("rank",))
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("kind", BOUND)
def test_it_is_a_mixing_layer_and_computes_the_same(kind: type[Gram]) -> None:
    module = kind()
    forward = traced(module)
    (mix,) = forward.mixes
    assert mix.sizes == (N, DIM, RANK, 0)
    assert [forward.statements[place].op for place in mix.gemms] == [REASSOCIATED]
    x = torch.randn(6, N, DIM, requires_grad=True)
    right, got = module(x), with_forward(copy.copy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), [x, module.rank]) for y in (got, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_kernel_it_is_what_was_traced(kind: type[Gram]) -> None:
    module = kind()
    back = spliced(traced(module), frozenset())
    assert not is_canonical(back)
    assert REASSOCIATED not in {step.op for step in back.statements}
    x = torch.randn(6, N, DIM)
    assert torch.equal(with_forward(copy.copy(module), back)(x), module(x))


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (ReadTwice, "x @ x^T of its mixing layer is read by something else as well"),
        (MoreWork, LESS),
        (MoreWorkInOneEinsum, LESS),
        (OfTwo, None),
        (
            InPlace,
            "its mixing layer is written (x @ x^T) @ rank, where something changes in place: kernels take "
            "x @ (x^T @ rank)",
        ),
    ],
)
def test_what_nearly_is_one_stays(kind: type[Gram], missing: str | None) -> None:
    forward = traced(kind())
    assert not forward.mixes
    assert REASSOCIATED not in {step.op for step in forward.statements}
    assert [near.missing for near in forward.near] == ([missing] if missing else [])

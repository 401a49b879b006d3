"""Mixing layers in random spellings: source texts of modules that all compute the same.

A layer is x (B, n, d) -> x @ (x^T @ rank) (B, n, r), flattened, beside the weighted sums compress @ x (B, c, d).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TRANSPOSES = (
    "{0}.transpose(1, 2)",
    "{0}.transpose(2, 1)",
    "{0}.transpose(-1, -2)",
    "{0}.transpose(dim0=1, dim1=2)",
    "torch.transpose({0}, -2, -1)",
    "{0}.mT",
    "{0}.permute(0, 2, 1)",
    "{0}.permute((0, 2, 1))",
    "{0}.permute(0, -1, 1)",
    "torch.permute({0}, (0, 2, 1))",
    "{0}.swapaxes(1, 2)",
    "torch.swapdims({0}, 1, 2)",
    "{0}.movedim(1, 2)",
    "torch.movedim({0}, -1, 1)",
    "torch.einsum('bij->bji', {0})",
    "{0}.transpose(1, 2).contiguous()",
)
SEEDS = (0, 3, 5, 7, 11, 13)
PRODUCTS = ("{0} @ {1}", "torch.matmul({0}, {1})", "{0}.matmul({1})")
OF_SAMPLES = (*PRODUCTS, "torch.bmm({0}, {1})", "{0}.bmm({1})")  # both operands have a batch
MATRIX_TRANSPOSES = ("{0}.t()", "{0}.T", "{0}.transpose(0, 1)", "{0}.mT", "{0}.permute(1, 0)")


@dataclass(frozen=True, slots=True)
class MixingText:
    """A module's source, and how its matrices are stored."""

    source: str
    rank_transposed: bool  # `rank` is (r, n)
    compress_transposed: bool  # `compress` is (n, c)


class Speller:
    """Chooses spellings by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.lines: list[str] = []
        self._shares = False  # one x^T for both products
        self._shared: str | None = None  # its name, once it is there

    def layer(self, name: str) -> MixingText:
        """A module class with this name."""
        self.lines = []
        rank_transposed, compress_transposed = self._flip(), self._flip()
        self._shares, self._shared = self._flip(), None
        steps = [lambda: self._pairs(rank_transposed), lambda: self._sums(compress_transposed)]
        names = ["pairs", "sums"]
        if self._flip():
            steps, names = steps[::-1], names[::-1]
        made = dict(zip(names, (step() for step in steps), strict=True))
        body = "\n".join(f"        {line}" for line in self.lines)
        source = (
            f"class {name}(Mixing):\n    def forward(self, x):\n{body}\n"
            f"        return torch.cat([{made['pairs']}.flatten(1), {made['sums']}.flatten(1)], 1)\n"
        )
        return MixingText(source, rank_transposed, compress_transposed)

    def _pairs(self, transposed: bool) -> str:
        rank = "self.rank"
        label = "rn" if transposed else "nr"
        form = self._random.randrange(4)
        if form == 0:
            inner = f"torch.einsum('bnd,{label}->bdr', x, {rank})"
        elif form == 1:
            inner = f"torch.einsum('{label},bnd->bdr', {rank}, x)"
        elif form == 2:  # (rank^T @ x)^T
            before = rank if transposed else self._one(MATRIX_TRANSPOSES).format(rank)
            inner = self._transposed(self._let("mixed", self._one(PRODUCTS).format(before, "x")))
        else:
            matrix = self._one(MATRIX_TRANSPOSES).format(rank) if transposed else rank
            inner = self._one(PRODUCTS).format(self._first_transposed(), matrix)
        inner = self._let("inner", inner)
        form = self._random.randrange(4)
        if form == 0:
            return self._let("pairs", f"torch.einsum('bnd,bdr->bnr', x, {inner})")
        if form == 1:  # (inner^T @ x^T)^T
            left, right = self._let("left", self._transposed(inner)), self._let("right", self._transposed("x"))
            return self._let("pairs", self._transposed(self._let("product", self._one(OF_SAMPLES).format(left, right))))
        return self._let("pairs", self._one(OF_SAMPLES).format("x", inner))

    def _sums(self, transposed: bool) -> str:
        matrix = "self.compress"
        form = self._random.randrange(4)
        label = "nc" if transposed else "cn"
        if form == 0:
            return self._let("sums", f"torch.einsum('{label},bnd->bcd', {matrix}, x)")
        if form == 1:
            return self._let("sums", f"torch.einsum('bnd,{label}->bcd', x, {matrix})")
        if form == 2:
            left = self._one(MATRIX_TRANSPOSES).format(matrix) if transposed else matrix
            return self._let("sums", self._one(PRODUCTS).format(left, "x"))
        right = matrix if transposed else self._one(MATRIX_TRANSPOSES).format(matrix)
        product = self._let("summed", self._one(PRODUCTS).format(self._first_transposed(), right))
        return self._let("sums", self._transposed(product))

    def _first_transposed(self) -> str:
        """x^T, one for both products or each its own."""
        if not self._shares:
            return self._transposed("x")
        self._shared = self._shared or self._let("xt", self._one(TRANSPOSES).format("x"))
        return self._shared

    def _transposed(self, name: str) -> str:
        return self._let("transposed", self._one(TRANSPOSES).format(name)) if self._flip() else self._nested(name)

    def _nested(self, name: str) -> str:
        """A transpose in the midst of another expression."""
        return "(" + self._one(TRANSPOSES).format(name) + ")"

    def _let(self, name: str, expression: str) -> str:
        """A new local with the value of an expression."""
        fresh = f"{name}_{len(self.lines)}"
        self.lines.append(f"{fresh} = {expression}")
        return fresh

    def _one(self, choices: tuple[str, ...]) -> str:
        return self._random.choice(choices)

    def _flip(self) -> bool:
        return self._random.random() < 0.5


HEAD = """\
import torch
from torch import nn


class Mixing(nn.Module):
    def __init__(self, n={n}, d={d}, r={r}, c={c}):
        super().__init__()
        self.rank = nn.Parameter(torch.randn(*((r, n) if {rank_transposed} else (n, r))))
        self.compress = nn.Parameter(torch.randn(*((n, c) if {compress_transposed} else (c, n))))


"""


def mixing_module(seed: int, sizes: tuple[int, int, int, int]) -> str:
    """The text of a Python module with one class `Layer`; `sizes` are n, d, r and c."""
    text = Speller(seed).layer("Layer")
    n, d, r, c = sizes
    head = HEAD.format(
        n=n, d=d, r=r, c=c, rank_transposed=text.rank_transposed, compress_transposed=text.compress_transposed
    )  # fmt: skip
    return head + text.source


INPUTS = """

def inputs(batch):
    return (torch.randn(batch, {n}, {d}),)
"""


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[tuple[str, Tensor]]:
    """The output, and the gradients of the input and the Parameters."""
    y = model(x)
    named = dict(model.named_parameters())
    return [("y", y.detach()), *zip(("x", *named), torch.autograd.grad(y, [x, *named.values()], dy), strict=True)]

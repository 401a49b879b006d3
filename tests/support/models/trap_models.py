"""Small models that a search for nn.Linear modules gets wrong, each with its example inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Parameters(nn.Module):
    """Every way to write a product with one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(24, 32))
        self.right = nn.Parameter(torch.randn(24, 40))  # x @ w: K x N
        self.transposed = nn.Parameter(torch.randn(48, 40))  # x @ w.t(): N x K
        self.addmm = nn.Parameter(torch.randn(48, 20))
        self.addmm_bias = nn.Parameter(torch.randn(20))
        self.einsum = nn.Parameter(torch.randn(20, 36))
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(36, 36)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.linear)
        x = F.silu(x @ self.right)
        x = torch.matmul(x, self.transposed.t())
        x = torch.addmm(self.addmm_bias, x, self.addmm)
        x = torch.einsum("bk,kn->bn", x, self.einsum)
        for layer in self.layers:
            x = F.linear(x, layer)
        return x


class Compress(nn.Module):
    """The Parameter on the left: (n / 2, n) times (B, n, d), as a Wukong's linear compression."""

    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Parameter(torch.randn(8, 16))
        self.proj = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.matmul(self.compress, x))


class Batched(nn.Module):
    """Products without a two-dimensional Parameter: activations, generated weights, experts, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(16, 16 * 8)
        self.experts = nn.Parameter(torch.randn(4, 16, 8))
        self.table = nn.Parameter(torch.randn(3, 8, 16))
        self.register_buffer("fixed", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :].expand(-1, 4, -1)
        scores = torch.bmm(rows, rows.transpose(1, 2))
        made = torch.bmm(rows, self.make(x).view(-1, 16, 8))
        mixed = torch.einsum("bek,ekn->ben", rows, self.experts)
        sliced = F.linear(x, self.table[0])
        fixed = x @ self.fixed
        return scores.sum((1, 2))[:, None] + made.sum(1) + mixed.sum(1) + sliced + fixed


class Attention(nn.Module):
    """nn.MultiheadAttention, whose out_proj is a Linear that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attn(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """An encoder layer that torch fuses in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Ranker(nn.Module):
    """Odd widths, an embedding bag, a batch norm, names that are no identifiers, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 24)
        self.dense = nn.Linear(13, 24)
        self.norm = nn.BatchNorm1d(24)
        self.shared = nn.Linear(24, 24, bias=False)
        self.towers = nn.ModuleDict({"a-b": nn.Linear(479, 24), "1": nn.Linear(24, 1), "class": nn.Linear(24, 1)})
        self.pad = nn.Linear(24, 479)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        x = self.norm(self.dense(dense)) + self.bag(ids, offsets)
        x = F.relu(self.shared(F.relu(self.shared(x))))
        x = self.towers["a-b"](F.gelu(self.pad(x)))
        return self.towers["1"](x) + self.towers["class"](x)


class Shapes(nn.Module):
    """Three-dimensional, transposed and non-contiguous inputs, and rows that are a multiple of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 16)
        self.across = nn.Linear(6, 4)
        self.flat = nn.Linear(64, 8)
        self.some = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:  # (B, 6, 10)
        x = self.inner(x)  # (B, 6, 16)
        x = self.across(x.transpose(1, 2))  # (B, 16, 4)
        y = self.some(x[:, ::2])  # (B, 8, 4)
        return self.flat(x.flatten(1)) + y.sum(1)


class OneWeightTwice(nn.Module):
    """One Parameter at two places, and another in a loop at one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.loop = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x = F.linear(F.relu(x), self.weight)
        for _ in range(3):
            x = x @ self.loop
        return x


class Casts(nn.Module):
    """A forward under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(F.relu(self.norm(self.first(x))))


class Rewrites(nn.Module):
    """Changes its parameters, buffers, attributes and lists when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.steps = 0
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append("forward")
        self.count += 1
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
            self.fc.bias.data.add_(1)
        return self.drop(self.norm(self.fc(x))) + torch.rand(())


class ReadsValues(nn.Module):
    """A branch on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if x.abs().sum() > -1:
            x = x @ self.weight
        return x


class TrainsOtherwise(nn.Module):
    """An auxiliary head in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(16, 8)
        self.auxiliary = nn.Linear(16, 4)
        self.serving = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.main(x).sum() + self.auxiliary(x).sum()
        return self.serving(self.main(x)).sum()


class Net(nn.Module):
    """Linear layers that are not quite plain: subclasses, parametrised, weight-normed, hooked, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnForward(16, 16)
        self.subclass = Subclass(16, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.hooked = nn.Linear(16, 16)
        self.hooked.register_forward_hook(lambda module, args, out: out * 2)
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hooked(self.normed(self.subclass(self.own(x)))))


class OwnForward(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias).relu()


class Subclass(nn.Linear):
    """A Linear by another name."""


class Checkpointed(nn.Module):
    """Activation checkpointing, re-entrant or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)

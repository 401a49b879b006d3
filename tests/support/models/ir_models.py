"""Small modules for the straight-line forwards: what recommenders write, and what tracing gets wrong."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def weight(rows: int = WIDTH, columns: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / columns**0.5)


class Layer(nn.Module):
    """A Wukong layer with a hand-written forward: factorisation machine and linear compression."""

    def __init__(self, n: int = 8, d: int = 16, rank: int = 4, hidden: int = 32) -> None:
        super().__init__()
        self.n, self.d = n, d
        self.rank = nn.Parameter(torch.randn(n, rank) * n**-0.5)
        self.compress = nn.Parameter(torch.randn(n // 2, n) * n**-0.5)
        self.fmb_norm = nn.LayerNorm(n * rank)
        self.fmb = nn.Sequential(
            nn.Linear(n * rank, hidden), nn.LayerNorm(hidden), nn.SiLU(), nn.Linear(hidden, n // 2 * d)
        )
        self.out_norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        interactions = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank)).flatten(1)
        fmb = self.fmb(self.fmb_norm(interactions)).view(-1, self.n // 2, self.d)
        lcb = torch.matmul(self.compress, x)
        return self.out_norm(torch.cat([fmb, lcb], 1) + x)


class Wukong(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(8 * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))


class Plain(nn.Module):
    """What the traps vary: one Parameter in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class NoGrad(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(x)
        return gate * (x @ self.w)


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ self.w


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return x @ self.w


class TrainingBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 2
        return x @ self.w


class FunctionalDropout(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x @ self.w, 0.5, self.training)


class FloatAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.scale


class FloatInMath(FloatAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * math.log(self.scale)


class Roots(FloatAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) / math.sqrt(x.shape[-1]) * math.sqrt(self.scale)


@dataclass
class Config:
    scale: float = 0.5


class FloatInConfig(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.config.scale


class FloatsInList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [0.5, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.scales[0]


class Item(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.w.max().item()


class RandomConstant(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + torch.randn(WIDTH)


class Arange(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + torch.arange(WIDTH)


class FromAList(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + torch.as_tensor([1.0] * WIDTH)


class DeviceAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.device) @ self.w


class LiveNoise(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + torch.rand_like(x)


class WithBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.w + self.seen


class BufferInPlace(WithBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x @ self.w / self.seen


class BufferAssigned(BufferInPlace):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 0.9
        return x @ self.w


class Counter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.w


class NamedThis(Counter):
    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        this.calls += 1
        return x @ this.w


class Cache(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(1)
        return x @ self.w


class TypeTest(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if isinstance(x, Tensor) else x


class OptionalMask(Plain):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = x @ self.w
        return y if mask is None else y * mask


class Length(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[place] @ self.w for place in range(len(x))])


class Iterates(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row @ self.w for row in x])


class IteratesParts(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part @ self.w for part in x.unsqueeze(1).unbind(1)])


class IteratesBesideModules(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        total = x @ self.w / math.sqrt(x.shape[-1])
        for number, (norm, part) in enumerate(zip(self.norms, total.chunk(2, -1), strict=True)):
            for column in norm(part).split(2, -1):
                total = total + number * column.sum(-1, keepdim=True)
        return total


class SetItem(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w
        y[:, 0] = 0
        return y


class DataBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x @ self.w
        return x


class LayoutBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        return x @ self.w


class SizeBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 1024:
            return x
        return x @ self.w


class FlagBranch(Plain):
    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        return x @ self.w * 2 if double else x @ self.w


class LayerDrop(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 1e-9 else x @ self.w


class Decorated(Plain):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class AsksForGrad(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if torch.is_grad_enabled() else x


class HelperWithBlock(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self._gate(x) * (x @ self.w)

    def _gate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.sigmoid(x)


class BlockInAMethodNotCalled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if self.w is not None else self._gate(x)

    def _gate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sigmoid() if isinstance(x, Tensor) and x.sum().item() else x


class BlockInABranchNotTaken(Plain):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            y = x @ self.w
        elif mask.sum().item() > 0:
            self.seen = mask
            y = x
        else:
            with torch.no_grad():
                y = x * mask
        return y


class BlockInABranchTaken(BlockInABranchNotTaken):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            return x
        else:
            with torch.no_grad():
                return x @ self.w


def detached_gate(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.sigmoid(x)


class FunctionWithBlock(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return detached_gate(x) * (x @ self.w)


class Tries(Plain):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x @ self.w
        except RuntimeError:
            return x


class Variadic(Plain):
    def forward(self, *x: Tensor) -> Tensor:
        return x[0] @ self.w


class Keywords(Plain):
    def forward(self, x: Tensor, /, scale: float = 2.0, *, shift: float = -1.0) -> Tensor:
        return (x @ self.w) * scale + shift


class Uncovered(Plain):
    """The Parameter goes into a batched product, and not as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(1), self.w.abs().expand(x.size(0), WIDTH, WIDTH)).squeeze(1)


class Clip(torch.autograd.Function):
    """A gradient of its own, which tracing through its forward would lose, and examples are too small to show."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e6, 1e6)


class OwnGradient(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Clip.apply(x) @ self.w


class ClampsAGradient(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-1e6, 1e6))
        return x @ self.w


class Pieces(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([piece @ self.w for piece in (x * 2).split(1000)])


class AsksAnArgument(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.requires_grad else x


class Scaled(nn.Module):
    """A norm of the user's own, with floats that are read in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.gain = 1e-3, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class WithNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.w)

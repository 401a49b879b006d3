"""Modules whose linears' results are multiplied by matrices and added to them, for the tests of generated chains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.norms import BlockNorm


class CrossLayer(nn.Module):
    """x0 * (up(down(x)) + bias) + x."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.up(self.down(x)) + x
        return crossed


class Crosses(nn.Module):
    """Cross layers one after the other, and an MLP on what comes of them."""

    def __init__(
        self,
        width: int = 48,
        rank: int = 16,
        layers: int = 3,
        hidden: int = 32,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.cross = nn.ModuleList([CrossLayer(width, rank) for _ in range(layers)])
        self.over = nn.Sequential(nn.Linear(width, hidden), activation())

    def forward(self, x: Tensor) -> Tensor:
        x0 = x
        for layer in self.cross:
            x = layer(x0, x)
        out: Tensor = self.over(x)
        return out


class Apart(nn.Module):
    """Two cross layers whose factor is another tensor than what they start from."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList([CrossLayer(48, 16), CrossLayer(48, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x0, y = torch.tanh(x), x * 0.5
        for layer in self.cross:
            y = layer(x0, y)
        return y


class Gated(nn.Module):
    """A gate and a residual before a norm: norm -> linear * gate + other -> norm -> silu -> linear."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first = nn.LayerNorm(48), nn.Linear(48, 48)
        self.after, self.second = nn.RMSNorm(48, eps=1e-6), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        gate, other = torch.sigmoid(x), torch.tanh(x)
        out: Tensor = self.second(F.silu(self.after(self.first(self.before(x)) * gate + other)))
        return out


class GatedBlocks(Gated):
    """The same with block norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = BlockNorm(16), BlockNorm(16)


class Weighted(nn.Module):
    """x itself is a factor, a residual, and what the norm before the first linear takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(48), nn.Linear(48, 48, bias=False), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.norm(x)).mul(x)
        return torch.add(self.second(y), x)


class Residuals(nn.Module):
    """Residual blocks without norms: each adds its own input, which the block before made by a sum."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(48, 64) for _ in range(blocks)])
        self.down = nn.ModuleList([nn.Linear(64, 48, bias=False) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.silu(up(x)))
        return x


class Broadcast(nn.Module):
    """Factors and residuals of other shapes than the product's stay outside of chains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * x.mean(-1, keepdim=True)
        return self.second(y) + x.sum(0)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)) + x: rows (M, 128) -> (M, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate(x))
        out: Tensor = self.down(gate * self.up(x)) + x
        return out


class Masked(nn.Module):
    """relu(norm(linear(x * mask(x)))), the mask by an MLP: rows (M, 128) -> (M, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.second(F.relu(self.first(x)))
        return torch.relu(self.norm(self.linear(x * mask)))


def swiglu() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(SwiGlu())


def masked() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(Masked())


def rows_of_128(batch: int) -> tuple[Tensor]:
    """Inputs of all of these."""
    return (torch.randn(batch, 128),)


class Residual(nn.Module):
    """relu(norm(second(relu(first(x))) + x)): rows (M, 128) -> (M, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(128, 128), nn.Linear(128, 128), nn.LayerNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.second(torch.relu(self.first(x))) + x))


def residual() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(Residual())

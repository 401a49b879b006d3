"""Modules whose linears' results are multiplied by matrices and added to them, for the tests of generated chains."""

from __future__ import annotations

from collections.abc import Callable

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
    """down(dropout(silu(gate(x)) * up(x))) + x: rows (M, width) -> (M, width)."""

    def __init__(self, width: int = 128, hidden: int = 256, p: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.drop = nn.Dropout(p) if p else nn.Identity()
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate(x))
        out: Tensor = self.down(self.drop(gate * self.up(x))) + x
        return out


class MergedGlu(nn.Module):
    """The same with one product for both, and any activation."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = F.gelu, norm: bool = False, width: int = 48, hidden: int = 64
    ) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(hidden) if norm else nn.Identity()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        out: Tensor = self.down(self.activation(self.norm(b)) * a)
        return out


class GateUnit(nn.Module):
    """PEPNet's gate without its factor: what x is multiplied by is made of x, and the result is normalised on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(48, 32), nn.Linear(32, 48), nn.Linear(48, 48)
        self.norm, self.last = nn.LayerNorm(48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        gated = x * torch.sigmoid(self.second(F.relu(self.first(x))))
        out: Tensor = self.last(self.norm(self.third(gated)) * torch.tanh(x))
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


class MaskBlock(nn.Module):
    """A block of MaskNet, relu(norm(linear(norm(v) * mask))): here v and what the mask is made of are both x."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        self.linear, self.before, self.after = nn.Linear(128, 64), nn.LayerNorm(128), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.after(self.linear(self.before(x) * self.mask(x))))


class GatedTower(nn.Module):
    """PEPNet's gate in a module of its own; what it multiplies and the next linear are of the module around."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128), nn.Sigmoid())
        self.tower = nn.Sequential(nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tower(x * self.gate(x))
        return out


def swiglu() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(SwiGlu())


def masked() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(Masked())


def mask_block() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(MaskBlock())


def gated_tower() -> nn.Module:
    """As a model's factory."""
    return nn.Sequential(GatedTower())


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

"""Models of the tests in which policies ask for mods that rewrite forwards."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Experts over one input, each a small MLP, mixed by gates, as an MMoE has them; two tasks."""

    def __init__(self, experts: int = 4, width: int = 48, hidden: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 32)) for _ in range(experts)]
        )
        self.gates = nn.ModuleList([nn.Linear(width, experts, bias=False) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(32, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bottom(x))
        made = torch.stack([expert(x) for expert in self.experts], 1)
        outs = []
        for gate, head in zip(self.gates, self.heads, strict=True):
            outs.append(head((torch.softmax(gate(x), -1).unsqueeze(-1) * made).sum(1)))
        return torch.cat(outs, -1)


class Features(nn.Module):
    """A small projection for each of ten features, and a head."""

    def __init__(self, features: int = 10, width: int = 16) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(width, 24) for _ in range(features)])
        self.head = nn.Linear(features * 24, 32)

    def forward(self, x: Tensor) -> Tensor:
        made = [F.silu(projection(x[:, i])) for i, projection in enumerate(self.projections)]
        out: Tensor = self.head(torch.cat(made, 1))
        return out


class Looped(Features):
    """The same, written as a loop over both."""

    def forward(self, x: Tensor) -> Tensor:
        made = [F.silu(projection(feature)) for projection, feature in zip(self.projections, x.unbind(1), strict=True)]
        out: Tensor = self.head(torch.cat(made, 1))
        return out


class Attention(nn.Module):
    """One head over features; the key's bias has no gradient but rounding, for softmax takes no notice of it."""

    def __init__(self, features: int = 6, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(features * width, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(k.shape[-1]), -1)
        out: Tensor = self.head((weights @ v + x).flatten(1))
        return out


class Bottom(nn.Module):
    """The odd sizes of a DLRM: 13 dense features, 479 of the interaction, one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 448), nn.ReLU())
        self.over = nn.Linear(479, 96)
        self.mixed = nn.Parameter(torch.randn(96, 20) / 10)
        self.head = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.bottom(x)
        pairs = torch.cat([made, made[:, :31] * made[:, 31:62]], 1)
        out: Tensor = self.head(F.relu(self.over(pairs)) @ self.mixed)
        return out


class Twist(nn.Module):
    """Changes what it is given behind autograd's back; its hook keeps it a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: None)

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x.sum(-1, keepdim=True)


class Hidden(nn.Module):
    """Two linears over one tensor, which a child changes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.twist = nn.Linear(8, 8), nn.Linear(8, 8), Twist()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        first = self.a(x).detach()
        total = self.twist(x)
        return first + self.b(x) + total.detach()


class Pair(nn.Module):
    """Two linears over one tensor, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


class Branching(nn.Module):
    """Two linears over one tensor in a forward that cannot be traced, beside two that can be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.size(0) > 1024:
            x = x * 2
        return self.a(x) + self.b(x)


class Towers(nn.Module):
    """Experts with activations in place, a gate without one, and towers over what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(32, 24), nn.ReLU(inplace=True)) for _ in range(3)])
        self.gate = nn.Linear(32, 3)
        self.towers = nn.ModuleList([nn.Linear(24, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (torch.softmax(self.gate(x), -1).unsqueeze(-1) * made).sum(1)
        out: Tensor = self.towers[0](mixed) * self.towers[1](mixed)
        return out


class Both(nn.Module):
    """Experts of an odd size over one input, beside small projections of features."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(45, 30) for _ in range(3)])
        self.projections = nn.ModuleList([nn.Linear(5, 6, bias=False) for _ in range(9)])
        self.head = nn.Linear(3 * 30 + 9 * 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = [torch.tanh(expert(x)) for expert in self.experts]
        parts = torch.chunk(x, 9, -1)
        small = [each(parts[i]) for i, each in enumerate(self.projections)]
        out: Tensor = self.head(torch.cat([*made, *small], 1))
        return out


def rows(*sizes: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Example inputs: one tensor with rows of these sizes."""
    return lambda batch: (torch.randn(batch, *sizes),)


towers, towers_inputs = Towers, rows(32)
hidden, hidden_inputs = Hidden, rows(8)
branching, branching_inputs = Branching, rows(8)
experts, experts_inputs = Experts, rows(48)
features, features_inputs = Features, rows(10, 16)
looped, looped_inputs = Looped, rows(10, 16)
attention, attention_inputs = Attention, rows(6, 16)
bottom, bottom_inputs = Bottom, rows(13)
both, both_inputs = Both, rows(45)

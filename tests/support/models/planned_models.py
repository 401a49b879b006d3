"""Models as public ones are written: optional arguments, type tests, and checks of shapes, the same in all calls."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH = 32, 2, 6
Sparse = namedtuple("Sparse", ["name", "rows"])
Dense = namedtuple("Dense", ["name", "width"])


class PositionBias(nn.Module):
    """A bias of attention by positions, and by times where they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.slope = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, length: int, times: Tensor | None = None) -> Tensor:
        bias = self.table[:, :length, :length].unsqueeze(0)
        if times is not None:
            bias = bias + self.slope * (times.unsqueeze(1) - times.unsqueeze(2)).unsqueeze(1)
        return bias


class SequenceLayer(nn.Module):
    """A layer in the manner of HSTU: one projection, attention without softmax, a gate; optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 4 * WIDTH)
        self.bias = PositionBias()
        self.norm_out = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, times: Tensor | None = None, *, cache: Any = None
    ) -> Tensor:
        if len(x.shape) != 3:
            raise ValueError(f"expected three dimensions, got {len(x.shape)}")
        rows, length, _ = x.shape
        if length > LENGTH:
            raise ValueError("the sequence is too long")
        u, q, k, v = F.silu(self.project(self.norm(x))).chunk(4, -1)
        q, k, v = (part.reshape(rows, length, HEADS, -1).transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            k, v = k + cache[0], v + cache[1]
        scores = q @ k.transpose(-1, -2) + self.bias(length, times=times)
        allowed = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool))
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        if self.temperature != 1.0:
            scores = scores / self.temperature
        attended = (F.silu(scores.masked_fill(~allowed, -1e4)) / LENGTH) @ v
        return self.out(self.norm_out(attended.transpose(1, 2).reshape(rows, length, -1)) * u)


class SequenceModel(nn.Module):
    """Two such layers, to which it gives a mask and no cache; it cannot be traced as a whole itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SequenceLayer() for _ in range(2)])

    def forward(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        mask = x[:, :, 0].ne(0)
        if x.sum() > 1e9:
            x = x * 2
        for layer in self.layers:
            x = x + layer(x, mask, times)
        return x


def sequence_model() -> SequenceModel:
    torch.manual_seed(0)
    return SequenceModel()


def sequence_inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, LENGTH, WIDTH),)


class FeatureModel(nn.Module):
    """A base class with helpers for training, and features described by plain objects."""

    def __init__(self) -> None:
        super().__init__()
        self.features = [Sparse("item", 10), Sparse("user", 10), Dense("age", 4)]
        self.tables = nn.ModuleDict(
            {each.name: nn.Embedding(each.rows, WIDTH) for each in self.features if isinstance(each, Sparse)}
        )

    def fit(self, x: Any, optimizer: Any = None) -> None:
        """Never called by the forward: nothing in it counts."""
        if optimizer is None or isinstance(x, dict):
            return
        with torch.no_grad():
            self.history = [float(step) for step in x]
        try:
            print(self.compile(x.item()))
        except RuntimeError:
            raise

    def compile(self, optimizer: Any) -> Any:  # type: ignore[override]
        return optimizer.lower() if isinstance(optimizer, str) else optimizer

    def embedded(self, x: dict[str, Tensor]) -> Tensor:
        sparse = list(filter(lambda each: isinstance(each, Sparse), self.features)) if len(self.features) else []
        dense = [x[each.name] for each in self.features if type(each) is Dense]
        return torch.cat([self.tables[each.name](x[each.name]) for each in sparse] + dense, -1)


class ClickModel(FeatureModel):
    """A DCN-like model over such features."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH + 4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = None

    def forward(self, x: dict[str, Tensor], compile: bool = False) -> Tensor:
        embedded = self.embedded(x)
        if not isinstance(embedded, torch.Tensor) or (x.get("weight") is not None):
            raise TypeError("no tensor")
        return self.tower(embedded) if compile is False else embedded


def click_inputs(batch: int) -> dict[str, Tensor]:
    ids = {name: torch.randint(0, 10, (batch,)) for name in ("item", "user")}
    return {**ids, "age": torch.rand(batch, 4)}

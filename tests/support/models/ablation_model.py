"""A model with something for each of the paper's mods, small enough to run every variant of it in a second."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 32


class Block(nn.Module):
    """Linear, norm, SiLU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.SiLU()
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.norm(self.up(x))))
        return out


class Clicks(nn.Module):
    """Ids and features -> logits."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        x = self.table(ids) + x
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x).squeeze(-1)
        return logits


def build() -> nn.Module:
    return Clicks()


def untrainable() -> nn.Module:
    """Its forward raises in training."""
    model = Clicks()

    def refuse(module: nn.Module, arguments: object, values: object) -> None:
        if module.training:
            raise RuntimeError("untrainable")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def broken() -> nn.Module:
    """One of its weights is no number."""
    model = Clicks()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    return model


def dying() -> nn.Module:
    """Ends the process that builds it."""
    print("a compiler's chatter", flush=True)
    os._exit(3)


def sleeping() -> nn.Module:
    """Takes its time."""
    time.sleep(60)
    return Clicks()


def inputs(batch_size: int, width: int = WIDTH) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "ids": torch.randint(10, (batch_size,), generator=made),
        "x": torch.randn(batch_size, width, generator=made).requires_grad_(),
    }


def wide() -> nn.Module:
    """Wide enough for the kernels of a GPU."""
    return Clicks(512)


def wide_inputs(batch_size: int) -> dict[str, Tensor]:
    return inputs(batch_size, 512)


def batches(batch_size: int, seed: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    made = torch.Generator().manual_seed(seed)
    for _ in range(12):
        x = torch.randn(batch_size, WIDTH, generator=made)
        yield {"ids": torch.randint(10, (batch_size,), generator=made), "x": x}, (x[:, 0] > 0).float()


def held_out(batch_size: int, seed: int) -> list[tuple[dict[str, Any], Tensor]]:
    return list(batches(batch_size, seed + 1000))[:2]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, target)


def raising_once(output: Tensor, target: Tensor) -> Tensor:
    """A loss that raises on rank 1, the first time in the current directory."""
    if dist.is_initialized() and dist.get_rank() and not Path("failed").exists():
        Path("failed").touch()
        raise ValueError("not on this rank")
    return loss(output, target)


def dying_once(output: Tensor, target: Tensor) -> Tensor:
    """A loss that ends the process of rank 1, the first time in the current directory."""
    if dist.is_initialized() and dist.get_rank() and not Path("failed").exists():
        Path("failed").touch()
        os._exit(3)
    return loss(output, target)

"""Sampling of the rows of a call."""

from __future__ import annotations

import torch
from torch import Tensor

SEED = 20260417


class RowNumbers:
    """Draws row indices on the device, from its own generators: training's random numbers do not change."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._generators: dict[torch.device, torch.Generator] = {}

    def prepare(self, device: torch.device) -> None:
        """Create a device's generator."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)

    def draw(self, total: int, device: torch.device) -> Tensor | None:
        """`rows` different indices below `total`, (R,) int64; None if all rows are to be taken.

        One from each of `rows` equal parts of the call, rotated by a random offset: no index is drawn twice, so that
        pairs of sampled rows are pairs of different rows.
        """
        if total <= self.rows:
            return None
        self.prepare(device)
        generator, part = self._generators[device], total // self.rows
        within = torch.randint(part, (self.rows,), device=device, generator=generator)
        turn = torch.randint(total, (1,), device=device, generator=generator)
        return (torch.arange(self.rows, device=device) * part + within + turn) % total


def is_rerun() -> bool:
    """True if the running forward is a recomputation for a backward, by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)

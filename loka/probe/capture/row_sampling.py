"""Which rows of a call are looked at."""

from __future__ import annotations

import torch
from torch import Tensor

SEED = 20260417


class RowNumbers:
    """Draws row numbers on the device, from generators of its own: training's random numbers stay as they are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._generators: dict[torch.device, torch.Generator] = {}

    def prepare(self, device: torch.device) -> None:
        """Make a device's generator."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)

    def draw(self, total: int, device: torch.device) -> Tensor | None:
        """`rows` different numbers below `total`, (R,) int64; None where all rows are to be taken.

        One of each of `rows` equal parts of the call, turned by a random number: nothing is drawn twice, so that pairs
        of sampled rows are pairs of different rows.
        """
        if total <= self.rows:
            return None
        self.prepare(device)
        generator, part = self._generators[device], total // self.rows
        within = torch.randint(part, (self.rows,), device=device, generator=generator)
        turn = torch.randint(total, (1,), device=device, generator=generator)
        return (torch.arange(self.rows, device=device) * part + within + turn) % total


def is_rerun() -> bool:
    """Whether a forward that runs now is run again for a backward, by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)

"""Multi-task rankers with mixtures of experts: MMoE (KDD 2018) and PLE (RecSys 2020).

Experts are small MLPs over the same features. Each task has a gate, a softmax over experts that its tower reads the
weighted sum of. PLE adds experts of one task alone, and stacks several levels of experts and gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MultiTaskSizes:
    """Sizes of an MMoE, which has one level and no own experts, or of a PLE."""

    inputs: int
    tasks: int
    shared: int  # experts of all tasks
    own: int  # experts of each task alone
    levels: int
    expert: tuple[int, ...]  # widths of an expert's layers
    tower: tuple[int, ...]  # widths of a tower's hidden layers
    batch_norm: bool  # in the towers


MMOE_SIZES = MultiTaskSizes(
    inputs=1344, tasks=2, shared=8, own=0, levels=1, expert=(1024, 512), tower=(256, 128), batch_norm=True
)
PLE_SIZES = MultiTaskSizes(
    inputs=1344, tasks=2, shared=4, own=2, levels=2, expert=(1024, 512), tower=(256, 128), batch_norm=True
)


def hidden_layers(inputs: int, widths: tuple[int, ...], batch_norm: bool = False) -> nn.Sequential:
    """Linear, optionally BatchNorm, and ReLU for each width: (B, inputs) -> (B, widths[-1])."""
    parts: list[nn.Module] = []
    for width in widths:
        parts += [nn.Linear(inputs, width), *([nn.BatchNorm1d(width)] if batch_norm else []), nn.ReLU()]
        inputs = width
    return nn.Sequential(*parts)


def mixture(gate: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """The sum of E experts (B, width), weighted by the softmax of a gate (B, E): (B, width)."""
    weights = torch.softmax(gate, 1).unsqueeze(1)
    return torch.matmul(weights, torch.stack(list(experts), 1)).squeeze(1)


class Experts(nn.ModuleList):
    """MLPs over one input: (B, inputs) -> a list of (B, expert[-1])."""

    def __init__(self, count: int, inputs: int, sizes: MultiTaskSizes) -> None:
        super().__init__([hidden_layers(inputs, sizes.expert) for _ in range(count)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [expert(x) for expert in self]


class ExpertLevel(nn.Module):
    """Experts and gates: one input (B, inputs) a task, and one for the shared experts -> (B, expert[-1]) of each.

    The shared output, from all experts, is what the next level's shared experts read; the last level has none.
    """

    def __init__(self, inputs: int, sizes: MultiTaskSizes, last: bool) -> None:
        super().__init__()
        tasks = range(sizes.tasks)
        self.shared = Experts(sizes.shared, inputs, sizes)
        self.own = nn.ModuleList([Experts(sizes.own, inputs, sizes) for _ in tasks])
        self.gates = nn.ModuleList([nn.Linear(inputs, sizes.own + sizes.shared, bias=False) for _ in tasks])
        everything = sizes.tasks * sizes.own + sizes.shared
        self.shared_gate = None if last else nn.Linear(inputs, everything, bias=False)

    def forward(self, tasks: list[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        of_all = self.shared(shared)
        of_tasks = [experts(x) for experts, x in zip(self.own, tasks, strict=True)]
        mixed = [mixture(gate(x), own + of_all) for gate, x, own in zip(self.gates, tasks, of_tasks, strict=True)]
        if self.shared_gate is not None:
            shared = mixture(self.shared_gate(shared), sum(of_tasks, of_all))
        return mixed, shared


class MultiTask(nn.Module):
    """Only the dense part: features (B, inputs) -> one logit a task, (B, tasks)."""

    def __init__(self, sizes: MultiTaskSizes) -> None:
        super().__init__()
        inputs = [sizes.inputs] + [sizes.expert[-1]] * (sizes.levels - 1)
        self.levels = nn.ModuleList(
            [ExpertLevel(width, sizes, last=i == len(inputs) - 1) for i, width in enumerate(inputs)]
        )
        self.towers = nn.ModuleList(
            [
                nn.Sequential(
                    hidden_layers(sizes.expert[-1], sizes.tower, sizes.batch_norm), nn.Linear(sizes.tower[-1], 1)
                )
                for _ in range(sizes.tasks)
            ]
        )

    def forward(self, features: Tensor) -> Tensor:
        tasks, shared = [features] * len(self.towers), features
        for level in self.levels:
            tasks, shared = level(tasks, shared)
        return torch.cat([tower(x) for tower, x in zip(self.towers, tasks, strict=True)], 1)

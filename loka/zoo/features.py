"""Embedding of raw features, the first part of every ranker of the zoo."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INITIAL_STD = 0.1  # of the embeddings; with unit variance, unseen ids would add too much noise


class FeatureEmbedding(nn.Module):
    """Dense features (B, dense), float, and categorical ids (B, tables), int64 -> embeddings (B, 1 + tables, dim).

    A small MLP turns the dense features into the first embedding; each categorical id is looked up in its own table of
    `rows[i]` rows.
    """

    def __init__(self, rows: tuple[int, ...], dense: int, dim: int) -> None:
        super().__init__()
        tables = [nn.Embedding(count, dim) for count in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=INITIAL_STD)
        self.tables = nn.ModuleList(tables)
        self.dense = nn.Sequential(nn.Linear(dense, 2 * dim), nn.LayerNorm(2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return torch.stack([self.dense(dense), *looked_up], 1)

"""From raw features to embeddings: what every ranker of the zoo begins with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INITIAL_STD = 0.1  # of the embeddings; unit variance would let unseen ids shout


class FeatureEmbedding(nn.Module):
    """Dense features (B, dense), float, and categorical ids (B, tables), int64 -> embeddings (B, 1 + tables, dim).

    The dense features become one embedding, the first, through a small MLP; each categorical id is looked up in a
    table of its own, of `rows[i]` rows.
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

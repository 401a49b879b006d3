"""A Wukong behind TorchRec's embedding tables, and synthetic clicks; the policy names its dense part alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from loka.zoo import Wukong, WukongSizes

BATCH = 256  # of a rank
DENSE = 16  # dense features
ROWS = 1000  # of each table
NAMES = [f"field_{i}" for i in range(7)]  # of the categorical features
SIZES = WukongSizes(embeddings=1 + len(NAMES), dim=32, layers=2, rank=8, hidden=128)


@dataclass
class Batch(Pipelineable):
    """Dense features (B, DENSE), ids of each categorical feature, and clicks (B,)."""

    dense: Tensor
    ids: KeyedJaggedTensor
    clicks: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in (self.dense, self.ids, self.clicks)))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.ids, self.clicks):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.ids.pin_memory(), self.clicks.pin_memory())


class DensePart(nn.Module):
    """Dense features (B, DENSE) and pooled embeddings (B, tables * dim) to the logit (B, 1) of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(DENSE, SIZES.dim)
        self.wukong = Wukong(SIZES)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        embeddings = pooled.view(-1, len(NAMES), SIZES.dim)
        return self.wukong(torch.cat([self.bottom(dense).unsqueeze(1), embeddings], 1))


class Ranker(nn.Module):
    """The whole model, as TrainPipelineSparseDist takes it: a batch to the loss and what the pipeline returns."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"table_{name}", embedding_dim=SIZES.dim, num_embeddings=ROWS, feature_names=[name])
            for name in NAMES
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))  # made where sharded
        self.dense_part = DensePart()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.dense_part(batch.dense, self.embeddings(batch.ids).values())
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float().squeeze(1), batch.clicks)
        return loss, loss.detach()


def dense_part() -> DensePart:
    """What the policy plans; its weights are drawn from torch's generator."""
    return DensePart()


def example_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs of the dense part's forward."""
    return torch.randn(batch_size, DENSE), torch.randn(batch_size, len(NAMES) * SIZES.dim) * ROWS**-0.5


def batches(batch_size: int, seed: int) -> Iterator[Batch]:
    """Endless batches: a click depends on the dense features and on the ids' parity."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.linspace(-1, 1, DENSE)
    while True:
        dense = torch.randn(batch_size, DENSE, generator=random)
        ids = torch.randint(ROWS, (len(NAMES), batch_size), generator=random)
        clicks = torch.bernoulli((dense @ weight + (ids % 2 - 0.5).sum(0)).sigmoid(), generator=random)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        yield Batch(dense, KeyedJaggedTensor(keys=NAMES, values=ids.flatten(), lengths=lengths), clicks)

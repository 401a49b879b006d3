"""DLRM-DCNv2: a low-rank cross network (arXiv 2008.13535) and an over-arch, in MLPerf's size and small."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.zoo.clicks import FeatureEmbedding


@dataclass(frozen=True, slots=True)
class DCNSizes:
    """Sizes of a DCNv2, whose width is `embeddings * dim`."""

    embeddings: int
    dim: int
    layers: int  # of the cross network
    rank: int
    over: tuple[int, ...]  # widths of the over-arch's hidden layers

    @property
    def width(self) -> int:
        """Width of the cross network."""
        return self.embeddings * self.dim


MLPERF = DCNSizes(embeddings=27, dim=128, layers=3, rank=512, over=(1024, 1024, 512, 256))


class CrossLayer(nn.Module):
    """x0 * (up(down(x)) + bias) + x, all (B, width): feature crosses of one degree more, at low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.up(self.down(x)) + x
        return crossed


def over_arch(inputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Linear and ReLU for each hidden width, then one logit: (B, inputs) -> (B, 1)."""
    parts: list[nn.Module] = []
    for width in hidden:
        parts += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*parts, nn.Linear(inputs, 1))


class DCNv2(nn.Module):
    """Only the dense part, for measuring speed: embeddings (B, embeddings, dim) -> logits (B, 1)."""

    def __init__(self, sizes: DCNSizes) -> None:
        super().__init__()
        self.cross = nn.ModuleList([CrossLayer(sizes.width, sizes.rank) for _ in range(sizes.layers)])
        self.over = over_arch(sizes.width, sizes.over)

    def forward(self, embeddings: Tensor) -> Tensor:
        x0 = x = embeddings.flatten(1)
        for layer in self.cross:
            x = layer(x0, x)
        logits: Tensor = self.over(x)
        return logits


class DLRM(nn.Module):
    """The whole ranker: dense features (B, dense) and categorical ids (B, tables) -> logits (B,)."""

    def __init__(self, sizes: DCNSizes, rows: tuple[int, ...], dense: int) -> None:
        super().__init__()
        if len(rows) + 1 != sizes.embeddings:
            raise ValueError(
                f"{len(rows)} tables and the dense features make {len(rows) + 1} embeddings, "
                f"but sizes.embeddings is {sizes.embeddings}"
            )
        self.embed = FeatureEmbedding(rows, dense, sizes.dim)
        self.interact = DCNv2(sizes)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        logits: Tensor = self.interact(self.embed(dense, ids))
        return logits.squeeze(1)

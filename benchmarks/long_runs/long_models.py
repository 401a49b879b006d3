"""Models of full size on the embedded click data, whose 15 ids and dense features each get several embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo import clicks
from loka.zoo.clicks import FeatureEmbedding
from loka.zoo.dlrm import DCNSizes, DCNv2
from loka.zoo.wukong import SMALL, Wukong, WukongSizes

FIELDS = 1 + len(clicks.ROWS)  # 16
FULL_DCN = DCNSizes(embeddings=2 * FIELDS, dim=128, layers=3, rank=512, over=(1024, 1024, 512, 256))
TINY = WukongSizes(embeddings=2 * FIELDS, dim=16, layers=1, rank=8, hidden=96)


class Embedded(nn.Module):
    """An interaction over embeddings of ids (B, 15) and dense features (B, 13), as many for each field: logits (B,)."""

    def __init__(self, interaction: nn.Module, embeddings: int, dim: int) -> None:
        super().__init__()
        self.embed = FeatureEmbedding(clicks.ROWS, clicks.DENSE, embeddings // FIELDS * dim)
        self.interaction = interaction
        self.embeddings, self.dim = embeddings, dim

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(dense, ids).view(-1, self.embeddings, self.dim)
        logits: Tensor = self.interaction(x)
        return logits.flatten()


def wukong() -> nn.Module:
    """Wukong small: 64 embeddings of 128, four for each field."""
    return Embedded(Wukong(SMALL), SMALL.embeddings, SMALL.dim)


def dcnv2() -> nn.Module:
    """DCNv2 about as wide as MLPerf's: 32 embeddings of 128, two for each field."""
    return Embedded(DCNv2(FULL_DCN), FULL_DCN.embeddings, FULL_DCN.dim)


def tiny() -> nn.Module:
    """A Wukong to try the study with on a CPU."""
    return Embedded(Wukong(TINY), TINY.embeddings, TINY.dim)


def inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Dense features and ids of the right shapes and ranges."""
    return clicks.example(batch_size)


RECIPE = "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}"
MODS = ("no_bias", "block_norm", "hard_swish")  # those that make another model

POLICY = """\
version: 1
name: {name}
model: {{factory: "benchmarks.long_runs.long_models:{model}", inputs: "benchmarks.long_runs.long_models:inputs",
  batch_size: {batch}}}
defaults: {recipe}
rules:
  - {{match: {{max_n: {smallest}}}, compute: keep, optional: true}}
  - {{match: {{max_k: {smallest}}}, compute: keep, optional: true}}
  - {{match: "embed.*", compute: keep}}
mods:
  - {{use: fuse_interaction, optional: true}}
{mods}"""


@dataclass(frozen=True, slots=True)
class LongModel:
    """A model of the study. `smallest`: sites with K or N up to this stay native. `rate`: of Adam, constant."""

    name: str
    smallest: int
    rate: float = 1e-3

    def build(self) -> nn.Module:
        """The model, with weights from torch's generator."""
        built = {"wukong": wukong, "dcnv2": dcnv2, "tiny": tiny}[self.name]
        return built()

    def policy(self, mods: bool, batch: int) -> str:
        """The text of its policy, with the mods that make another model or without."""
        uses = "".join(f'  - {{use: {mod}, except: "embed.*", optional: true}}\n' for mod in MODS) if mods else ""
        return POLICY.format(
            name=f"long_{self.name}{'_mods' if mods else ''}", model=self.name, batch=batch, recipe=RECIPE,
            smallest=self.smallest, mods=uses,
        )  # fmt: skip


MODELS = {
    each.name: each
    for each in (
        LongModel("wukong", 64),
        LongModel("dcnv2", 64, rate=3e-4),  # at 1e-3 it is lost after 17,000 steps, in BF16, too
        LongModel("tiny", 16),
    )
}


def batch_on(device: str, batch: tuple[tuple[Tensor, Tensor], Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A batch of the stream on the device; from pinned memory it does not wait."""
    (dense, ids), click = batch
    moved = tuple(
        (each.pin_memory() if device != "cpu" and torch.cuda.is_available() else each).to(device, non_blocking=True)
        for each in (dense, ids, click)
    )
    return (moved[0], moved[1]), moved[2]

"""TorchRec's DLRM_DCN with four tables, and its dense part by itself, as a policy plans it."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM_DCN

NAMES = [f"field_{i}" for i in range(4)]
DIM, DENSE, ROWS = 32, 16, 100
POLICY = """\
version: 1
name: dlrm_dcn
model: {factory: "tests.support.models.torchrec_dlrm:dense_part", inputs: "tests.support.models.torchrec_dlrm:inputs",
        batch_size: 64}
target: reference
units: ["*_arch"]
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, fuse: always}
rules: [{match: {max_n: 16}, compute: keep}]
"""


class DensePart(nn.Module):
    """The modules of a DLRM_DCN that follow its tables: dense (B, DENSE) and embeddings (B, tables, DIM) to logits."""

    def __init__(self, model: DLRM_DCN) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = model.dense_arch, model.inter_arch, model.over_arch

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return self.over_arch(self.inter_arch(self.dense_arch(dense), embeddings))


def dlrm_dcn() -> DLRM_DCN:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"table_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in NAMES
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return DLRM_DCN(embeddings, DENSE, [64, DIM], [128, 64, 1], 2, 32)


def dense_part() -> DensePart:
    return DensePart(dlrm_dcn())


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, DENSE), torch.randn(rows, len(NAMES), DIM)

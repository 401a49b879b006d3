"""The dense part of TorchEasyRec's MMoE: what follows the embedding tables, for the policy and for training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from tzrec.main import _create_features, _create_model
from tzrec.models.model import BaseModel
from tzrec.utils.config_util import load_pipeline_config

CONFIG = str(Path(__file__).with_name("mmoe.config"))


class DensePart(nn.Module):
    """The experts, the gates and the towers of a model; they stay where they are in it."""

    def __init__(self, model: BaseModel) -> None:
        super().__init__()
        self.mmoe = model.mmoe
        self.towers = model._task_tower

    def forward(self, embeddings: Tensor) -> list[Tensor]:
        return [tower(mixed) for tower, mixed in zip(self.towers, self.mmoe(embeddings), strict=True)]


def build() -> DensePart:
    """The dense part of the model in the config; its tables are on the meta device."""
    config = load_pipeline_config(CONFIG)
    features = _create_features(list(config.feature_configs), config.data_config)
    return DensePart(_create_model(config.model_config, features, list(config.data_config.label_fields)))


def inputs(batch_size: int) -> tuple[Tensor]:
    """Embeddings of all features of a batch, side by side."""
    config = load_pipeline_config(CONFIG)
    width = sum(each.id_feature.embedding_dim for each in config.feature_configs)
    return (torch.randn(batch_size, width, requires_grad=True),)

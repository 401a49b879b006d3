"""DIN (arXiv 1706.06978): a history is pooled with weights that an MLP gives each behaviour beside the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class DINSizes:
    """Sizes of a DIN."""

    length: int  # S, of the history
    dim: int  # d, of an embedding
    features: int  # F, other embeddings
    attention: tuple[int, ...]  # widths of the hidden layers that weigh a behaviour
    over: tuple[int, ...]  # widths of the over-arch's hidden layers


DIN_SIZES = DINSizes(length=50, dim=128, features=20, attention=(256, 128), over=(1024, 512, 256))


class TargetAttention(nn.Module):
    """History (B, S, d), target (B, d), mask (B, S) -> its weighted sum (B, d), without a softmax, as in the paper."""

    def __init__(self, sizes: DINSizes) -> None:
        super().__init__()
        self.mlp = over_arch(4 * sizes.dim, sizes.attention)

    def forward(self, history: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        wanted = target.unsqueeze(1).expand_as(history)
        weights = self.mlp(torch.cat([wanted, history, wanted - history, wanted * history], 2)).squeeze(2)
        return torch.matmul((weights * mask).unsqueeze(1), history).squeeze(1)


class DIN(nn.Module):
    """Only the dense part: features (B, F, d), history (B, S, d), target (B, d) and mask (B, S) -> logits (B, 1).

    The mask is 1.0 for a behaviour and 0.0 behind the end of a shorter history.
    """

    def __init__(self, sizes: DINSizes) -> None:
        super().__init__()
        self.pool = TargetAttention(sizes)
        self.over = over_arch((sizes.features + 2) * sizes.dim, sizes.over)

    def forward(self, features: Tensor, history: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        pooled = self.pool(history, target, mask)
        logits: Tensor = self.over(torch.cat([features.flatten(1), pooled, target], 1))
        return logits

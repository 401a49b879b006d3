"""MLPs with BatchNorm, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IN, OUT = 48, 32


class Listed(nn.Module):
    """Layers in lists, the activation a function, a residual around the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(IN, 64), nn.Linear(64, 64), nn.Linear(64, OUT)])
        self.dropout = nn.Dropout(0.2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(64), nn.BatchNorm1d(64, eps=1e-3, momentum=0.3)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.linears[0](x)))
        x = x + self.dropout(F.gelu(self.norms[1](self.linears[1](x))))
        out: Tensor = self.linears[2](x)
        return out


def layer_normed() -> nn.Module:
    """A dropout after a LayerNorm, and one after an activation alone."""
    return nn.Sequential(
        nn.Linear(IN, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.1),
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, OUT),
    )  # fmt: skip


def sequential() -> nn.Module:
    """A tower whose norms and dropouts differ: with everything, without a bias, parameters, or an activation."""
    return nn.Sequential(
        nn.Linear(IN, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, 96, bias=False), nn.BatchNorm1d(96, affine=False), nn.SiLU(), nn.Dropout(0.3),
        nn.Linear(96, 64), nn.BatchNorm1d(64),
        nn.Linear(64, OUT),
    )  # fmt: skip


def leaky() -> nn.Module:
    """LeakyReLUs, with torch's slope and another, between norms and dropouts."""
    return nn.Sequential(
        nn.Linear(IN, 64), nn.BatchNorm1d(64), nn.LeakyReLU(), nn.Dropout(0.1),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(64, OUT),
    )  # fmt: skip


def seeded(body: nn.Module) -> nn.Module:
    """The same with statistics and parameters of its norms that are not the usual ones."""
    with torch.no_grad():
        for module in body.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.num_batches_tracked.fill_(3)
                for vector in module.parameters(recurse=False):
                    vector.uniform_(0.5, 1.5)
    return body


def batch(rows: int) -> Tensor:
    return 3.0 * torch.randn(rows, IN) + 1.0

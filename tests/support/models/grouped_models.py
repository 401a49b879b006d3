"""An MLP for each of several groups, whose matrices are one Parameter, in some spellings."""

from __future__ import annotations

from pathlib import Path

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn

GROUPS, D, H = {groups}, {d}, {h}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.norm = nn.Linear(8, GROUPS * D), nn.LayerNorm(D)
        self.w = nn.Parameter(torch.randn(GROUPS, D, H) * D**-0.5)
        self.v = nn.Parameter(torch.randn(GROUPS, H, D) * H**-0.5)
        self.b, self.c = nn.Parameter(torch.randn(GROUPS, H)), nn.Parameter(torch.randn(GROUPS, 1, D))
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(D, 3)

    def mlp(self, x):  # (B, GROUPS, D)
        {mlp}

    def forward(self, x):
        x = self.norm(self.inner(x).view(-1, GROUPS, D))
        return self.out((x + self.mlp(x)).mean(1))


def make():
    return Tokens()


def example_inputs(batch):
    return (torch.randn(batch, 8),)
"""
LOOP = (
    "y = [F.gelu(x[:, i] @ self.w[i] + self.b[i]) @ self.v[i] + self.c[i] for i in range(GROUPS)]; "
    "return torch.stack(y, 1)"
)
EINSUM = (
    'y = F.gelu(torch.einsum("bti,tio->bto", x, self.w) + self.b); '
    'return torch.einsum("bto,tod->btd", y, self.v) + self.c.squeeze(1)'
)
# Spellings of the same function, with whether the two products of a group are one chain.
SPELLINGS = {
    "einsum": (EINSUM, True),
    "batched": (
        "y = F.gelu(torch.bmm(x.transpose(0, 1), self.w) + self.b.unsqueeze(1)); "
        "return (y.bmm(self.v) + self.c).transpose(0, 1)",
        True,
    ),
    "four dimensions": (
        "y = F.gelu((x.unsqueeze(2) @ self.w).add(self.b[:, None])); return ((y @ self.v) + self.c).squeeze(2)",
        True,
    ),
    "groups in the middle": (
        'y = F.gelu(torch.einsum("tio,bti->bto", self.w, x) + self.b); '
        'return torch.einsum("...to,tod->...td", [y, self.v]) + self.c.transpose(0, 1)',
        True,
    ),
    "two readers": (
        'y = F.gelu(torch.einsum("bti,tio->bto", x, self.w) + self.b); '
        'return torch.einsum("bto,tod->btd", y, self.v) + self.c.squeeze(1) + 0.0 * y.sum(2, keepdim=True)',
        False,
    ),
}


def written(folder: Path, mlp: str, groups: int = 3, d: int = 128, h: int = 128) -> str:
    """The name of a module with a model whose groups are computed by `mlp`."""
    name = f"grouped_{abs(hash((mlp, groups, d, h)))}"
    (folder / f"{name}.py").write_text(MODEL.format(groups=groups, d=d, h=h, mlp=mlp.replace("; ", "\n        ")))
    return name

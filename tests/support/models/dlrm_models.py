"""Models with the dot interaction of a DLRM, in some spellings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

N, D = 9, 16
MODEL = """\
import torch
from torch import nn

N, D = {n}, {d}


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        i, j = torch.tril_indices(N, N, -1)
        for name, value in (("i", i), ("j", j), ("flat", i * N + j), ("mask", torch.ones(N, N).tril(-1).bool())):
            self.register_buffer(name, value)
        self.emb = nn.Linear(8, N * D)
        self.top = nn.Linear({pairs} + D, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        t = self.emb(x).view(-1, N, D)
        p = {products}
        return self.out(torch.relu(self.top(torch.cat([t[:, 0], p.flatten(1)], 1)))).squeeze(-1)


def inputs(batch):
    return (torch.randn(batch, 8),)
"""
FUSED = {
    "indices": "torch.bmm(t, torch.transpose(t, 1, 2))[:, self.i, self.j]",
    "matmul": "(t @ t.mT).flatten(1)[:, self.flat]",
    "einsum": 'torch.einsum("bnd,bmd->bnm", t, t)[:, self.i, self.j]',
    "select": "torch.index_select(torch.matmul(t, t.permute(0, 2, 1)).reshape(-1, N * N), 1, self.flat)",
    "mask": "torch.masked_select(torch.bmm(t, t.transpose(1, 2)), self.mask).view(t.shape[0], -1)",
    "contiguous": "(torch.bmm(t, t.transpose(-1, -2).contiguous()) * 0.5)[:, self.i, self.j]",
}
POLICY = (
    'version: 1\nname: dlrm\nmodel: {{factory: "{module}:Dlrm", inputs: "{module}:inputs", batch_size: 32}}\n'
    "defaults: {{compute: {compute}, fuse: always}}\nmods: [{mods}]\n"
)


def written(folder: Path, products: str, n: int = N, d: int = D) -> str:
    """The name of a module with a model whose pairs are `products`."""
    name = f"dlrm_{abs(hash((products, n, d)))}"
    (folder / f"{name}.py").write_text(MODEL.format(n=n, d=d, pairs=n * (n - 1) // 2, products=products))
    return name


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]

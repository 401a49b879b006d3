"""What a generated modules.py looks like: one class for each group of modules that get the same forward."""

from __future__ import annotations

import torch

from loka import dispatch

from . import kernels

STAMP = "0" * 64


class Linear(dispatch.Bound):
    """A plain nn.Linear."""

    def loka_quantized(self):
        return {0: kernels.e4m3_rowwise(self.weight)}

    def forward(self, x):
        return kernels.linear_e4m3_rowwise(x, self.loka_frozen(0) or self.weight, self.bias, self.loka.counter_id(0))


class Block(dispatch.Bound):
    """The forward of an owner, with its child `up` inlined and its Parameter `down` as a GEMM."""

    def loka_quantized(self):
        return {0: kernels.e4m3_rowwise(self.up[0].weight), 1: kernels.e4m3_rowwise(self.down.transpose(-1, -2))}

    def forward(self, x):
        hidden = kernels.linear_e4m3_rowwise(
            x, self.loka_frozen(0) or self.up[0].weight, self.up[0].bias, self.loka.counter_id(0)
        )
        hidden = torch.nn.functional.silu(hidden)
        down = self.loka_frozen(1) or self.down.transpose(-1, -2)
        return kernels.linear_e4m3_rowwise(hidden, down, None, self.loka.counter_id(1)) + x


class Chain(dispatch.Bound):
    """The forward of an nn.Sequential that calls its first and third child."""

    def forward(self, x):
        return self[2](self[0](x))

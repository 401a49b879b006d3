"""What a generated modules.py looks like: one class for each group of modules that get the same forward."""

from __future__ import annotations

import torch

from loka import dispatch

from . import kernels

STAMP = "0" * 64


class Linear(dispatch.Bound):
    """A plain nn.Linear."""

    def forward(self, x):
        return kernels.linear_e4m3_rowwise(x, self.weight, self.bias, self.loka.counter_id(0))


class LinearFrozen(dispatch.Bound):
    """A plain nn.Linear whose weight is quantized once."""

    def quantize(self):
        return (kernels.e4m3_rowwise(self.weight),)

    def forward(self, x):
        return kernels.linear_e4m3_rowwise_frozen(
            x, self.loka_weight_0, self.loka_scale_0, self.bias, self.loka.counter_id(0)
        )


class Block(dispatch.Bound):
    """The forward of an owner, with its child `up` inlined and its Parameter `down` as a GEMM."""

    def forward(self, x):
        hidden = kernels.linear_e4m3_rowwise(x, self.up[0].weight, self.up[0].bias, self.loka.counter_id(0))
        hidden = torch.nn.functional.silu(hidden)
        return kernels.linear_e4m3_rowwise(hidden, self.down.transpose(-1, -2), None, self.loka.counter_id(1)) + x


class BlockFrozen(dispatch.Bound):
    """The same with frozen weights."""

    def quantize(self):
        return kernels.e4m3_rowwise(self.up[0].weight), kernels.e4m3_rowwise(self.down.transpose(-1, -2))

    def forward(self, x):
        hidden = kernels.linear_e4m3_rowwise_frozen(
            x, self.loka_weight_0, self.loka_scale_0, self.up[0].bias, self.loka.counter_id(0)
        )
        hidden = torch.nn.functional.silu(hidden)
        down = kernels.linear_e4m3_rowwise_frozen(
            hidden, self.loka_weight_1, self.loka_scale_1, None, self.loka.counter_id(1)
        )
        return down + x


class Chain(dispatch.Bound):
    """The forward of an nn.Sequential that calls its first and third child."""

    def forward(self, x):
        return self[2](self[0](x))

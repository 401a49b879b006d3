"""The modules of ranker.yaml that run in FP8.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

Each class becomes the class of the modules that its docstring names: their parameters, hooks and names stay, `forward`
is the one below. `self.loka.tick(i)` is the number under which the i-th of their GEMM sites counts itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka import dispatch

from . import kernels

STAMP = "e73321f904d70582b4355e13a43043e39200611ee0d27e7874bc613412e5b63f"


class EmbedDense3(dispatch.Bound):
    """embed.dense.3: torch.nn.modules.linear.Linear.

    M = 4096 (B), K = 64, N = 32; fprop, dgrad, wgrad in e4m3 rowwise.
    """

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise(x, self.weight, self.bias, self.loka.tick(0))


class EmbedDense3Frozen(dispatch.Bound):
    """embed.dense.3: torch.nn.modules.linear.Linear, its weights frozen.

    M = 4096 (B), K = 64, N = 32; fprop in e4m3 rowwise.
    """

    def quantize(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """The FP8 weight and its scales for each site; None where its weight is not frozen."""
        return (kernels.e4m3_rowwise(self.weight),)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise_frozen(
            x, self.loka_weight_0, self.loka_scale_0, self.bias, self.loka.tick(0)
        )


class Layers(dispatch.Bound):
    """layers.0, layers.1, layers.2: loka.zoo.wukong.WukongLayer.

    With the forward of fmb_norm, fmb, fmb.0, fmb.1, fmb.2, fmb.3, fmb.4, fmb.5, ... (9 in all).

    layers.0.fmb.0: M = 4096 (B), K = 128, N = 256; fprop, dgrad, wgrad in e4m3 rowwise.
    layers.0.fmb.3: M = 4096 (B), K = 256, N = 256; fprop, dgrad, wgrad in e4m3 rowwise.
    """

    def forward(self, x: Tensor) -> Tensor:
        transpose = x.transpose(1, 2)
        matmul = torch.matmul(transpose, self.rank)
        matmul_1 = torch.matmul(x, matmul)
        flatten = matmul_1.flatten(1)
        # from fmb_norm, fmb.0, fmb.1, fmb.2
        fmb_2 = kernels.layer_norm_linear_layer_norm_silu(
            flatten,
            self.fmb_norm.weight,
            self.fmb_norm.bias,
            self.fmb[0].weight,
            self.fmb[0].bias,
            self.fmb[1].weight,
            self.fmb[1].bias,
            self.loka.tick(0),
        )
        # from fmb.3, fmb.4, fmb.5
        fmb_5 = kernels.linear_layer_norm_silu(
            fmb_2, self.fmb[3].weight, self.fmb[3].bias, self.fmb[4].weight, self.fmb[4].bias, self.loka.tick(1)
        )
        # from fmb
        fmb_6 = self.fmb[6](fmb_5)
        view = fmb_6.view(-1, 8, 32)
        matmul_2 = torch.matmul(self.compress, x)
        cat = torch.cat([view, matmul_2], 1)
        add = cat + x
        # from norm
        return torch.nn.functional.layer_norm(add, (32,), weight=self.norm.weight, bias=self.norm.bias, eps=1e-05)


class LayersFrozen(dispatch.Bound):
    """layers.0, layers.1, layers.2: loka.zoo.wukong.WukongLayer, its weights frozen.

    With the forward of fmb_norm, fmb, fmb.0, fmb.1, fmb.2, fmb.3, fmb.4, fmb.5, ... (9 in all).

    layers.0.fmb.0: M = 4096 (B), K = 128, N = 256; fprop in e4m3 rowwise.
    layers.0.fmb.3: M = 4096 (B), K = 256, N = 256; fprop in e4m3 rowwise.
    """

    def quantize(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """The FP8 weight and its scales for each site; None where its weight is not frozen."""
        return (kernels.e4m3_rowwise(self.fmb[0].weight), kernels.e4m3_rowwise(self.fmb[3].weight))

    def forward(self, x: Tensor) -> Tensor:
        transpose = x.transpose(1, 2)
        matmul = torch.matmul(transpose, self.rank)
        matmul_1 = torch.matmul(x, matmul)
        flatten = matmul_1.flatten(1)
        # from fmb_norm, fmb.0, fmb.1, fmb.2
        fmb_2 = kernels.layer_norm_linear_layer_norm_silu_frozen(
            flatten,
            self.fmb_norm.weight,
            self.fmb_norm.bias,
            self.fmb[0].bias,
            self.fmb[1].weight,
            self.fmb[1].bias,
            self.loka_weight_0,
            self.loka_scale_0,
            self.loka.tick(0),
        )
        # from fmb.3, fmb.4, fmb.5
        fmb_5 = kernels.linear_layer_norm_silu_frozen(
            fmb_2,
            self.fmb[3].bias,
            self.fmb[4].weight,
            self.fmb[4].bias,
            self.loka_weight_1,
            self.loka_scale_1,
            self.loka.tick(1),
        )
        # from fmb
        fmb_6 = self.fmb[6](fmb_5)
        view = fmb_6.view(-1, 8, 32)
        matmul_2 = torch.matmul(self.compress, x)
        cat = torch.cat([view, matmul_2], 1)
        add = cat + x
        # from norm
        return torch.nn.functional.layer_norm(add, (32,), weight=self.norm.weight, bias=self.norm.bias, eps=1e-05)


class Linear256x256(dispatch.Bound):
    """layers.0.fmb.6, layers.1.fmb.6, layers.2.fmb.6, ... (5 in all): torch.nn.modules.linear.Linear.

    M = 4096 (B), K = 256, N = 256; fprop, dgrad, wgrad in e4m3 rowwise.
    """

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise(x, self.weight, self.bias, self.loka.tick(0))


class Linear256x256Frozen(dispatch.Bound):
    """layers.0.fmb.6, layers.1.fmb.6, layers.2.fmb.6, ... (5 in all): torch.nn.modules.linear.Linear, its weights
    frozen.

    M = 4096 (B), K = 256, N = 256; fprop in e4m3 rowwise.
    """

    def quantize(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """The FP8 weight and its scales for each site; None where its weight is not frozen."""
        return (kernels.e4m3_rowwise(self.weight),)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise_frozen(
            x, self.loka_weight_0, self.loka_scale_0, self.bias, self.loka.tick(0)
        )


class HeadMlp0(dispatch.Bound):
    """head.mlp.0: torch.nn.modules.linear.Linear.

    M = 4096 (B), K = 512, N = 256; fprop, dgrad, wgrad in e4m3 rowwise.
    """

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise(x, self.weight, self.bias, self.loka.tick(0))


class HeadMlp0Frozen(dispatch.Bound):
    """head.mlp.0: torch.nn.modules.linear.Linear, its weights frozen.

    M = 4096 (B), K = 512, N = 256; fprop in e4m3 rowwise.
    """

    def quantize(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """The FP8 weight and its scales for each site; None where its weight is not frozen."""
        return (kernels.e4m3_rowwise(self.weight),)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear_e4m3_rowwise_frozen(
            x, self.loka_weight_0, self.loka_scale_0, self.bias, self.loka.tick(0)
        )

"""The modules of ranker.yaml that run in FP8.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

Each class becomes the class of the modules that its docstring names: their parameters, hooks and names stay, `forward`
is the one below. `self.loka.counter_id(i)` is the number under which the i-th of their GEMM sites counts itself, and
`counter_ids(i, j, ...)` are those of several. In mode "infer" the FP8 weights and scales of `loka_quantized` are kept,
by site, and `self.loka_frozen(i)` gives them; in mode "train" it gives None, and each call quantizes the Parameter.
`loka_gatherable` names the weights of which one FP8 copy is all that is read, by site, each with the kernel that makes
it: FSDP can gather that copy (`Patch.gather_fp8`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loka import dispatch

from . import kernels

STAMP = "f060d11152abcbc565314b2b5c4dcf8721e3e74c1f0d00a6ef03fd467a4d3f0d"


class EmbedDense(dispatch.Bound):
    """embed.dense: torch.nn.modules.container.Sequential.

    With the forward of 0, 1, 2.

    embed.dense.0: M = 16384 (B), K = 13, N = 256; fprop, wgrad in the model's dtype.
    """

    def forward(self, input: Tensor) -> Any:
        # from 0, 1, 2
        v_2 = kernels.embed_dense_0(input, (self[0].weight, self[0].bias, self[1].weight, self[1].bias))
        return self[3](v_2)


class Layers(dispatch.Bound):
    """layers.0, layers.1, layers.2: loka.zoo.wukong.WukongLayer.

    With the forward of fmb_norm, fmb, fmb.0, fmb.1, fmb.2, fmb.3, fmb.4, fmb.5, ... (10 in all).

    layers.0.rank: M = 2097152 (128B), K = 16, N = 16; fprop, dgrad, wgrad in the model's dtype.
    layers.0.fmb.0: M = 16384 (B), K = 256, N = 2048; fprop, dgrad, wgrad in the model's dtype.
    layers.0.fmb.3: M = 16384 (B), K = 2048, N = 2048; fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3
        rowwise with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise.
    layers.0.fmb.6: M = 16384 (B), K = 2048, N = 1024; fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3
        rowwise with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise.
    layers.0.compress: M = 2097152 (128B), K = 16, N = 8; fprop, dgrad, wgrad in the model's dtype.
    """

    loka_gatherable = ((2, "fmb.3.weight", "quantize_weights"), (3, "fmb.6.weight", "quantize_weights"))

    def loka_quantized(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {2: kernels.e4m3_rowwise_pow2(self.fmb[3].weight), 3: kernels.e4m3_rowwise_pow2(self.fmb[6].weight)}

    def forward(self, x: Tensor) -> Any:
        # Not as planned: the module's own forward.
        if self.made != 8 or self.dim != 128:
            return super().forward(x)
        matmul_1, matmul_2, x_passed = kernels.layers_fm_interaction(x, self.rank, self.compress)
        flatten = matmul_1.flatten(-2)
        # from fmb_norm, fmb.0, fmb.1, fmb.2
        fmb_2 = kernels.layers_fmb_0(
            flatten,
            (self.fmb_norm.weight, self.fmb_norm.bias),
            (self.fmb[0].weight, self.fmb[0].bias, self.fmb[1].weight, self.fmb[1].bias),
        )
        # from fmb.3, fmb.4, fmb.5, fmb.6
        fmb_6 = kernels.layers_fmb_3_to_6(
            fmb_2,
            (self.loka_frozen(2) or self.fmb[3].weight, self.fmb[3].bias, self.fmb[4].weight, self.fmb[4].bias),
            (self.loka_frozen(3) or self.fmb[6].weight, self.fmb[6].bias),
            self.loka.counter_ids(2, 3),
        )
        view = fmb_6.unflatten(-1, (8, 128))
        # from norm
        return kernels.layers_concat_norm(view, matmul_2, x_passed, self.norm.weight, self.norm.bias)


class Head(dispatch.Bound):
    """head: torch.nn.modules.container.Sequential.

    With the forward of mlp, mlp.0, mlp.1, mlp.2, mlp.3, mlp.4, mlp.5, mlp.6, ... (10 in all).

    head.mlp.0: M = 16384 (B), K = 2048, N = 2048; fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3 rowwise
        with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise.
    head.mlp.3: M = 16384 (B), K = 2048, N = 2048; fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3 rowwise
        with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise.
    head.mlp.6: M = 16384 (B), K = 2048, N = 2048; fprop in e4m3 rowwise with power-of-two scales; dgrad in e4m3 rowwise
        with power-of-two scales by a transposed copy; wgrad in transposed copies, tensorwise.
    """

    loka_gatherable = (
        (0, "mlp.0.weight", "quantize_weights"),
        (1, "mlp.3.weight", "quantize_weights"),
        (2, "mlp.6.weight", "quantize_weights"),
    )

    def loka_quantized(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {
            0: kernels.e4m3_rowwise_pow2(self.mlp[0].weight),
            1: kernels.e4m3_rowwise_pow2(self.mlp[3].weight),
            2: kernels.e4m3_rowwise_pow2(self.mlp[6].weight),
        }

    def forward(self, input: Tensor) -> Any:
        # from mlp.0, mlp.1, mlp.2, mlp.3, mlp.4, mlp.5, mlp.6, norm, silu
        silu = kernels.head_mlp(
            input,
            (self.loka_frozen(0) or self.mlp[0].weight, self.mlp[0].bias, self.mlp[1].weight, self.mlp[1].bias),
            (self.loka_frozen(1) or self.mlp[3].weight, self.mlp[3].bias, self.mlp[4].weight, self.mlp[4].bias),
            (self.loka_frozen(2) or self.mlp[6].weight, self.mlp[6].bias, self.norm.weight, self.norm.bias),
            self.loka.counter_ids(0, 1, 2),
        )
        return self.out(silu)

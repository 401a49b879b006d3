"""FP8 for the model of ranker.yaml: `patch = ranker.apply(model)`.

Written by `loka generate`, which overwrites it: edit the policy and generate again.
"""

from __future__ import annotations

import torch

from loka import dispatch

STAMP = "f060d11152abcbc565314b2b5c4dcf8721e3e74c1f0d00a6ef03fd467a4d3f0d"
dispatch.check_stamps(__name__, STAMP)

from . import fused, kernels, modules  # noqa: E402 - after an interrupted generation they may be missing

dispatch.check_stamps(__name__, STAMP, fused.STAMP, kernels.STAMP, modules.STAMP)

# The modules of each class. `sites` are names for reports; `gemms` are the FP8 GEMMs of each site. `shapes` and
# `fingerprint`, the operations of the modules' own forward as planned, are compared with the model by `apply` and
# `verify`.
BINDINGS = (
    dispatch.Binding(
        bound=modules.EmbedDense,
        replaces="torch.nn.modules.container.Sequential",
        inlined=("0", "1", "2"),
        modules=("embed.dense",),
        sites=(("embed.dense.0",),),
        gemms=((),),
        shapes=(("0.weight", (256, 13)), ("0.bias", (256,)), ("1.weight", (256,)), ("1.bias", (256,))),
        fingerprint=dispatch.Fingerprint(
            (
                dispatch.PlannedCall(
                    "(('tuple', (('tensor', 'float32', ((5, 8), 13)),)), ('dict', ()))",
                    (
                        "v0 = linear(input, self.0.weight, self.0.bias)",
                        "v1 = layer_norm(v0, [256], self.1.weight, self.1.bias, 1e-05)",
                        "v2 = silu(v1, inplace=False)",
                        "v3 = self.3(v2) -> [?, 128]",
                        "return v3",
                    ),
                ),
            ),
            "float32",
        ),
    ),
    dispatch.Binding(
        bound=modules.Layers,
        replaces="loka.zoo.wukong.WukongLayer",
        inlined=("fmb_norm", "fmb", "fmb.0", "fmb.1", "fmb.2", "fmb.3", "fmb.4", "fmb.5", "fmb.6", "norm"),
        modules=("layers.0", "layers.1", "layers.2"),
        sites=(
            ("layers.0.rank", "layers.0.fmb.0", "layers.0.fmb.3", "layers.0.fmb.6", "layers.0.compress"),
            ("layers.1.rank", "layers.1.fmb.0", "layers.1.fmb.3", "layers.1.fmb.6", "layers.1.compress"),
            ("layers.2.rank", "layers.2.fmb.0", "layers.2.fmb.3", "layers.2.fmb.6", "layers.2.compress"),
        ),
        gemms=((), (), ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad"), ()),
        shapes=(
            ("rank", (16, 16)),
            ("compress", (8, 16)),
            ("fmb_norm.weight", (256,)),
            ("fmb_norm.bias", (256,)),
            ("fmb.0.weight", (2048, 256)),
            ("fmb.0.bias", (2048,)),
            ("fmb.1.weight", (2048,)),
            ("fmb.1.bias", (2048,)),
            ("fmb.3.weight", (2048, 2048)),
            ("fmb.3.bias", (2048,)),
            ("fmb.4.weight", (2048,)),
            ("fmb.4.bias", (2048,)),
            ("fmb.6.weight", (1024, 2048)),
            ("fmb.6.bias", (1024,)),
            ("norm.weight", (128,)),
            ("norm.bias", (128,)),
        ),
        fingerprint=dispatch.Fingerprint(
            (
                dispatch.PlannedCall(
                    "(('tuple', (('tensor', 'float32', ((5, 8), 16, 128)),)), ('dict', ()))",
                    (
                        "v0 = transpose(x, 1, 2)",
                        "v1 = matmul(v0, self.rank)",
                        "v2 = matmul(x, v1)",
                        "v3 = flatten(v2, 1)",
                        "v4 = layer_norm(v3, [256], self.fmb_norm.weight, self.fmb_norm.bias, 1e-05)",
                        "v5 = linear(v4, self.fmb.0.weight, self.fmb.0.bias)",
                        "v6 = layer_norm(v5, [2048], self.fmb.1.weight, self.fmb.1.bias, 1e-05)",
                        "v7 = silu(v6, inplace=False)",
                        "v8 = linear(v7, self.fmb.3.weight, self.fmb.3.bias)",
                        "v9 = layer_norm(v8, [2048], self.fmb.4.weight, self.fmb.4.bias, 1e-05)",
                        "v10 = silu(v9, inplace=False)",
                        "v11 = linear(v10, self.fmb.6.weight, self.fmb.6.bias)",
                        "v12 = view(v11, -1, 8, 128)",
                        "v13 = matmul(self.compress, x)",
                        "v14 = cat([v12, v13], 1)",
                        "v15 = add(v14, x)",
                        "v16 = layer_norm(v15, [128], self.norm.weight, self.norm.bias, 1e-05)",
                        "return v16",
                    ),
                ),
            ),
            "float32",
        ),
    ),
    dispatch.Binding(
        bound=modules.Head,
        replaces="torch.nn.modules.container.Sequential",
        inlined=("mlp", "mlp.0", "mlp.1", "mlp.2", "mlp.3", "mlp.4", "mlp.5", "mlp.6", "norm", "silu"),
        modules=("head",),
        sites=(("head.mlp.0", "head.mlp.3", "head.mlp.6"),),
        gemms=(("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")),
        shapes=(
            ("mlp.0.weight", (2048, 2048)),
            ("mlp.0.bias", (2048,)),
            ("mlp.1.weight", (2048,)),
            ("mlp.1.bias", (2048,)),
            ("mlp.3.weight", (2048, 2048)),
            ("mlp.3.bias", (2048,)),
            ("mlp.4.weight", (2048,)),
            ("mlp.4.bias", (2048,)),
            ("mlp.6.weight", (2048, 2048)),
            ("mlp.6.bias", (2048,)),
            ("norm.weight", (2048,)),
            ("norm.bias", (2048,)),
        ),
        fingerprint=dispatch.Fingerprint(
            (
                dispatch.PlannedCall(
                    "(('tuple', (('tensor', 'float32', ((5, 8), 2048)),)), ('dict', ()))",
                    (
                        "v0 = linear(input, self.mlp.0.weight, self.mlp.0.bias)",
                        "v1 = layer_norm(v0, [2048], self.mlp.1.weight, self.mlp.1.bias, 1e-05)",
                        "v2 = silu(v1, inplace=False)",
                        "v3 = linear(v2, self.mlp.3.weight, self.mlp.3.bias)",
                        "v4 = layer_norm(v3, [2048], self.mlp.4.weight, self.mlp.4.bias, 1e-05)",
                        "v5 = silu(v4, inplace=False)",
                        "v6 = linear(v5, self.mlp.6.weight, self.mlp.6.bias)",
                        "v7 = layer_norm(v6, [2048], self.norm.weight, self.norm.bias, 1e-05)",
                        "v8 = silu(v7, inplace=False)",
                        "v9 = self.out(v8) -> [?, 1]",
                        "return v9",
                    ),
                ),
            ),
            "float32",
        ),
    ),
)


def apply(model: torch.nn.Module, mode: str = "train", strict: bool = False) -> dispatch.Patch:
    """Bind the plan to a model, in place. Of the returned patch, `remove` undoes this and `verify` checks that it ran.

    `mode` is "train", or "infer" for weights that are quantized once and frozen. GEMMs of the model that the plan does
    not know are a warning, with `strict` a BindError.
    """
    return dispatch.apply(model, __name__, BINDINGS, target="h200", mode=mode, strict=strict)

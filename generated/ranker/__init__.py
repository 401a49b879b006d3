"""FP8 for the model of ranker.yaml: `patch = ranker.apply(model)`.

Written by `loka generate`, which overwrites it: edit the policy and generate again.
"""

from __future__ import annotations

import torch

from loka import dispatch

STAMP = "09a6edbc41d8a4a3fd15c962af5063905930aff9f7128675c44327ddde3026ca"
dispatch.check_stamps(__name__, STAMP)

from . import fused, kernels, modules  # noqa: E402 - after an interrupted generation they may be missing

dispatch.check_stamps(__name__, STAMP, fused.STAMP, kernels.STAMP, modules.STAMP)

# The modules of each class. `sites` are names for reports; `gemms` are the FP8 GEMMs of each site. `shapes`, `reads`
# and `constants` are built into the forward: `apply` and `verify` compare them with the model.
BINDINGS = (
    dispatch.Binding(
        train=modules.EmbedDense,
        infer=modules.EmbedDenseFrozen,
        replaces="torch.nn.modules.container.Sequential",
        source_hash="ec3ef193e570810b683b08e6649a6e45d359284f36aeeb8f41dc427ca8b285f4",
        inlined=("0", "1", "2"),
        modules=("embed.dense",),
        sites=(("embed.dense.0",),),
        gemms=((),),
        shapes=(("0.weight", (64, 13)), ("0.bias", (64,)), ("1.weight", (64,)), ("1.bias", (64,))),
        reads=(
            dispatch.Reads(("",), "torch.nn.modules.container.Sequential", holds=4),
            dispatch.Reads(("0",), "torch.nn.modules.linear.Linear"),
            dispatch.Reads(
                ("1",),
                "torch.nn.modules.normalization.LayerNorm",
                values=(("eps", "1e-05"), ("normalized_shape", "(64,)")),
            ),
            dispatch.Reads(("2",), "torch.nn.modules.activation.SiLU", values=(("inplace", "False"),)),
        ),
        called=("3",),
    ),
    dispatch.Binding(
        train=modules.Layers,
        infer=modules.LayersFrozen,
        replaces="loka.zoo.wukong.WukongLayer",
        source_hash="fb70cadda4e5ce2b86e262a13b2d8f4669510416bde2f32588f9aef891a04485",
        inlined=("fmb_norm", "fmb", "fmb.0", "fmb.1", "fmb.2", "fmb.3", "fmb.4", "fmb.5", "fmb.6", "norm"),
        modules=("layers.0", "layers.1", "layers.2"),
        sites=(
            ("layers.0.rank", "layers.0.fmb.0", "layers.0.fmb.3", "layers.0.fmb.6", "layers.0.compress"),
            ("layers.1.rank", "layers.1.fmb.0", "layers.1.fmb.3", "layers.1.fmb.6", "layers.1.compress"),
            ("layers.2.rank", "layers.2.fmb.0", "layers.2.fmb.3", "layers.2.fmb.6", "layers.2.compress"),
        ),
        gemms=((), ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad"), ()),
        shapes=(
            ("rank", (16, 8)),
            ("compress", (8, 16)),
            ("fmb_norm.weight", (128,)),
            ("fmb_norm.bias", (128,)),
            ("fmb.0.weight", (256, 128)),
            ("fmb.0.bias", (256,)),
            ("fmb.1.weight", (256,)),
            ("fmb.1.bias", (256,)),
            ("fmb.3.weight", (256, 256)),
            ("fmb.3.bias", (256,)),
            ("fmb.4.weight", (256,)),
            ("fmb.4.bias", (256,)),
            ("fmb.6.weight", (256, 256)),
            ("fmb.6.bias", (256,)),
            ("norm.weight", (32,)),
            ("norm.bias", (32,)),
        ),
        reads=(
            dispatch.Reads(("",), "loka.zoo.wukong.WukongLayer", values=(("dim", "32"), ("made", "8"))),
            dispatch.Reads(
                ("fmb_norm",),
                "torch.nn.modules.normalization.LayerNorm",
                values=(("eps", "1e-05"), ("normalized_shape", "(128,)")),
            ),
            dispatch.Reads(("fmb",), "torch.nn.modules.container.Sequential", holds=7),
            dispatch.Reads(("fmb.0", "fmb.3", "fmb.6"), "torch.nn.modules.linear.Linear"),
            dispatch.Reads(
                ("fmb.1", "fmb.4"),
                "torch.nn.modules.normalization.LayerNorm",
                values=(("eps", "1e-05"), ("normalized_shape", "(256,)")),
            ),
            dispatch.Reads(("fmb.2", "fmb.5"), "torch.nn.modules.activation.SiLU", values=(("inplace", "False"),)),
            dispatch.Reads(
                ("norm",),
                "torch.nn.modules.normalization.LayerNorm",
                values=(("eps", "1e-05"), ("normalized_shape", "(32,)")),
            ),
        ),
    ),
    dispatch.Binding(
        train=modules.Head,
        infer=modules.HeadFrozen,
        replaces="torch.nn.modules.container.Sequential",
        source_hash="353b3bd59de784cd78e5e926d0cf40fe87030670d114e648257ff87e762b8643",
        inlined=("mlp", "mlp.0", "mlp.1", "mlp.2", "mlp.3", "mlp.4", "mlp.5", "mlp.6", "norm", "silu"),
        modules=("head",),
        sites=(("head.mlp.0", "head.mlp.3", "head.mlp.6"),),
        gemms=(("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")),
        shapes=(
            ("mlp.0.weight", (256, 512)),
            ("mlp.0.bias", (256,)),
            ("mlp.1.weight", (256,)),
            ("mlp.1.bias", (256,)),
            ("mlp.3.weight", (256, 256)),
            ("mlp.3.bias", (256,)),
            ("mlp.4.weight", (256,)),
            ("mlp.4.bias", (256,)),
            ("mlp.6.weight", (256, 256)),
            ("mlp.6.bias", (256,)),
            ("norm.weight", (256,)),
            ("norm.bias", (256,)),
        ),
        reads=(
            dispatch.Reads(("",), "torch.nn.modules.container.Sequential", holds=("mlp", "norm", "silu", "out")),
            dispatch.Reads(("mlp",), "torch.nn.modules.container.Sequential", holds=7),
            dispatch.Reads(("mlp.0", "mlp.3", "mlp.6"), "torch.nn.modules.linear.Linear"),
            dispatch.Reads(
                ("mlp.1", "mlp.4", "norm"),
                "torch.nn.modules.normalization.LayerNorm",
                values=(("eps", "1e-05"), ("normalized_shape", "(256,)")),
            ),
            dispatch.Reads(
                ("mlp.2", "mlp.5", "silu"), "torch.nn.modules.activation.SiLU", values=(("inplace", "False"),)
            ),
        ),
        called=("out",),
    ),
)


def apply(model: torch.nn.Module, mode: str = "train") -> dispatch.Patch:
    """Bind the plan to a model, in place. Of the returned patch, `remove` undoes this and `verify` checks that it ran.

    `mode` is "train", or "infer" for weights that are quantized once and frozen.
    """
    return dispatch.apply(model, __name__, BINDINGS, target="h100", mode=mode)

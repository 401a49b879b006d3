"""FP8 for the model of ranker.yaml: `patch = ranker.apply(model)`.

Written by `loka generate`, which overwrites it: edit the policy and generate again.
"""

from __future__ import annotations

import torch

from loka import dispatch

STAMP = "e73321f904d70582b4355e13a43043e39200611ee0d27e7874bc613412e5b63f"
dispatch.check_stamps(__name__, STAMP)

from . import kernels, modules  # noqa: E402 - a generation that was cut short may lack them

dispatch.check_stamps(__name__, STAMP, kernels.STAMP, modules.STAMP)

# Which modules become which class. `sites` are named for reports; `gemms` are those of each site that run in FP8.
BINDINGS = (
    dispatch.Binding(
        train=modules.EmbedDense3,
        infer=modules.EmbedDense3Frozen,
        replaces="torch.nn.modules.linear.Linear",
        source_hash="",
        inlined=(),
        modules=("embed.dense.3",),
        sites=(("embed.dense.3",),),
        gemms=(("fprop", "dgrad", "wgrad"),),
        shapes=(("weight", (32, 64)), ("bias", (32,))),
    ),
    dispatch.Binding(
        train=modules.Layers,
        infer=modules.LayersFrozen,
        replaces="loka.zoo.wukong.WukongLayer",
        source_hash="1ca6809d2b9c3b1ffa9158aa44d2e86467c26f608872a4aeeefbc9cc7e6b380e",
        inlined=("fmb_norm", "fmb", "fmb.0", "fmb.1", "fmb.2", "fmb.3", "fmb.4", "fmb.5", "norm"),
        modules=("layers.0", "layers.1", "layers.2"),
        sites=(
            ("layers.0.fmb.0", "layers.0.fmb.3"),
            ("layers.1.fmb.0", "layers.1.fmb.3"),
            ("layers.2.fmb.0", "layers.2.fmb.3"),
        ),
        gemms=(("fprop", "dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")),
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
            ("norm.weight", (32,)),
            ("norm.bias", (32,)),
        ),
    ),
    dispatch.Binding(
        train=modules.Linear256x256,
        infer=modules.Linear256x256Frozen,
        replaces="torch.nn.modules.linear.Linear",
        source_hash="",
        inlined=(),
        modules=("layers.0.fmb.6", "layers.1.fmb.6", "layers.2.fmb.6", "head.mlp.3", "head.mlp.6"),
        sites=(("layers.0.fmb.6",), ("layers.1.fmb.6",), ("layers.2.fmb.6",), ("head.mlp.3",), ("head.mlp.6",)),
        gemms=(("fprop", "dgrad", "wgrad"),),
        shapes=(("weight", (256, 256)), ("bias", (256,))),
    ),
    dispatch.Binding(
        train=modules.HeadMlp0,
        infer=modules.HeadMlp0Frozen,
        replaces="torch.nn.modules.linear.Linear",
        source_hash="",
        inlined=(),
        modules=("head.mlp.0",),
        sites=(("head.mlp.0",),),
        gemms=(("fprop", "dgrad", "wgrad"),),
        shapes=(("weight", (256, 512)), ("bias", (256,))),
    ),
)


def apply(model: torch.nn.Module, mode: str = "train") -> dispatch.Patch:
    """Bind the plan to a model, in place; `remove` of what is returned takes it off again, `verify` says that it ran.

    `mode` is "train", or "infer" for weights that are quantised once and frozen.
    """
    return dispatch.apply(model, __name__, BINDINGS, target="h100", mode=mode)

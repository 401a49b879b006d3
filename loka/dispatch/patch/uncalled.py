"""Linears whose weights torch's attention layers read without calling them, so that a patched forward never runs."""

from __future__ import annotations

import torch
from torch import nn

from loka.dispatch.bind.wrappers import find_module
from loka.sites.train_eval_diff import is_fused


def uncalled_reason(root: nn.Module, name: str) -> str | None:
    """Reason why a layer around the module `name` may read its weight without calling it, with advice; or None.

    An nn.MultiheadAttention never calls its children. An nn.TransformerEncoderLayer in evaluation does not if torch
    takes its fused path; that also requires no gradients, no autocast and a batch, which cannot be checked afterwards.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = ".".join(parts[:length])
        layer, shown = find_module(root, around), f" {around!r}" if around else ""
        if isinstance(layer, nn.MultiheadAttention) and type(layer).forward is nn.MultiheadAttention.forward:
            return f"nn.MultiheadAttention{shown} reads its weight and never calls it: keep it (compute: keep)"
        if layer is not None and not layer.training and is_fused(layer) and torch.backends.mha.get_fastpath_enabled():
            return (
                f"in evaluation without gradients torch runs nn.TransformerEncoderLayer{shown} as one fused kernel, "
                "which reads this weight and does not call its module: turn that off by "
                "torch.backends.mha.set_fastpath_enabled(False), or keep this site (compute: keep, or patch.keep)"
            )
    return None

"""Saved tensors in the backward of generated functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors saved by forward, released by `ctx`, so that backward can free them before it returns.

    With one function for each layer, autograd frees them layer by layer; a chain of layers must do so itself. `ctx`
    keeps them if the graph is retained (retain_graph), and under torch.compile, which frees each after its last use.
    """
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return tensors

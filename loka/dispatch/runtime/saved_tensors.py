"""What the backward of a generated function owns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors that forward saved, given up by `ctx`: what backward deletes then is free, long before it returns.

    Autograd frees them layer by layer where each layer is a function; a chain of layers has to do so itself. They stay
    with `ctx` where the graph is kept (retain_graph), and under torch.compile, which frees each after its last use.
    """
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return tensors

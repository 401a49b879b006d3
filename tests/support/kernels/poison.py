"""Memory in which what a kernel leaves unwritten shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka.kernels.decomposition import is_traced


def poisoned(new_empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`new_empty` of memory full of NaN, so that what a kernel leaves unwritten shows.

    Not in a graph that is traced: Triton 3.6 cannot compile Inductor's kernel that fills FP8 tensors. What compiled
    code leaves unwritten differs from what the same code wrote in eager mode.
    """

    def make(like: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        made = new_empty(like, *arguments, **keywords)
        if is_traced(made):
            return made
        poison = torch.nan if made.is_floating_point() else -(10**6)
        made.view(torch.uint8).fill_(0x7F) if made.element_size() == 1 else made.fill_(poison)
        return made

    return make

"""Memory in which what a kernel leaves unwritten shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def poisoned(new_empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`new_empty` of memory full of NaN, so that what a kernel leaves unwritten shows."""

    def make(like: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        made = new_empty(like, *arguments, **keywords)
        poison = torch.nan if made.is_floating_point() else -(10**6)
        made.view(torch.uint8).fill_(0x7F) if made.element_size() == 1 else made.fill_(poison)
        return made

    return make

"""Weights that FSDP has split since a module was bound: between forwards a process holds a part of them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from loka.dispatch.bind.bound import Bound


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor, of which this process has but a part."""
    # By name: importing torch.distributed.tensor takes long, and who uses it has imported it.
    return type(parameter.data).__name__ == "DTensor"


def is_flat(tensor: torch.Tensor) -> bool:
    """True for a tensor that FullyShardedDataParallel keeps as a piece of a flat one between forwards."""
    return getattr(tensor, "_fsdp_flattened", False)


def is_split(module: Bound) -> bool:
    """Whether this process lacks numbers of a parameter that a bound module's generated forward was made for."""
    binding = module.loka.binding
    names = [name for name, _ in module.named_parameters()] if binding is None else [name for name, _ in binding.shapes]
    return any(is_sharded(found) or is_flat(found) for name in names if (found := _parameter(module, name)) is not None)


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of a qualified name; None where it went, which is said elsewhere."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return None

"""Result dtypes of operations, including under autocast."""

from __future__ import annotations

import torch

from loka.dispatch.dispatch_errors import DtypeError
from loka.dispatch.runtime.unusual_inputs import refuse_unusual


def output_dtype(x: torch.Tensor, *weights: torch.Tensor) -> torch.dtype:
    """Dtype of F.linear's result for an input `x`: autocast's under torch.autocast, otherwise that of `x`.

    Like autocast itself, it keeps float64. Safe under torch.compile, which guards on the autocast state.

    Raises DtypeError, as torch raises a RuntimeError, if the dtypes of `x` and of `weights` differ without autocast, or
    if `x` is not floating-point; and InputError for tensors that no row kernel reads (`refuse_unusual`).
    """
    refuse_unusual(x, weights)
    device = x.device.type
    dtype = x.dtype
    if dtype != torch.float64 and dtype.is_floating_point and _autocasts(device):
        return torch.get_autocast_dtype(device)
    for weight in weights:
        if weight.dtype != dtype:
            raise DtypeError(
                f"an input and a weight must have the same dtype, but got {dtype} and {weight.dtype}: convert one of "
                "them, or run the model under torch.autocast"
            )
    if not dtype.is_floating_point:
        raise DtypeError(f"a linear layer takes floating-point numbers, not {dtype}: convert its input")
    return dtype


def summed_dtype(*added: torch.Tensor) -> torch.dtype:
    """Dtype of a sum or product of these: the promoted dtype, which autocast does not change."""
    dtype = added[0].dtype
    for other in added[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def joined_dtype(*added: torch.Tensor) -> torch.dtype:
    """Dtype of a norm of the sum or concatenation of these: the promoted dtype.

    Under torch.autocast it is float32, as for a LayerNorm on a GPU, except for float64.
    """
    dtype = summed_dtype(*added)
    if dtype != torch.float64 and _autocasts(added[0].device.type):
        return torch.float32
    return dtype


def _autocasts(device: str) -> bool:
    """True if torch.autocast is on for a device; always False for "meta", for which torch raises."""
    return device != "meta" and torch.is_autocast_enabled(device)

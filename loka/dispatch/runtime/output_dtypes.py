"""The dtypes in which operations return their results, under autocast too."""

from __future__ import annotations

import torch

from loka.dispatch.dispatch_errors import DtypeError


def output_dtype(x: torch.Tensor, *weights: torch.Tensor) -> torch.dtype:
    """What F.linear would return for an input `x`: under torch.autocast its dtype, elsewhere that of `x`.

    Like autocast itself, it leaves float64 alone. Safe under torch.compile, which guards on the autocast state.

    Raises DtypeError, as torch raises a RuntimeError, where `x` is of another dtype than `weights` without autocast, or
    holds no floating-point numbers.
    """
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
    """What a sum or product of these would be: their widest dtype, which no autocast changes."""
    dtype = added[0].dtype
    for other in added[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def joined_dtype(*added: torch.Tensor) -> torch.dtype:
    """What a norm of the sum or concatenation of these would return: their widest dtype.

    Under torch.autocast it is float32, as that has it for a LayerNorm on a GPU, but for float64.
    """
    dtype = summed_dtype(*added)
    if dtype != torch.float64 and _autocasts(added[0].device.type):
        return torch.float32
    return dtype


def _autocasts(device: str) -> bool:
    """Whether torch.autocast is on for a device; there is none for "meta", which torch refuses to be asked about."""
    return device != "meta" and torch.is_autocast_enabled(device)

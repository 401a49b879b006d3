"""Norms and their gradients in torch, in float32: what `templates/triton/device/norms.py.j2` says in Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from loka.errors import InputError


@dataclass(frozen=True, slots=True)
class Normalised:
    """Rows after a norm, before its weight and bias, with what they were made by: n = (x - mean) * rstd."""

    n: Tensor  # (M, width)
    mean: Tensor  # (M,), or empty where nothing is subtracted
    rstd: Tensor  # (M,), or (M, width) of a norm that saves nothing


@dataclass(frozen=True, slots=True)
class NormFormula:
    """A norm in torch."""

    forward: Callable[[Tensor, float, int], Normalised]  # of x (M, width), eps, and the block of a norm over blocks
    gradient: Callable[[Tensor, Normalised, float, int], Tensor]  # of n's gradient (M, width): that of x


def formula_of(norm: str) -> NormFormula:
    """The formula of a norm by its name. Raises InputError for one that there is not."""
    found = FORMULAS.get(norm)
    if found is None:
        raise InputError(f"no kernel has a norm {norm!r}; it can be {', '.join(FORMULAS)}")
    return found


def normalised_by(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Normalised:
    """Rows that are normalised again by the statistics that a forward saved."""
    n = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    return Normalised(n, x.new_empty(0) if mean is None else mean, rstd)


def _layer_norm(x: Tensor, eps: float, block: int) -> Normalised:
    mean = x.mean(1)
    x = x - mean[:, None]
    rstd = torch.rsqrt((x * x).mean(1) + eps)
    return Normalised(x * rstd[:, None], mean, rstd)


def _layer_norm_gradient(dn: Tensor, normed: Normalised, eps: float, block: int) -> Tensor:
    dx = dn - normed.n * (dn * normed.n).mean(1, keepdim=True) - dn.mean(1, keepdim=True)
    return dx * normed.rstd[:, None]


def _rms_norm(x: Tensor, eps: float, block: int) -> Normalised:
    rstd = torch.rsqrt((x * x).mean(1) + eps)
    return Normalised(x * rstd[:, None], x.new_empty(0), rstd)


def _rms_norm_gradient(dn: Tensor, normed: Normalised, eps: float, block: int) -> Tensor:
    return (dn - normed.n * (dn * normed.n).mean(1, keepdim=True)) * normed.rstd[:, None]


def _block_norm(x: Tensor, eps: float, block: int) -> Normalised:
    blocks = x.reshape(-1, x.shape[1] // block, block)
    rstd = torch.rsqrt((blocks * blocks).mean(2) + eps).repeat_interleave(block, dim=1)
    return Normalised(x * rstd, x.new_empty(0), rstd)


def _block_norm_gradient(dn: Tensor, normed: Normalised, eps: float, block: int) -> Tensor:
    n = normed.n
    along = (dn * n).view(-1, n.shape[1] // block, block).mean(2).repeat_interleave(block, dim=1)
    return (dn - n * along) * normed.rstd


FORMULAS: Mapping[str, NormFormula] = MappingProxyType(
    {
        "layer_norm": NormFormula(_layer_norm, _layer_norm_gradient),
        "rms_norm": NormFormula(_rms_norm, _rms_norm_gradient),
        "block_norm": NormFormula(_block_norm, _block_norm_gradient),
    }
)

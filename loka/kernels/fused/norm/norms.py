"""The norms that kernels are rendered with: what sets one apart, for specs, names, launches, docstrings and on the CPU.

A norm makes n = (x - mean) * rstd of a row x, and times a weight and plus a bias where it has these. How mean and rstd
are found, and the gradient, is written here in torch, in float32, and in Triton in
`templates/triton/device/norms.py.j2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from loka.errors import InputError, LokaError


@dataclass(frozen=True, slots=True)
class Normalised:
    """Rows after a norm, before its weight and bias, with what they were made by: n = (x - mean) * rstd."""

    n: Tensor  # (M, width)
    mean: Tensor  # (M,), or empty where nothing is subtracted
    rstd: Tensor  # (M,), or (M, width) of a norm that saves nothing


@dataclass(frozen=True, slots=True)
class NormTraits:
    """What the kernels of a norm have in common, whatever they are fused with.

    Raises LokaError for a norm over whole rows that saves no rstd: its backward would have to find it again.
    """

    title: str  # in docstrings: "LayerNorm"
    forward: Callable[[Tensor, float, int], Normalised]  # of x (M, width), eps, and the block of a norm over blocks
    gradient: Callable[[Tensor, Normalised, float, int], Tensor]  # of n's gradient (M, width): that of x
    parameters: tuple[str, ...] = ()  # that it usually has, of weight and bias; without any it takes neither
    saved: tuple[str, ...] = ()  # statistics that a forward leaves to its backward, of mean and rstd
    averages: tuple[str, ...] = ()  # over a row, that the gradient reads, of dn (n's gradient) and dn_n (dn * n)
    over_blocks: bool = False  # whether it goes over blocks of a row, and not over all of it
    over_columns: bool = False  # whether it goes over the rows of each column: a kernel is given what it needs of that
    eps_in_backward: bool = False  # whether the backward computes with eps, too

    def __post_init__(self) -> None:
        if self.over_rows and "rstd" not in self.saved:
            raise LokaError(f"{self.title} goes over whole rows and saves no rstd; name it in `saved`")

    @property
    def over_rows(self) -> bool:
        """Whether it goes over all of a row."""
        return bool(self.title) and not self.over_blocks and not self.over_columns


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


def _nothing(x: Tensor, eps: float, block: int) -> Normalised:
    return Normalised(x, x.new_empty(0), x.new_empty(0))


def _gradient_of_nothing(dn: Tensor, normed: Normalised, eps: float, block: int) -> Tensor:
    return dn


NO_NORM = NormTraits("", _nothing, _gradient_of_nothing)

NORMS: Mapping[str, NormTraits] = MappingProxyType(
    {
        "layer_norm": NormTraits(
            "LayerNorm",
            _layer_norm,
            _layer_norm_gradient,
            ("weight", "bias"),
            saved=("mean", "rstd"),
            averages=("dn", "dn_n"),
        ),
        "rms_norm": NormTraits(
            "RMSNorm", _rms_norm, _rms_norm_gradient, ("weight",), saved=("rstd",), averages=("dn_n",)
        ),
        # An RMSNorm of each block of a row, without parameters.
        "block_norm": NormTraits(
            "BlockNorm", _block_norm, _block_norm_gradient, over_blocks=True, eps_in_backward=True
        ),
        # Its statistics are those of columns, of all rows, which no program has: n = x + add, with the mean's negative
        # as add, and the weight times rstd as weight (`loka.dispatch.batch_norm`).
        "batch_norm": NormTraits("BatchNorm", _nothing, _gradient_of_nothing, ("weight", "bias"), over_columns=True),
    }
)


def traits_of(norm: str | None) -> NormTraits:
    """The traits of a norm by its name; `NO_NORM` for None, and for a name that no norm has."""
    return NORMS.get(norm or "", NO_NORM)


def norm_of(name: str) -> NormTraits:
    """The traits of a norm by its name. Raises InputError for one that there is not."""
    if name not in NORMS:
        raise InputError(f"no kernel has a norm {name!r}; it can be {', '.join(NORMS)}")
    return NORMS[name]

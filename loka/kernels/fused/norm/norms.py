"""The norms that kernels are rendered with: what sets one apart, for specs, names, launches and docstrings.

A norm makes n = (x - mean) * rstd of a row x, and times a weight and plus a bias where it has these. How mean and rstd
are found, and the gradient, is written in Triton in `templates/triton/device/norms.py.j2`, and in torch in
`norm_formulas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loka.errors import LokaError


@dataclass(frozen=True, slots=True)
class NormTraits:
    """What the kernels of a norm have in common, whatever they are fused with.

    Raises LokaError for a norm over whole rows that saves no rstd: its backward would have to find it again.
    """

    title: str  # in docstrings: "LayerNorm"
    parameters: tuple[str, ...] = ()  # that it usually has, of weight and bias; without any it takes neither
    saved: tuple[str, ...] = ()  # statistics that a forward leaves to its backward, of mean and rstd
    averages: tuple[str, ...] = ()  # over a row, that the gradient reads, of dn (n's gradient) and dn_n (dn * n)
    over_blocks: bool = False  # whether it goes over blocks of a row, and not over all of it
    eps_in_backward: bool = False  # whether the backward computes with eps, too

    def __post_init__(self) -> None:
        if self.over_rows and "rstd" not in self.saved:
            raise LokaError(f"{self.title} goes over whole rows and saves no rstd; name it in `saved`")

    @property
    def over_rows(self) -> bool:
        """Whether it goes over all of a row."""
        return bool(self.title) and not self.over_blocks


NO_NORM = NormTraits("")

NORMS: Mapping[str, NormTraits] = MappingProxyType(
    {
        "layer_norm": NormTraits("LayerNorm", ("weight", "bias"), saved=("mean", "rstd"), averages=("dn", "dn_n")),
        "rms_norm": NormTraits("RMSNorm", ("weight",), saved=("rstd",), averages=("dn_n",)),
        # An RMSNorm of each block of a row, without parameters.
        "block_norm": NormTraits("BlockNorm", over_blocks=True, eps_in_backward=True),
    }
)


def traits_of(norm: str | None) -> NormTraits:
    """The traits of a norm by its name; `NO_NORM` for None, and for a name that no norm has."""
    return NORMS.get(norm or "", NO_NORM)

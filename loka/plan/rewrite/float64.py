"""Float64 parts of a model, which are left to torch, as rendered kernels compute in float32 whatever the dtypes.

The rounding of an FP8 GEMM is far larger than float32's, so that its neighbours may be fused in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from loka.sites.site import Site

REASON = "its Parameters are float64, and fused kernels compute in float32"


def float64_sites(sites: Iterable[Site], model: nn.Module) -> frozenset[str]:
    """The names of the sites that multiply by a float64 Parameter; for merged sites, those of any member."""
    wide = {name for name, parameter in model.named_parameters(remove_duplicate=False) if _is_float64(parameter)}
    return frozenset(site.name for site in sites if wide and not wide.isdisjoint(_weights(site)))


def float64_modules(names: Iterable[str], model: nn.Module) -> frozenset[str]:
    """The named modules with a float64 Parameter, in themselves or below."""
    return frozenset(name for name in names if any(map(_is_float64, model.get_submodule(name).parameters())))


def _weights(site: Site) -> set[str]:
    """Possible names of a site's Parameters: members have their site's name, a linear its module's."""
    return {site.weight or site.name, *site.members, *(f"{member}.weight" for member in site.members)}


def _is_float64(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float64

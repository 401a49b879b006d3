"""What of a model is in float64, and so is left to torch: rendered kernels compute in float32, whatever the dtypes.

An FP8 GEMM's own roundings are far larger than float32's, so that its neighbours may be taken along all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from loka.sites.site import Site

REASON = "its Parameters are float64, and fused kernels compute in float32"


def float64_sites(sites: Iterable[Site], model: nn.Module) -> frozenset[str]:
    """The names of the sites that multiply by a float64 Parameter; a site that mods made, by one of its members'."""
    wide = {name for name, parameter in model.named_parameters(remove_duplicate=False) if _is_float64(parameter)}
    return frozenset(site.name for site in sites if wide and not wide.isdisjoint(_weights(site)))


def float64_modules(names: Iterable[str], model: nn.Module) -> frozenset[str]:
    """Those of the named modules that hold a float64 Parameter, below them too."""
    return frozenset(name for name in names if any(map(_is_float64, model.get_submodule(name).parameters())))


def _weights(site: Site) -> set[str]:
    """What a site's Parameters may be called: members are called by their site, a linear by its module."""
    return {site.weight or site.name, *site.members, *(f"{member}.weight" for member in site.members)}


def _is_float64(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float64

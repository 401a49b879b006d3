"""Changes of the biases of a model's sites while it is probed: measured on the live model, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class BiasTrack:
    """The bias of one site: its Euclidean norm at the start and the end of probing, and its final values."""

    first: float
    last: float
    values: Tensor  # (N,) float32, on the CPU


@torch.no_grad()
def read_biases(model: nn.Module, sites: Sequence[Site]) -> dict[str, Tensor]:
    """The bias of each site that has one, by the site's name: (N,) float32 copies on the CPU.

    Synchronises: call it before the first step and after the last. Sites whose bias is missing in `model` are left out.
    """
    parameters = dict(model.named_parameters())
    wanted = ((site.name, parameters.get(site.bias)) for site in sites if site.bias is not None)
    return {name: bias.detach().float().cpu().flatten().clone() for name, bias in wanted if bias is not None}


def track_biases(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, BiasTrack]:
    """Tracks from two readings of `read_biases`, for sites in both."""
    return {
        name: BiasTrack(float(before[name].norm()), float(values.norm()), values)
        for name, values in after.items()
        if name in before
    }

"""Models with the paper's mods (LoKA, "Mods"), for benchmarks that have no policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from loka.mods.adapt import adapt
from loka.mods.dataflow import analyse_dataflow
from loka.mods.registry import module_planning, paper_mods
from loka.mods.selection import selected_for_all
from loka.sites.build_model import BuiltModel

SAMPLES = 2  # batch size for the analysis of the structure


def with_mods(build: Callable[[], nn.Module], inputs: Callable[[int], tuple[Tensor, ...]]) -> nn.Module:
    """The model that `build` makes with the paper's mods: no biases except the final layer's, BlockNorm, Hard Swish."""
    model = build()
    with torch.device("meta"):
        shape = build()
    with torch.device("cpu"):  # regardless of the caller's device: the analysis runs on fake tensors
        built = BuiltModel(shape, inputs(SAMPLES), {}, SAMPLES)
        for name in paper_mods():
            mod = module_planning(name)
            found = mod.find(analyse_dataflow(built), selected_for_all(mod))
            adapt(shape, found.adaptations)
            adapt(model, found.adaptations)
    return model

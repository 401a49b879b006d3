"""Models with the paper's mods (LoKA, "Mods"), for measuring them where there is no policy that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from loka.mods.adapt import adapt
from loka.mods.adaptation import Setting
from loka.mods.dataflow import analyse_dataflow
from loka.mods.mod import ModRequest
from loka.mods.registry import MODEL_MODS
from loka.sites.build_model import BuiltModel

MODS: Mapping[str, Mapping[str, Setting]] = {
    "no_bias": {"final": "keep"},
    "block_norm": {"block": 256},
    "hard_swish": {},
}
SAMPLES = 2  # that the structure is looked at with


def with_mods(build: Callable[[], nn.Module], inputs: Callable[[int], tuple[Tensor, ...]]) -> nn.Module:
    """The model that `build` makes, without biases but for the final layer's, with BlockNorm and Hard Swish."""
    model = build()
    with torch.device("meta"):
        shape = build()
    with torch.device("cpu"):  # wherever the caller builds: the structure is looked at on fake tensors
        built = BuiltModel(shape, inputs(SAMPLES), {}, SAMPLES)
        for name, settings in MODS.items():
            found = MODEL_MODS[name].find(
                analyse_dataflow(built), ModRequest(lambda name: True, lambda name: False, settings)
            )
            adapt(shape, found.adaptations)
            adapt(model, found.adaptations)
    return model

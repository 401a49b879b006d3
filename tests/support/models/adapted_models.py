"""Models to adapt, and mods carried out on them without a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from loka.model.build_model import BuiltModel
from loka.mods.adaptation import Adaptation, Setting
from loka.mods.dataflow import Adaptable, analyse_dataflow
from loka.mods.protocols import ModMatch, ModRequest
from loka.mods.registry import module_mod

DEFAULTS: dict[str, dict[str, Setting]] = {"no_bias": {"final": "keep"}, "block_norm": {"block": 256}}


def asked(
    match: Callable[[str], bool] | Sequence[str] | None = None, settings: Mapping[str, Setting] | None = None
) -> ModRequest:
    """Everything, what a function says, or the names that are listed, which are then named without a wildcard."""
    if match is None or callable(match):
        return ModRequest(match or (lambda name: True), lambda name: False, settings or {})
    return ModRequest(lambda name: name in match, lambda name: name in match, settings or {})


def seen(module: nn.Module, *args: Tensor) -> Adaptable:
    """What mods see of a model that is called with these inputs."""
    return analyse_dataflow(BuiltModel(module, args, {}, args[0].shape[0]))


def find(mod: str, module: nn.Module, *args: Tensor, match: Any = None, **settings: Setting) -> ModMatch:
    """What a mod finds."""
    return module_mod(mod).find(seen(module, *args), asked(match, {**DEFAULTS.get(mod, {}), **settings}))


def carried_out(mods: Sequence[str], module: nn.Module, *args: Tensor, **settings: Setting) -> tuple[Adaptation, ...]:
    """Change a model by some mods, one after the other, as a policy would; the adaptations."""
    made: list[Adaptation] = []
    for mod in mods:
        for adaptation in find(mod, module, *args, **settings).adaptations:
            module_mod(mod).change(module, adaptation)
            made.append(adaptation)
    return tuple(made)


def mlp(*widths: int, norm: Callable[[int], nn.Module] = nn.LayerNorm, outputs: int = 1) -> nn.Sequential:
    """Linear, norm and SiLU for each width after the first, then a linear."""
    parts: list[nn.Module] = []
    for inputs, hidden in pairwise(widths):
        parts += [nn.Linear(inputs, hidden), norm(hidden), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], outputs))


def random_parameters(module: nn.Module, seed: int = 0) -> None:
    """Norms with weights that are not ones, and biases that are not zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.5 + 1.0 if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)

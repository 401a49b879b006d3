"""Every mod that changes modules, by the name that policies and adaptations call it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loka.mods.block_norm import BlockNormMod
from loka.mods.hard_swish import HardSwishMod
from loka.mods.mod import ModelMod
from loka.mods.no_bias import NoBiasMod
from loka.mods.norm_first import NormFirstMod

_ALL: tuple[ModelMod, ...] = (NoBiasMod(), BlockNormMod(), HardSwishMod(), NormFirstMod())
MODEL_MODS: Mapping[str, ModelMod] = MappingProxyType({mod.name: mod for mod in _ALL})

"""Every mod that changes modules, by the name that policies and adaptations call it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loka.mods.block_norm import BlockNorms
from loka.mods.hard_swish import HardSwish
from loka.mods.mod import ModelMod
from loka.mods.no_bias import NoBias
from loka.mods.norm_first import NormFirst

_ALL: tuple[ModelMod, ...] = (NoBias(), BlockNorms(), HardSwish(), NormFirst())
MODEL_MODS: Mapping[str, ModelMod] = MappingProxyType({mod.name: mod for mod in _ALL})

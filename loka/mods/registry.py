"""The list of all mods, with their kinds: the mod NAME is `MOD` in `loka/mods/modules/NAME.py` or `rewriting/NAME.py`.

Mods are imported on demand: training machines need only those of modules, and have no pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.mods.protocols import ForwardMod, Mod, ModuleMod, OwnerMod, SiteMod


class ModKind(StrEnum):
    """Target of a mod's changes and of its patterns."""

    MODULES = "modules"  # modules of the model, before its sites are discovered; patterns match these
    SITES = "sites"  # calls of sites in the forwards of owners; patterns match the sites
    OWNERS = "owners"  # the statements of owners' forwards; patterns match the owners
    INTERACTIONS = "interactions"  # interactions that get their own kernels; patterns match the owners


# The order of error messages and the schema, and the order in which mods of sites are applied.
MODS: Mapping[str, ModKind] = MappingProxyType(
    {
        "no_bias": ModKind.MODULES,
        "block_norm": ModKind.MODULES,
        "hard_swish": ModKind.MODULES,
        "norm_first": ModKind.MODULES,
        "merge_siblings": ModKind.SITES,
        "batch_small": ModKind.SITES,
        "pad_alignment": ModKind.SITES,
        "fuse_interaction": ModKind.INTERACTIONS,
        "residual_high_precision": ModKind.OWNERS,
    }
)


def names_of(kind: ModKind) -> tuple[str, ...]:
    """The names of the mods of one kind, in order."""
    return tuple(name for name, each in MODS.items() if each is kind)


(INTERACTION_MOD,) = names_of(ModKind.INTERACTIONS)  # its name: there is one


def mod_of(name: str) -> Mod:
    """The mod of that name, of any kind. Raises KeyError where there is none."""
    mod: Mod = _mod(name, MODS[name])
    return mod


def module_mod(name: str) -> ModuleMod:
    """The mod of modules of that name. Needs only torch. Raises KeyError where there is none."""
    mod: ModuleMod = _mod(name, ModKind.MODULES)
    return mod


def forward_mod(name: str) -> ForwardMod:
    """The mod of that name that rewrites forwards, of any such kind."""
    if MODS[name] is ModKind.MODULES:
        raise KeyError(f"{name} is a mod of modules, and rewrites no forwards")
    mod: ForwardMod = _mod(name, MODS[name])
    return mod


def site_mod(name: str) -> SiteMod:
    """The mod of that name that rewrites calls of sites."""
    mod: SiteMod = _mod(name, ModKind.SITES)
    return mod


def owner_mod(name: str) -> OwnerMod:
    """The mod of that name that rewrites the statements of owners."""
    mod: OwnerMod = _mod(name, ModKind.OWNERS)
    return mod


def paper_mods() -> tuple[str, ...]:
    """The names of the mods of LoKA (arXiv 2605.10886), "Mods"."""
    return tuple(name for name in names_of(ModKind.MODULES) if module_mod(name).of_paper)


def _mod(name: str, kind: ModKind) -> Any:
    if MODS[name] is not kind:
        raise KeyError(f"{name} is a mod of {MODS[name].value}, not of {kind.value}")
    folder = "modules" if kind is ModKind.MODULES else "rewriting"
    return import_module(f"loka.mods.{folder}.{name}").MOD

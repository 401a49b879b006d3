"""The list of all mods, with their kinds. The mod NAME is in the folder `loka/mods/NAME`.

There `NAME_planning.py` has `PLANNING` for planning (`loka.mods.mod_planning`), and `NAME.py` applies the mod; for a
mod that changes modules it has `MOD` (`loka.mods.adaptation`). Both are imported on demand: training machines need only
`MOD`, and have no pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.mods.adaptation import ModelMod
    from loka.mods.mod_planning import (
        ForwardModPlanning,
        InteractionModPlanning,
        ModPlanning,
        ModuleModPlanning,
        OwnerModPlanning,
        SiteModPlanning,
    )
    from loka.policy.mod_schema import ModSchemas


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


def module_mod(name: str) -> ModelMod:
    """The module mod of that name. Needs only torch. Raises KeyError where there is none."""
    _check_kind(name, ModKind.MODULES)
    mod: ModelMod = import_module(f"loka.mods.{name}.{name}").MOD
    return mod


def planning_of(name: str) -> ModPlanning:
    """The planning object of a mod of any kind. Raises KeyError where there is none of that name."""
    planning: ModPlanning = _planning(name, MODS[name])
    return planning


def module_planning(name: str) -> ModuleModPlanning:
    """The planning object of a module mod."""
    planning: ModuleModPlanning = _planning(name, ModKind.MODULES)
    return planning


def forward_planning(name: str) -> ForwardModPlanning:
    """The planning object of a mod that rewrites forwards, of any such kind."""
    if MODS[name] is ModKind.MODULES:
        raise KeyError(f"{name} is a mod of modules, and rewrites no forwards")
    planning: ForwardModPlanning = _planning(name, MODS[name])
    return planning


def site_planning(name: str) -> SiteModPlanning:
    """The planning object of a mod that rewrites calls of sites."""
    planning: SiteModPlanning = _planning(name, ModKind.SITES)
    return planning


def owner_planning(name: str) -> OwnerModPlanning:
    """The planning object of a mod that rewrites the statements of owners."""
    planning: OwnerModPlanning = _planning(name, ModKind.OWNERS)
    return planning


def interaction_planning() -> InteractionModPlanning:
    """The planning object of the only mod that computes interactions in their own kernels."""
    (name,) = names_of(ModKind.INTERACTIONS)
    planning: InteractionModPlanning = _planning(name, ModKind.INTERACTIONS)
    return planning


def paper_mods() -> tuple[str, ...]:
    """The names of the mods of LoKA (arXiv 2605.10886), "Mods"."""
    return tuple(name for name in names_of(ModKind.MODULES) if module_planning(name).of_paper)


def mod_schemas() -> ModSchemas:
    """The policy schemas of all mods, for `loka.policy`."""
    return {name: planning_of(name).setting for name in MODS}


def _planning(name: str, kind: ModKind) -> Any:
    _check_kind(name, kind)
    return import_module(f"loka.mods.{name}.{name}_planning").PLANNING


def _check_kind(name: str, kind: ModKind) -> None:
    if MODS[name] is not kind:
        raise KeyError(f"{name} is a mod of {MODS[name].value}, not of {kind.value}")

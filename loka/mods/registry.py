"""The one list of mods: a line for each, with its kind. A mod called NAME lies in the folder `loka/mods/NAME`.

There `NAME_planning.py` has `PLANNING`, what planning asks (`loka.mods.mod_planning`), and `NAME.py` carries the mod
out; for a mod that changes modules it has `MOD` (`loka.mods.adaptation`). Both are imported when they are first asked
for: training machines ask for `MOD` alone, and have no pydantic.
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
    from loka.policy.schema.mod_schema import ModSchemas


class ModKind(StrEnum):
    """What a mod changes, and what its patterns name."""

    MODULES = "modules"  # modules of the model, before its sites are found; patterns name these
    SITES = "sites"  # calls of sites in the forwards of owners; patterns name the sites
    OWNERS = "owners"  # the statements of owners' forwards; patterns name the owners
    INTERACTIONS = "interactions"  # which interactions have kernels of their own; patterns name the owners


# In this order error messages and the schema list them, and those that rewrite calls of sites are carried out.
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
    """The names of the mods of one kind, in the order of the list."""
    return tuple(name for name, each in MODS.items() if each is kind)


def module_mod(name: str) -> ModelMod:
    """The mod of that name that changes modules. Needs torch alone. Raises KeyError where there is none."""
    _check_kind(name, ModKind.MODULES)
    mod: ModelMod = import_module(f"loka.mods.{name}.{name}").MOD
    return mod


def planning_of(name: str) -> ModPlanning:
    """What planning asks of a mod of any kind. Raises KeyError where there is none of that name."""
    planning: ModPlanning = _planning(name, MODS[name])
    return planning


def module_planning(name: str) -> ModuleModPlanning:
    """The same of a mod that changes modules."""
    planning: ModuleModPlanning = _planning(name, ModKind.MODULES)
    return planning


def forward_planning(name: str) -> ForwardModPlanning:
    """The same of a mod that rewrites forwards, of any such kind."""
    if MODS[name] is ModKind.MODULES:
        raise KeyError(f"{name} is a mod of modules, and rewrites no forwards")
    planning: ForwardModPlanning = _planning(name, MODS[name])
    return planning


def site_planning(name: str) -> SiteModPlanning:
    """The same of a mod that rewrites calls of sites."""
    planning: SiteModPlanning = _planning(name, ModKind.SITES)
    return planning


def owner_planning(name: str) -> OwnerModPlanning:
    """The same of a mod that rewrites the statements of owners."""
    planning: OwnerModPlanning = _planning(name, ModKind.OWNERS)
    return planning


def interaction_planning() -> InteractionModPlanning:
    """The same of the mod that has interactions computed by kernels of their own: of this kind there is one."""
    (name,) = names_of(ModKind.INTERACTIONS)
    planning: InteractionModPlanning = _planning(name, ModKind.INTERACTIONS)
    return planning


def paper_mods() -> tuple[str, ...]:
    """The names of those of LoKA (arXiv 2605.10886), "Mods"."""
    return tuple(name for name in names_of(ModKind.MODULES) if module_planning(name).of_paper)


def mod_schemas() -> ModSchemas:
    """What policies may write of each mod: `loka.policy` is handed this."""
    return {name: planning_of(name).setting for name in MODS}


def _planning(name: str, kind: ModKind) -> Any:
    _check_kind(name, kind)
    return import_module(f"loka.mods.{name}.{name}_planning").PLANNING


def _check_kind(name: str, kind: ModKind) -> None:
    if MODS[name] is not kind:
        raise KeyError(f"{name} is a mod of {MODS[name].value}, not of {kind.value}")

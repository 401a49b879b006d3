"""Changes of mods as data: plans contain them, generated code has them as literals, profiles a fingerprint of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Modules that one mod changes in the same way."""

    mod: str  # its name in `loka.mods.registry`: "block_norm"
    modules: tuple[str, ...]  # qualified names, in model order
    replaces: str  # their type before: "torch.nn.modules.normalization.LayerNorm"
    settings: tuple[tuple[str, Setting], ...] = ()  # parameters of the change: (("block", 256), ("eps", 1e-05))


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """One change that a mod made in a module's forward; the function stays the same."""

    mod: str  # its name in policies: "merge_siblings"
    owner: str  # qualified name of the module whose forward was rewritten; "" is the model
    sites: tuple[str, ...]  # the sites it changed, by their names without the mod
    site: str  # the site that they are now: "layers.0.q+k"
    what: str  # description: "2 linears over x are one GEMM of K 512, N 1024"


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A module, Parameter or site that a mod was asked for and does not change, with the reason."""

    name: str  # qualified name of a module, Parameter or site
    reason: str


_DIGITS = 16  # hexadecimal digits of a digest
_VALUES = 3  # listed per setting


@dataclass(frozen=True, slots=True)
class ModFingerprint:
    """One mod that changed modules of a model."""

    mod: str  # its name in `loka.mods.registry`
    digest: str  # of the changed modules and the settings of each, independent of their order
    text: str  # description: "13 modules, layers.0.norm to head.mlp.4, block 32, 64 or 128"


def mod_fingerprints(adaptations: Iterable[Adaptation]) -> tuple[ModFingerprint, ...]:
    """The fingerprint of each mod in some adaptations, sorted by the mods' names."""
    found: dict[str, list[Adaptation]] = {}
    for adaptation in adaptations:
        found.setdefault(adaptation.mod, []).append(adaptation)
    return tuple(ModFingerprint(mod, _digest(found[mod]), _text(found[mod])) for mod in sorted(found))


def mismatch_reason(seen: Sequence[ModFingerprint], made: Sequence[ModFingerprint]) -> str | None:
    """Difference between the models of two fingerprints, to complete "learned of the model ..."; None if equal."""
    there, here = ({each.mod: each for each in mods} for mods in (seen, made))
    lacking = [f"without {mod} ({here[mod].text})" for mod in here if mod not in there]
    beyond = [f"with {mod} ({there[mod].text})" for mod in there if mod not in here]
    other = [
        f"with another {mod} (there {there[mod].text}; here {here[mod].text})"
        for mod in here
        if mod in there and there[mod].digest != here[mod].digest
    ]
    return ", ".join([*lacking, *beyond, *other]) or None


def _digest(adaptations: Sequence[Adaptation]) -> str:
    changes = sorted((name, sorted(each.settings)) for each in adaptations for name in each.modules)
    return hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:_DIGITS]


def _text(adaptations: Sequence[Adaptation]) -> str:
    modules = [name for each in adaptations for name in each.modules]
    counted = modules[0] if len(modules) == 1 else f"{len(modules)} modules, {modules[0]} to {modules[-1]}"
    values: dict[str, set[float]] = {}
    for each in adaptations:
        for key, value in each.settings:
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    return ", ".join([counted, *(f"{key} {_listed(sorted(values[key]))}" for key in sorted(values))])


def _listed(values: Sequence[float]) -> str:
    """Text of a list: `32`, `32 or 64`, `32, 64, 128 or 2 others`."""
    shown = [str(value) for value in values[:_VALUES]]
    if len(values) > _VALUES:
        rest = len(values) - _VALUES
        shown.append("another" if rest == 1 else f"{rest} others")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"

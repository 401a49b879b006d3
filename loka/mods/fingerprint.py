"""Which mods made a model, in short: a profile says so, and a plan is decided by a profile of the same model alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.mods.adaptation import Adaptation

_DIGITS = 16  # of a digest in hexadecimal
_VALUES = 3  # of one setting that a text lists


@dataclass(frozen=True, slots=True)
class ModFingerprint:
    """One mod that changed modules of a model."""

    mod: str  # its name in `loka.mods.registry`
    digest: str  # of the modules that it changed and its settings for each, whatever their order
    text: str  # the same for people: "13 modules, layers.0.norm to head.mlp.4, block 32, 64 or 128"


def mod_fingerprints(adaptations: Iterable[Adaptation]) -> tuple[ModFingerprint, ...]:
    """What adaptations made of a model, mod by mod, in the order of the names of these."""
    found: dict[str, list[Adaptation]] = {}
    for adaptation in adaptations:
        found.setdefault(adaptation.mod, []).append(adaptation)
    return tuple(ModFingerprint(mod, _digest(found[mod]), _text(found[mod])) for mod in sorted(found))


def mismatch_reason(seen: Sequence[ModFingerprint], made: Sequence[ModFingerprint]) -> str | None:
    """How the model that `seen` tells of differs from that of `made`, as the end of "learned of the model ...".

    None where they are the same.
    """
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
    """`32`, `32 or 64`, `32, 64, 128 or 2 others`."""
    shown = [str(value) for value in values[:_VALUES]]
    if len(values) > _VALUES:
        rest = len(values) - _VALUES
        shown.append("another" if rest == 1 else f"{rest} others")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"

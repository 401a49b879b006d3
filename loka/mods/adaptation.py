"""What a mod changes in a model, as data: a plan holds it, generated code has it as literals."""

from __future__ import annotations

from dataclasses import dataclass

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Modules that one mod changes in one way."""

    mod: str  # its name in `loka.mods.registry`: "block_norm"
    modules: tuple[str, ...]  # qualified names, in model order
    replaces: str  # their type before: "torch.nn.modules.normalization.LayerNorm"
    settings: tuple[tuple[str, Setting], ...] = ()  # what the change needs: (("block", 256), ("eps", 1e-05))


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Something that a mod was asked for and leaves as it is, and why."""

    name: str  # qualified name of a module, Parameter or site
    reason: str

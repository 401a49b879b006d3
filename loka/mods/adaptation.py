"""Changes of mods as data: plans contain them, and generated code has adaptations as literals."""

from __future__ import annotations

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

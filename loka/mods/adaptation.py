"""What mods change, as data: a plan holds it, and generated code has adaptations as literals."""

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
class RewriteResult:
    """One change that a mod made in the forward of one module. The function stays the same."""

    mod: str  # as a policy writes it: "merge_siblings"
    owner: str  # qualified name of the module whose forward was rewritten; "" is the model
    sites: tuple[str, ...]  # those that took part, as they are called without the mod
    site: str  # what they are now: "layers.0.q+k"
    what: str  # for people: "2 linears over x are one GEMM of K 512, N 1024"


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Something that a mod was asked for and leaves as it is, and why."""

    name: str  # qualified name of a module, Parameter or site
    reason: str

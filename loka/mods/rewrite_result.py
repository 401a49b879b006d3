"""What a forward mod did to a forward, as a plan tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """One change that a mod made in the forward of one module. The function stays the same."""

    mod: str  # as a policy writes it: "merge_siblings"
    owner: str  # qualified name of the module whose forward was rewritten; "" is the model
    sites: tuple[str, ...]  # those that took part, as they are called without the mod
    site: str  # what they are now: "layers.0.q+k"
    what: str  # for people: "2 linears over x are one GEMM of K 512, N 1024"

"""Modules of a patch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.dispatch.bind.bound import CallCounters


@dataclass(frozen=True, slots=True)
class BoundModule:
    """A module of a patch. `counters`: from its binding; they stay valid if another patch removes it."""

    name: str
    module: nn.Module
    counters: CallCounters


@dataclass(frozen=True, slots=True, eq=False)
class KeptModule:
    """A module that `keep` sent back, and what `restore` gives it again."""

    bound: BoundModule
    bound_class: type
    records: dict[str, Tensor]  # overflow statistics

"""Suggestions of mods against the findings about a site, from those that can change the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loka.errors import InputError
from loka.graph.sites.forwards import forwards_of
from loka.graph.sites.operations import Operation, Operations
from loka.model.build_model import BuiltModel
from loka.mods.dataflow import analyse_dataflow
from loka.mods.modded_model import selected_for_all
from loka.mods.protocols import Concern, SiteNeighbours
from loka.mods.registry import ModKind, module_mod, names_of

_DEPTH = 6  # operations from a GEMM to its neighbours, including views


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A possible entry of a policy's `mods`."""

    use: str  # the mod's name
    match: str


Suggestions = Mapping[Concern, Suggestion]  # about one site, by the concern they address


def suggestible_mods(built: BuiltModel) -> dict[str, Suggestions]:
    """The possible mods for each site of a model, by the site's name; {} where the model cannot be run.

    The model is unchanged; a copy of it runs on fake tensors. If two mods address one concern, the first in the
    registry is used.
    """
    try:
        forwards = forwards_of(built)
    except InputError:
        return {}
    model = analyse_dataflow(built, forwards)
    mods = [module_mod(name) for name in names_of(ModKind.MODULES)]
    matches = [(mod, mod.find(model, selected_for_all(mod.name))) for mod in mods]
    around: dict[str, Suggestions] = {}
    for site in _neighbours(forwards.modes[0]):
        against: dict[Concern, Suggestion] = {}
        for mod, match in matches:
            for concern, name in mod.suggest(match, site):
                against.setdefault(concern, Suggestion(mod.name, name))
        around[site.site] = against
    return around


def _neighbours(training: Operations) -> Iterator[SiteNeighbours]:
    """Each site on a Parameter with the modules of the nearest functions before and after it."""
    owners = {function.result: (function.op, function.owner) for function in training.functions}
    for call in training.calls:
        site = call.module or call.weight
        if site is not None:
            before = _nearest([call.source] if call.source is not None else [], owners, forward=False)
            yield SiteNeighbours(site, before, _nearest(call.result.children, owners, forward=True))


def _nearest(start: Iterable[Operation], owners: Mapping[Operation, tuple[str, str]], forward: bool) -> dict[str, str]:
    """The first function of each operation between a GEMM and the next ones, as operation -> its module."""
    found: dict[str, str] = {}
    level = list(start)
    for _ in range(_DEPTH):
        further: list[Operation] = []
        for node in level:
            if node in owners:
                found.setdefault(*owners[node])
            if not node.gemm:
                further += node.children if forward else node.parents
        level = list(dict.fromkeys(further))
    return found

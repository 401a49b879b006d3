"""Proposals of mods for `loka init`: what each would change in a model without a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka.mods.dataflow import analyse_dataflow
from loka.mods.modded_model import selected_for_all
from loka.mods.protocols import UnplannedModel
from loka.mods.registry import ModKind, forward_mod, module_mod, names_of
from loka.plan.mod_words import describe_adaptations
from loka.sites.build_model import BuiltModel, build_model
from loka.sites.callables import current_directory_importable
from loka.sites.discover import SiteMap, find_sites_watched
from loka.sites.site import Site
from loka.sites.watched_forward import Watched


@dataclass(frozen=True, slots=True)
class Proposal:
    """One mod that would change something, with default parameters."""

    use: str
    what: str  # "14 biases dropped"
    exact: bool  # the function stays the same, up to rounding


@dataclass(frozen=True, slots=True)
class Drafted:
    """Contents of a first policy."""

    sites: tuple[Site, ...]
    mods: tuple[Proposal, ...]
    model_class: str = ""  # of the model, "" for a class of torch's own
    could: float | None = None  # share of the training GEMM FLOPs that could run in FP8; None if not planned


def drafted_from(factory: str, inputs: str | None, batch_size: int, batches: str | None = None) -> Drafted:
    """The sites of a model without a policy, and the mods that could change it.

    Raises InputError as `build_model` and `find_sites` do.
    """
    with current_directory_importable():
        built = build_model(factory, inputs, batch_size, batches=batches)
        found, watched = find_sites_watched(built)
        own = type(built.module)
        name = "" if own.__module__.partition(".")[0] == "torch" else own.__name__
        return Drafted(found.sites, proposals(built, found, watched), name)


def proposals(built: BuiltModel, found: SiteMap, watched: Watched) -> tuple[Proposal, ...]:
    """Proposed mods, those that keep the function first. Nothing is traced: `draft_check` plans them.

    `found` and `watched` are of `find_sites_watched`.
    """
    same = _same_function(UnplannedModel(built.module, found.sites, found.siblings))
    return (*same, *_new_model(built, watched))


def _same_function(model: UnplannedModel) -> Iterator[Proposal]:
    for kind in (ModKind.INTERACTIONS, ModKind.SITES, ModKind.OWNERS):
        for name in names_of(kind):
            mod = forward_mod(name)
            what = mod.proposal(model)
            if what is not None:
                yield Proposal(name, what, mod.exact)


def _new_model(built: BuiltModel, watched: Watched) -> Iterator[Proposal]:
    model = analyse_dataflow(built, watched)
    for name in names_of(ModKind.MODULES):
        mod = module_mod(name)
        found = mod.find(model, selected_for_all(name)).adaptations
        if found and not mod.opt_in:
            yield Proposal(name, ", ".join(describe_adaptations(found)), mod.exact)

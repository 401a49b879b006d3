"""Mods that a model could take, for `loka init`: what each would change, found without a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from loka.errors import InputError
from loka.mods import batch_small, fuse_interaction, merge_siblings, pad_alignment
from loka.mods.dataflow import analyse_dataflow
from loka.mods.registry import MODEL_MODS
from loka.mods.selection import selected_for_all
from loka.plan.report.mod_plans import adapted_words
from loka.sites.build_model import BuiltModel, build_model
from loka.sites.callables import current_directory_importable
from loka.sites.discover import find_sites
from loka.sites.site import GemmKind, Site

OPT_IN = frozenset(("norm_first",))  # for inputs that drift, which a profile tells
_ALIGNED = 16  # what pad_alignment makes sizes multiples of, unless a policy says otherwise


@dataclass(frozen=True, slots=True)
class Proposal:
    """One mod that would change something, with its parameters left out."""

    use: str
    what: str  # "14 biases dropped"
    exact: bool  # the function stays the same, up to rounding


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a first policy is drafted from."""

    sites: tuple[Site, ...]
    mods: tuple[Proposal, ...]


def drafted_from(factory: str, inputs: str | None, batch_size: int) -> Drafted:
    """The sites of a model that no policy describes yet, and the mods that it could take.

    Raises InputError as `build_model` and `find_sites` do.
    """
    with current_directory_importable():
        built = build_model(factory, inputs, batch_size)
        found = find_sites(built)
        return Drafted(found.sites, proposals(built, found.sites, found.siblings))


def proposals(
    built: BuiltModel, sites: Sequence[Site], siblings: Sequence[tuple[str, ...]] = ()
) -> tuple[Proposal, ...]:
    """Those that leave the function as it is first. Nothing is traced: planning says what becomes of it."""
    return (*_exact(built, sites, siblings), *_others(built))


def _exact(built: BuiltModel, sites: Sequence[Site], siblings: Sequence[tuple[str, ...]]) -> Iterator[Proposal]:
    owners = len(fuse_interaction.interacting(sites, built.module, lambda name: True).owners)
    if owners:
        modules = f"{owners} module{'s' if owners != 1 else ''}"
        yield Proposal(fuse_interaction.NAME, f"{modules} may mix, join or cross features", True)
    if siblings:
        count = sum(map(len, siblings))
        tensors = f"{len(siblings)} tensors" if len(siblings) > 1 else "one tensor"
        yield Proposal(merge_siblings.NAME, f"{count} sites read {tensors}", True)
    small = sum(map(len, _small(built.module, sites, {name for names in siblings for name in names})))
    if small:
        yield Proposal(batch_small.NAME, f"{small} small linears of one shape may read different inputs", True)
    odd = [site for site in sites if site.kind is GemmKind.LINEAR and (site.k % _ALIGNED or site.n % _ALIGNED)]
    if odd:
        what = f"{len(odd)} linear{'s' if len(odd) != 1 else ''} with K or N no multiple of {_ALIGNED}"
        yield Proposal(pad_alignment.NAME, what, True)


def _small(module: nn.Module, sites: Sequence[Site], siblings: set[str]) -> list[list[str]]:
    """Linears of one list and one shape, small by the mod's own limits, that do not read one tensor.

    Square ones are left out: those of a list may as well stand in a row, as cross layers do.
    """
    limits = selected_for_all(batch_small.NAME).settings
    alike: dict[tuple[object, ...], list[str]] = {}
    for site in sites:
        owner, _, last = site.name.rpartition(".")
        fits = site.k <= int(limits["max_k"]) and site.n <= int(limits["max_n"]) and site.k != site.n
        if site.kind is GemmKind.LINEAR and last.isdecimal() and fits and site.name not in siblings:
            alike.setdefault((owner, site.rows, site.k, site.n), []).append(site.name)
    families = [names for names in alike.values() if len(names) >= batch_small.FEWEST]
    return [names for names in families if isinstance(module.get_submodule(names[0].rpartition(".")[0]), nn.ModuleList)]


def _others(built: BuiltModel) -> Iterator[Proposal]:
    try:
        model = analyse_dataflow(built)
    except InputError:  # its sites were found in another way
        return
    for use, mod in MODEL_MODS.items():
        found = mod.find(model, selected_for_all(use)).adaptations
        if found and use not in OPT_IN:
            yield Proposal(use, ", ".join(adapted_words(found)), mod.exact)

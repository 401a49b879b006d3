"""fuse_interaction: interactions of features are computed by one kernel forward and one backward.

It supports these interactions, wherever in a forward they are (docs/mods.md has the forms):

- an FM interaction (`fm_interaction`): all pairs of a sample's embeddings at low rank, and weighted sums of them;
- a concatenation norm (`loka.graph.patterns.concat_norm`): a concatenation of rows, a residual and a norm;
- a dot interaction (`loka.graph.patterns.dot_interaction`): the products of all pairs of embeddings, as in a DLRM.

The function stays the same, up to rounding: the kernels accumulate in float32 whatever the dtypes. Parameters and the
keys of the state_dict stay, so that a checkpoint needs no conversion and `patch.remove()` undoes everything.

Cross layers, as in a DCNv2, have no kernels of their own: the mod says that they stay as they are.

Patterns match the modules whose forward contains an interaction: "layers.*" for the layers of a Wukong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import nn

from loka.graph.patterns.owners import parents
from loka.graph.patterns.region import NORMS
from loka.graph.sites.flow import Flow, common_module
from loka.graph.sites.site import GemmKind, Site
from loka.mods.protocols import ForwardMod, UnplannedModel
from loka.mods.rewriting.fused_interactions import NAME, Interacting

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class FuseInteractionMod:
    """Looks for interactions where the sites of a model indicate one."""

    name: str = NAME
    exact: bool = True
    description: str = "mixing layers, joins and dot interactions read what they combine once forward and once backward"

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of modules that may contain an interaction, in words; None for none."""
        owners = len(interacting(model.sites, model.module, lambda name: True, Flow()).owners)
        return f"{owners} module{'s' if owners != 1 else ''} may mix or join features" if owners else None


def interacting(sites: Sequence[Site], model: nn.Module, wants: Callable[[str], bool], flow: Flow) -> Interacting:
    """Where the wanted modules may have interactions. Only the structure of `model` is read.

    `flow` says which products belong to one mixing layer, in whatever modules they are.
    """
    modules = dict(model.named_modules())
    layers = tuple(_mixing_layers(flow, sites, modules, wants))
    spread = {site.name for layer in layers for site in layer if site.weight is not None}
    known = {site.name for site in sites}
    owners: dict[str, None] = {}
    crossing: dict[str, None] = {}
    seen: list[Site] = []
    likely: set[str] = set()
    for site in sites:
        owner = _writer(site, modules)
        if not wants(owner):
            continue
        if _crosses(site):
            crossing[owner] = None
        if site.name in spread or _is_parameter(site):
            owners[owner] = None
            seen.append(site)
        if _joins(site):
            owners[owner] = None
            likely.add(owner)
    products = [(_writer(layer[1], modules), _holder(layer, modules)) for layer in layers]
    owners.update(dict.fromkeys(writer for writer, _ in products))
    joins = [(name, found) for name, found in flow.joined.items() if name in known and wants(found[0])]
    joined = dict.fromkeys(found for _, found in joins)
    into = ((name, _around(found[:2], modules)) for name, found in joins)  # what is joined is computed with the join
    together = (*_held(layers, modules), *into)
    owners.update((writer, None) for writer, *_ in joined)
    likely.update(writer for writer, *_ in joined)
    dots = dict.fromkeys(site.owner for site in sites if site.name in flow.dots and wants(site.owner))
    owners.update(dots)
    likely.update(dots)
    parts = [(part, owner) for writer, owner, *others in joined for part in (writer, *others)]
    inlined = tuple((writer, owner) for writer, owner in (*products, *parts) if writer != owner)
    found = Interacting(frozenset(owners), tuple(seen), together, tuple(crossing), products=inlined)
    mixing = mixing_sites(found, sites) | spread
    likely.update(_writer(site, modules) for site in seen if site.name in mixing)
    likely.update(writer for writer, _ in products)
    unwanted = frozenset(name for name in modules if not wants(name))
    return replace(found, likely=frozenset(likely), mixing=mixing, unwanted=unwanted)


def _mixing_layers(
    flow: Flow, sites: Sequence[Site], modules: Mapping[str, nn.Module], wants: Callable[[str], bool]
) -> Iterator[tuple[Site, ...]]:
    """The sites of each mixing layer: x^T @ rank, the product of x with that, and weighted sums, all in wanted modules.

    What a kernel cannot multiply by is left out: what has a bias, or is no Parameter of its own.
    """
    known = {site.name: site for site in sites}
    for names in flow.mixing:
        found = [known[name] for name in names if name in known and wants(_writer(known[name], modules))]
        rank, product, *sums = [site if site in found else None for site in map(known.get, names)]
        if rank is not None and product is not None and _is_plain(rank):
            yield rank, product, *(site for site in sums if site is not None and _is_plain(site))


def _is_plain(site: Site) -> bool:
    return site.weight is not None and site.bias is None and not site.blocked


def _holder(layer: Sequence[Site], modules: Mapping[str, nn.Module]) -> str:
    """The smallest module that holds all of a mixing layer."""
    return _around([_writer(site, modules) for site in layer], modules)


def _held(layers: Sequence[tuple[Site, ...]], modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """For the sites of each mixing layer, linears among them, the smallest module that holds it."""
    for layer in layers:
        owner = _holder(layer, modules)
        yield from ((site.name, owner) for site in layer if site.weight is not None)


def _is_parameter(site: Site) -> bool:
    """True if a site multiplies by a Parameter outside an nn.Linear, as FM interactions do."""
    return site.kind is not GemmKind.LINEAR and site.weight is not None and not site.blocked


def _joins(site: Site) -> bool:
    """True if a norm follows a site's product after a concatenation, a sum, or both."""
    between = list(takewhile(lambda op: op in ("cat", "add"), site.followed_by))
    return bool(between) and set(site.followed_by[len(between) : len(between) + 1]) <= NORMS | {"rms_norm", "view"}


def _crosses(site: Site) -> bool:
    """True if a site's product, with or without a bias, is multiplied and then added to."""
    after = site.followed_by[1:] if site.followed_by[:2] == ("add", "mul") else site.followed_by
    multiplied = after[:2] == ("mul", "add") or after[:1] == ("addcmul",)
    return multiplied and site.weight is not None and not site.blocked


def _writer(site: Site, modules: Mapping[str, nn.Module]) -> str:
    """The module whose forward reads a site's product: for a linear, the first around it that is no container."""
    if site.kind is not GemmKind.LINEAR or site.name not in modules:
        return site.owner
    return next((name for name in parents(site.name) if not isinstance(modules[name], _CONTAINERS)), "")


def _around(names: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    """The smallest module around these that is no container, or the model."""
    owner = common_module(names)
    while owner and isinstance(modules[owner], _CONTAINERS):
        owner = owner.rpartition(".")[0]
    return owner


def mixing_sites(interacting: Interacting, sites: Sequence[Site]) -> frozenset[str]:
    """Names of matmuls that may be part of an FM interaction to be fused: no other mod may rewrite them.

    An FM interaction of n embeddings of dimension d at rank r has `x^T @ rank`, with d rows per sample, K = n, N = r;
    `x @` that, with n rows, K = d, N = r; and perhaps `compress @ x`, with the rows and K of the first.
    """
    matmuls = [site for site in interacting.sites if site.kind is GemmKind.MATMUL]
    products = {(each.owner, each.rows.per_sample, each.k, each.n) for each in sites if each.weight is None}
    ranks = [each for each in matmuls if (each.owner, each.k, each.rows.per_sample, each.n) in products]
    mixed = {(rank.owner, rank.rows, rank.k) for rank in ranks}
    return frozenset(site.name for site in matmuls if (site.owner, site.rows, site.k) in mixed)


MOD: ForwardMod = FuseInteractionMod()

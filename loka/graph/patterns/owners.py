"""Owners: the modules whose forwards are rewritten for the regions around sites, with what is inlined in each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import nn

from loka.graph.patterns.region import NORM_MODULES
from loka.graph.sites.flow import Flow, common_module
from loka.graph.sites.site import GemmKind, Site
from loka.graph.source import has_hooks, has_own_forward

_FUNCTIONS: tuple[type[Any], ...] = (  # modules of torch that are inlined: norms, activations, views
    *NORM_MODULES, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Mish, nn.Identity,
    nn.GroupNorm, nn.Flatten, nn.Unflatten,
)  # fmt: skip
_FORWARDS = frozenset(kind.forward for kind in _FUNCTIONS)
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class RegionScope:
    """A module whose forward is rewritten for a group of sites; the arguments of `trace_forward`."""

    owner: str  # qualified name; "" is the model
    inline: tuple[str, ...]  # children, relative to the owner
    sites: tuple[str, ...]  # relative to the owner


@dataclass(frozen=True, slots=True)
class Barriers:
    """Modules, by qualified names, that a scope must not use as tracing refused them."""

    owners: frozenset[str] = frozenset()  # their forwards are not rewritten
    closed: frozenset[str] = frozenset()  # their forwards are not inlined, and may be owners
    uncalled: frozenset[str] = frozenset()  # an nn.Sequential that the model never calls, but what it holds

    def is_list(self, name: str, modules: Mapping[str, nn.Module]) -> bool:
        """True for a module that only holds others, whose forwards the model calls one by one."""
        return isinstance(modules[name], _LISTS) or name in self.uncalled

    def around(self, inside: str, owner: str) -> bool:
        """True if `inside`, or a module between it and `owner`, cannot be inlined into the owner."""
        between = takewhile(lambda name: name != owner, (inside, *parents(inside)))
        return any(name in self.closed or name in self.owners for name in between)


def inline_for(
    model: nn.Module,
    sites: Iterable[Site],
    chained: Collection[str] = (),
    flow: Flow | None = None,
    held: Mapping[str, str] | None = None,
    also: Mapping[str, Collection[str]] | None = None,
    barriers: Barriers | None = None,
) -> tuple[RegionScope, ...]:
    """The modules whose forwards must be rewritten so that one of them contains the region around each site.

    By `flow`, it is the smallest module that holds a plain nn.Linear and the norms and activations around it; or a sum
    or product with something else right after it, if the first hand-written forward around the linear has that. A
    linear without such neighbours needs no owner, and has no scope. For a Parameter, it is at least the module whose
    forward uses it. A linear that a mod rewrites is of another kind: without neighbours it is its own owner. A site
    merged by a mod stands for its members. Scopes whose owner would be inlined into another's are merged into that one.
    The owner of a site in `chained` (names) also holds the chained site that its product goes into. `held` gives owners
    that are known already; `also` are owners to rewrite without a site, each with modules to inline in it. Where
    `barriers` stand between a site and its owner, or are the owner, it is the largest module in front of them that
    still holds some of its neighbours. Scopes are in the order of the model's modules.
    """
    modules, sites, barriers = dict(model.named_modules()), tuple(sites), barriers or Barriers()
    flow = flow or Flow()
    owners: dict[str, list[str]] = {}
    inlined = {owner: list(names) for owner, names in (also or {}).items()}
    for site, owner in _wanted(modules, sites, chained, flow, held or {}, barriers):
        owners.setdefault(owner, []).extend(_weight_names(site, modules, owner))
        inlined.setdefault(owner, []).extend(_beside(site, owner, modules, flow, barriers))
        if site.name not in modules and owner != site.owner:
            inlined.setdefault(owner, []).append(site.owner)
    owners.update({owner: [] for owner in inlined if owner not in owners})
    scopes: dict[str, RegionScope] = {}
    changed = set(owners)
    while changed:
        around = frozenset(each for owner, names in owners.items() if names for each in (owner, *parents(owner)))
        calls = barriers.closed | barriers.owners | around
        for owner in changed:
            scopes[owner] = scope_of(owner, owners[owner], modules, inlined.get(owner, ()), calls)
        changed = set()
        for owner in sorted(scopes, key=len, reverse=True):
            outer = next((o for o in parents(owner) if o in scopes and relative(owner, o) in scopes[o].inline), None)
            if outer is not None:
                scopes.pop(owner)
                own = owners.pop(owner)
                owners[outer] += [owner] if type(modules[owner]) is nn.Linear else own
                inlined.setdefault(outer, []).extend(inlined.get(owner, ()))
                changed = (changed - {owner}) | {outer}
    return tuple(scopes[owner] for owner in modules if owner in scopes)


def wants_owner(model: nn.Module, sites: Iterable[Site], owner: str, flow: Flow, barriers: Barriers) -> frozenset[str]:
    """The names of the sites whose Parameter or neighbours make a module their owner, without a smaller one."""
    modules = dict(model.named_modules())
    wanted = ((site.name, _owners_of(site, modules, flow, {}, barriers)) for site in sites)
    return frozenset(name for name, found in wanted if found and max(found, key=len) == owner)


def _wanted(
    modules: dict[str, nn.Module],
    sites: Sequence[Site],
    chained: Collection[str],
    flow: Flow,
    held: Mapping[str, str],
    barriers: Barriers,
) -> Iterator[tuple[Site, str]]:
    """The owner of each site that needs one."""
    links = _links({site.name: site for site in sites}, chained, modules, flow, barriers)
    for site in sites:
        linked = [links[site.name]] if site.name in links else []
        owners = [*_owners_of(site, modules, flow, held, barriers), *linked]
        if owners:
            yield site, min(owners, key=len)


def _owners_of(
    site: Site, modules: Mapping[str, nn.Module], flow: Flow, held: Mapping[str, str], barriers: Barriers
) -> list[str]:
    """The possible owners of a site, for what stands around it or the one that is known already, if any."""
    near = [name for each in (site.name, *site.members) for name in _near(each, site, modules, flow)]
    known = [held[site.name]] if site.name in held else []
    smallest = _smallest(site, modules)
    reached = [_reached(site, name, modules, barriers) for name in (*near, *known)]
    return [name for name in (smallest, *reached) if name is not None]


def _smallest(site: Site, modules: Mapping[str, nn.Module]) -> str | None:
    """The owner of a site without neighbours; None for a plain nn.Linear, which needs none."""
    if site.name not in modules:
        return site.owner
    return site.name if site.kind is not GemmKind.LINEAR else None


def _near(name: str, site: Site, modules: Mapping[str, nn.Module], flow: Flow) -> Iterator[str]:
    """The modules that hold a site, or a member of it by its name, with norms and activations around it.

    What is right before or after it counts within the first hand-written forward, even through views, or if it is a
    sum or a product with something else.
    """
    yield from (*flow.before.get(name, ()), *flow.after.get(name, ()))
    place = name if name in modules else f"{site.owner}."  # a Parameter is one step below its owner
    for near in flow.near.get(name, ()):
        within = {near, *_within(near, modules)}
        yield from [around for around in _within(place, modules) if around in within][:1]


def _within(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules around one, up to the first hand-written forward that does more than call its one child."""
    for around in parents(name):
        yield around
        if not isinstance(modules[around], (*_LISTS, nn.Sequential)) and len(modules[around]._modules) > 1:
            return


def _reached(site: Site, owner: str, modules: Mapping[str, nn.Module], barriers: Barriers) -> str | None:
    """The module with a forward in place of a possible owner; None where barriers keep the site out of it."""
    inside = _inside(site, modules)
    while owner and barriers.is_list(owner, modules):
        owner = owner.rpartition(".")[0]
    if owner not in (inside, *parents(inside)) or owner in barriers.owners or barriers.around(inside, owner):
        return None
    return owner


def _links(
    sites: Mapping[str, Site], chained: Collection[str], modules: dict[str, nn.Module], flow: Flow, barriers: Barriers
) -> dict[str, str]:
    """The smallest module with a forward that holds a site and the next one of a chain, by their names."""
    owners: dict[str, str] = {}
    for pair in flow.into:
        if not all(name in chained and name in sites for name in pair):
            continue
        common = common_module([_inside(sites[name], modules) for name in pair])
        reached = [_reached(sites[name], common, modules, barriers) for name in pair]
        for name, owner in zip(pair, reached, strict=True):
            if owner is not None and None not in reached:
                owners[name] = min(owners.get(name, owner), owner, key=len)
    return owners


def _beside(site: Site, owner: str, modules: Mapping[str, nn.Module], flow: Flow, barriers: Barriers) -> list[str]:
    """The modules that compute what stands around a site, where they can be inlined into its owner."""
    below = [name for name in flow.beside.get(site.name, ()) if name in modules and owner in parents(name)]
    ways = {name: [name, *takewhile(lambda each: each != owner, parents(name))] for name in below}
    open_ = (name for name, way in ways.items() if not any(has_hooks(modules[each]) for each in way))
    return [name for name in open_ if not barriers.around(name, owner)]


def _inside(site: Site, modules: Mapping[str, nn.Module]) -> str:
    """The module that computes a site."""
    return site.name if site.name in modules else site.owner


def _weight_names(site: Site, modules: dict[str, nn.Module], owner: str) -> tuple[str, ...]:
    """Names of a site in `trace_forward`: its linear or its Parameter; several for a merged site."""
    if site.members:
        return site.members
    return (site.name if site.name in modules and site.name != owner else site.weight or site.name,)


def scope_of(
    owner: str,
    names: Sequence[str],
    modules: Mapping[str, nn.Module],
    inlined: Collection[str] = (),
    calls: Collection[str] = frozenset(),
) -> RegionScope:
    """The scope of one owner, for linears and Parameters by their qualified names, and modules to inline.

    Inlined are also those that hold nothing else (`Inlining`), but for the ones in `calls`, which stay calls.
    """
    inline = _ways(owner, names, inlined, modules)
    sites = tuple(relative(name, owner) for name in dict.fromkeys(names))
    own = Inlining(frozenset(names), calls).below(owner, modules[owner], {_below(owner, name) for name in inline})
    return RegionScope(owner, tuple(sorted({*inline, *(relative(name, owner) for name in own)})), sites)


def functions_beside(owner: str, names: Sequence[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Linears by their names in an owner, the modules on the way to them, and torch's functions among their children.

    `names` are qualified, and may also be those of Parameters.
    """
    inline = _ways(owner, names, (), modules)
    below = (
        relative(path, owner)
        for name in ("", *inline)
        for path, child in _children(_below(owner, name), modules[_below(owner, name)])
        if _is_function(child)
    )
    return tuple(sorted({*inline, *below}))


def _ways(
    owner: str, names: Iterable[str], inlined: Iterable[str], modules: Mapping[str, nn.Module]
) -> dict[str, None]:
    """The modules among these, and those on the way to them, by their names in an owner."""
    ways: dict[str, None] = {}
    for name in (*names, *inlined):
        if name in modules and name != owner:
            parts = relative(name, owner).split(".")
            ways.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return ways


def parents(name: str) -> Iterator[str]:
    """The enclosing modules, innermost first: "layers.0", "layers", "" for "layers.0.fmb"."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def relative(name: str, owner: str) -> str:
    """A qualified name relative to a module."""
    return name.removeprefix(f"{owner}.") if owner else name


def _below(owner: str, path: str) -> str:
    return ".".join(filter(None, (owner, path)))


@dataclass(frozen=True, slots=True)
class Inlining:
    """Decides which modules below an owner are inlined although no site asks for it.

    These are norms, activations and views of torch; and modules with a forward of the user's own, and nn.Sequentials,
    that hold nothing but Parameters, other such modules, the owner's linears, and modules of torch that have no
    Parameters. So whatever has embedding tables, or GEMMs of another owner, stays a call. Tracing shows what the
    forwards do; one that cannot be traced becomes one of `calls`.
    """

    linears: Collection[str]  # qualified names of the owner's linears
    calls: Collection[str]  # modules that are not inlined, such as those with sites of other owners

    def below(self, name: str, module: nn.Module, inline: Collection[str]) -> Iterator[str]:
        """Qualified names of the modules to inline inside one that is; `inline` are those that a site asks for."""
        for path, child in _children(name, module):
            if path in inline:
                yield from self.below(path, child, inline)
            elif self._is_inlined(path, child):
                yield path
                yield from self.below(path, child, inline)

    def _is_inlined(self, name: str, module: nn.Module) -> bool:
        """True for a module whose forward is traced through, by itself or as a part of another."""
        if name in self.calls or has_hooks(module):
            return False
        if _is_function(module):
            return True
        if not has_own_forward(module) and not (isinstance(module, nn.Sequential) and not module._parameters):
            return False
        return all(
            self._is_inlined(path, child) or self._is_plain(path, child) for path, child in _children(name, module)
        )

    def _is_plain(self, name: str, module: nn.Module) -> bool:
        """True for a linear of the owner, and for a module that stays a call inside of an inlined one: a dropout."""
        if name in self.linears:
            return True
        return not has_own_forward(module) and not module._parameters and not module._modules and name not in self.calls


def _is_function(module: nn.Module) -> bool:
    """True for a norm, an activation or a view of torch, and for a dropout of p = 0, without hooks."""
    idle = type(module) is nn.Dropout and module.p == 0
    return (idle or type(module).forward in _FORWARDS) and not has_hooks(module)


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module by qualified name, with lists and dicts of modules replaced by their content."""
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(child, _LISTS) and not has_own_forward(child):
            yield from _children(path, child)
        else:
            yield path, child

"""Owners: the modules whose forwards are rewritten for the regions around sites, with what is inlined in each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import nn

from loka.graph.patterns.region import ACTIVATIONS, ELEMENTWISE, NORM_MODULES, NORMS
from loka.graph.sites.flow import NORM_OPERATIONS, Flow, common_module
from loka.graph.sites.op_names import CLAMPS
from loka.graph.sites.site import GemmKind, Site
from loka.graph.source import (
    functions_of,
    has_hooks,
    has_operators,
    is_block_norm,
    is_own_arithmetic,
    is_own_function,
    is_swish_norm,
)
from loka.graph.source import names_in as names_in_code

_NAMES = NORMS | ACTIVATIONS | ELEMENTWISE | CLAMPS  # in code: a clamp may be a ReLU
_INLINABLE = (
    *NORM_MODULES, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Mish, nn.Identity,
    nn.GroupNorm,
)  # fmt: skip
_VIEWS = (nn.Flatten, nn.Unflatten)

_JOINING = frozenset({"cat", "concat", "concatenate", "add"})
_INTERNAL = frozenset(vars(nn.Module()))


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
        return isinstance(modules[name], nn.ModuleList | nn.ModuleDict) or name in self.uncalled

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

    For a plain nn.Linear, it is the smallest enclosing module that also holds the norm before it (where `fed_by` starts
    with one) and the norm or activation after it (where `followed_by` does). In an nn.Sequential these are its
    siblings; at its ends, and for a module that only wraps one child, the search continues in the parent, up to the
    first hand-written forward. A linear without such neighbours in reach needs no owner, and has no scope. For a
    Parameter, it is the module whose forward uses it. A linear that a mod rewrites is of another kind: without
    neighbours it is its own owner. A site merged by a mod stands for its members. Scopes whose owner would be inlined
    into another's are merged into that one. The owner of a site in `chained` (names) also holds an activation before
    it, so that a chain (`linear_chain`) can include it; and the chained site that its product goes into, by `flow`,
    which also gives the module of what stands around it. `held` gives owners that are known already; `also` are owners
    to rewrite without a site, each with modules to inline in it. Where `barriers` stand between a site and its owner,
    or are the owner, it is the largest module in front of them that still holds some of its neighbours. Scopes are in
    the order of the model's modules.
    """
    modules, sites, barriers = dict(model.named_modules()), tuple(sites), barriers or Barriers()
    flow = flow or Flow()
    owners: dict[str, list[str]] = {}
    inlined = {owner: list(names) for owner, names in (also or {}).items()}
    for site, owner in _wanted(modules, sites, chained, flow, held or {}, barriers):
        owners.setdefault(owner, []).extend(_weight_names(site, modules, owner))
        inlined.setdefault(owner, []).extend(_beside(site, owner, modules, chained, flow, barriers))
        if site.name not in modules and owner != site.owner:
            inlined.setdefault(owner, []).append(site.owner)
    owners.update({owner: [] for owner in inlined if owner not in owners})
    scopes: dict[str, RegionScope] = {}
    changed = set(owners)
    while changed:
        around = frozenset(each for owner, names in owners.items() if names for each in (owner, *parents(owner)))
        for owner in changed:
            scope = scope_of(owner, owners[owner], modules, inlined.get(owner, ()), barriers.closed)
            scopes[owner] = _with_own_modules(scope, modules, around, barriers)
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


def _with_own_modules(
    scope: RegionScope, modules: Mapping[str, nn.Module], around: Collection[str], barriers: Barriers
) -> RegionScope:
    """A scope with the modules of the user's own between what kernels take; `around` are owners and what holds them."""
    prefix = f"{scope.owner}." if scope.owner else ""
    linears = frozenset(prefix + name for name in scope.sites)
    inline = {prefix + name for name in scope.inline}
    own = OwnModules((*_INLINABLE, *_VIEWS), linears, around, barriers.closed | barriers.owners)
    found = own.below(scope.owner, modules[scope.owner], inline)
    return replace(scope, inline=tuple(sorted({*scope.inline, *(relative(name, scope.owner) for name in found)})))


def wants_owner(model: nn.Module, sites: Iterable[Site], owner: str, barriers: Barriers) -> frozenset[str]:
    """The names of the sites whose own norm, activation or Parameter makes a module their owner, without any chain."""
    modules = dict(model.named_modules())
    wanted = _wanted(modules, tuple(sites), (), Flow(), {}, barriers)
    return frozenset(site.name for site, found in wanted if found == owner)


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
        around = _owner_of(site, modules, site.name in chained, barriers)
        wanted = (around, links.get(site.name), _reached(site, held.get(site.name), modules, barriers))
        owner = min((name for name in wanted if name is not None), key=len, default=None)
        if owner is not None:
            yield site, owner


def _reached(site: Site, owner: str | None, modules: dict[str, nn.Module], barriers: Barriers) -> str | None:
    """An owner known already; None where it is not around the site's module, or barriers keep that out of it."""
    inside = _inside(site, modules)
    if owner is None or owner not in (inside, *parents(inside)):
        return None
    return None if owner in barriers.owners or barriers.around(inside, owner) else owner


def _links(
    sites: Mapping[str, Site], chained: Collection[str], modules: dict[str, nn.Module], flow: Flow, barriers: Barriers
) -> dict[str, str]:
    """The smallest module with a forward that holds a site, what stands around it, and the next site of a chain."""
    owners: dict[str, str] = {}
    pairs = (pair for pair in flow.into if all(name in chained for name in pair))
    near = (name for name in flow.around if name in sites and _takes_around(sites[name], chained))
    groups: list[tuple[str, ...]] = [*((name,) for name in near), *pairs]
    for names in groups:
        if not all(name in sites for name in names):
            continue
        inside = [_inside(sites[name], modules) for name in names]
        common = flow.around[names[0]] if len(names) == 1 else common_module(inside)
        while common and barriers.is_list(common, modules):
            common = common.rpartition(".")[0]
        if common not in barriers.owners and not any(barriers.around(name, common) for name in inside):
            for name in names:
                owners[name] = min(owners.get(name, common), common, key=len)
    return owners


def _beside(
    site: Site,
    owner: str,
    modules: Mapping[str, nn.Module],
    chained: Collection[str],
    flow: Flow,
    barriers: Barriers,
) -> list[str]:
    """The modules that compute what stands around a site, where they can be inlined into its owner."""
    common = flow.around.get(site.name)
    if common is None or not _takes_around(site, chained) or owner not in (common, *parents(common)):
        return []
    below = [name for name in flow.beside[site.name] if name in modules and owner in parents(name)]
    ways = {name: [name, *takewhile(lambda each: each != owner, parents(name))] for name in below}
    open_ = (name for name, way in ways.items() if not any(has_hooks(modules[each]) for each in way))
    return [name for name in open_ if not barriers.around(name, owner)]


def _takes_around(site: Site, chained: Collection[str]) -> bool:
    return site.name in chained or _is_normed(site)


def _is_normed(site: Site) -> bool:
    """True if a norm, perhaps one written by hand, follows a site's product and bias."""
    return next((op for op in site.followed_by if op != "add"), "") in NORM_OPERATIONS


def _inside(site: Site, modules: Mapping[str, nn.Module]) -> str:
    """The module that computes a site."""
    return site.name if site.name in modules else site.owner


def _weight_names(site: Site, modules: dict[str, nn.Module], owner: str) -> tuple[str, ...]:
    """Names of a site in `trace_forward`: its linear or its Parameter; several for a merged site."""
    if site.members:
        return site.members
    return (site.name if site.name in modules and site.name != owner else site.weight or site.name,)


def _owner_of(site: Site, modules: dict[str, nn.Module], chained: bool, barriers: Barriers) -> str | None:
    if site.name not in modules:
        return site.owner
    around = _owner_around(site, modules, chained, barriers)
    return site.name if around is None and site.kind is not GemmKind.LINEAR else around


def _owner_around(site: Site, modules: dict[str, nn.Module], chained: bool, barriers: Barriers) -> str | None:
    """The smallest module that holds a plain nn.Linear and the norm or activation around it; None without these."""
    feeds, types = (NORMS | ACTIVATIONS, _INLINABLE) if chained else (NORMS, NORM_MODULES)
    before = bool(site.fed_by) and site.fed_by[0] in feeds
    after = bool(site.followed_by) and site.followed_by[0] in NORMS | ACTIVATIONS | ELEMENTWISE
    found, inside = None, site.name
    for owner in parents(site.name):
        if not (before or after) or owner in barriers.owners or barriers.around(inside, owner):
            break
        parent = modules[owner]
        if barriers.is_list(owner, modules):
            continue
        if isinstance(parent, nn.Sequential):
            own = relative(inside, owner).split(".")[0]
            others = [name for name in parent._modules if name == own or not is_idle(parent._modules[name])]
            place = others.index(own)
            has_norm = before and place > 0 and _is_one(parent._modules[others[place - 1]], types)
            has_next = after and place + 1 < len(others) and _is_one(parent._modules[others[place + 1]], _INLINABLE)
            before, after = before and place == 0, after and place + 1 == len(others)
        else:
            adds = site.followed_by[:1] and site.followed_by[0] in ELEMENTWISE and has_operators(parent)
            lists = [modules[name] for name in barriers.uncalled]
            has_norm = before and _uses(parent, types, feeds, lists)
            has_next = after and (bool(adds) or _uses(parent, _INLINABLE, _NAMES, lists))
            wraps = _only_wraps(parent)
            before, after = before and wraps and not has_norm, after and wraps and not has_next
        if has_norm or has_next:
            found = owner
        inside = owner
    return found


def is_idle(module: nn.Module) -> bool:
    """True for a module that returns its input: an nn.Identity, or an nn.Dropout of p = 0."""
    idle = type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)
    return idle and not has_hooks(module)


def _is_one(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """True for a module of these types; a block norm counts as nn.RMSNorm, a SwishNorm as nn.Sigmoid."""
    if isinstance(module, types) or (nn.RMSNorm in types and is_block_norm(module)):
        return True
    return nn.Sigmoid in types and is_swish_norm(module)


def _uses(
    parent: nn.Module, types: tuple[type[nn.Module], ...], names: frozenset[str], lists: Sequence[nn.Module] = ()
) -> bool:
    """True if a hand-written forward has a child of such a type, or names such a function."""
    called = (function for function in functions_of(parent) if names & names_in_code(function))
    held = (value for name, value in vars(parent).items() if name not in _INTERNAL)
    functions = (value for value in held if getattr(value, "__name__", "") in names)
    children = any(_is_one(child, types) for _, child in _held(parent, lists))
    return children or next(called, None) is not None or next(functions, None) is not None


def _held(parent: nn.Module, lists: Sequence[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """The children by name, and those in its lists and dicts of modules; `lists` are further ones."""
    for name, child in parent.named_children():
        yield name, child
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or any(child is each for each in lists):
            yield from ((f"{name}.{inner}", item) for inner, item in child.named_children())


def may_join(parent: nn.Module) -> bool:
    """True if a hand-written forward normalises, and adds or concatenates."""
    named = (names_in_code(function) for function in functions_of(parent))
    sums = has_operators(parent) or any(names & _JOINING for names in named)
    return sums and _uses(parent, NORM_MODULES, NORMS)


def _only_wraps(parent: nn.Module) -> bool:
    """True if a module holds one child and neither Parameters nor functions, so that nothing can follow the child."""
    functions = (value for name, value in vars(parent).items() if name not in _INTERNAL and callable(value))
    return len(parent._modules) == 1 and not parent._parameters and next(functions, None) is None


def scope_of(
    owner: str,
    names: Sequence[str],
    modules: dict[str, nn.Module],
    inlined: Collection[str] = (),
    closed: Collection[str] = (),
) -> RegionScope:
    """The scope of one owner, for linears and Parameters by their qualified names, and modules to inline.

    Norms and activations in `closed` stay calls of modules.
    """
    sites = [relative(name, owner) for name in dict.fromkeys(names)]
    inline: dict[str, None] = {}
    for name in (*sites, *(relative(each, owner) for each in inlined)):
        if f"{owner}.{name}".lstrip(".") in modules:
            parts = name.split(".")
            inline.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    for path in ["", *inline]:
        found = _norms_and_activations(owner, path, modules)
        inline.update(dict.fromkeys(name for name in found if ".".join(filter(None, (owner, name))) not in closed))
    return RegionScope(owner, tuple(sorted(inline)), tuple(sites))


def _norms_and_activations(owner: str, path: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Names of the norms and activations among the children of an inlined module, except those with hooks."""
    for name, child in _held(modules[".".join(filter(None, (owner, path)))]):
        own = type(child) in (*_INLINABLE, *_VIEWS) or is_own_function(child) or is_own_arithmetic(child)
        if (own and not has_hooks(child)) or is_idle(child):
            yield f"{path}.{name}".lstrip(".")
        elif (is_block_norm(child) or is_swish_norm(child)) and not any(has_hooks(part) for part in child.modules()):
            yield from (f"{path}.{name}.{inner}".strip(".") for inner, _ in child.named_modules())


def parents(name: str) -> Iterator[str]:
    """The enclosing modules, innermost first: "layers.0", "layers", "" for "layers.0.fmb"."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def relative(name: str, owner: str) -> str:
    """A qualified name relative to a module."""
    return name.removeprefix(f"{owner}.") if owner else name


_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class OwnModules:
    """Decides which modules below an owner are inlined although no site asks for it.

    These are modules with a forward of the user's own, and nn.Sequentials, that hold nothing but Parameters, other such
    modules, the owner's linears, and modules of torch that have no Parameters or are norms. So whatever has embedding
    tables, or GEMMs of another owner, stays a call. Tracing shows what the forwards do; one that cannot be traced is
    `closed`.
    """

    kernels: tuple[type[nn.Module], ...]  # modules of torch that are inlined: norms, activations, views
    linears: Collection[str]  # qualified names of the owner's linears
    others: Collection[str]  # modules with sites of other owners, and all that are around these
    closed: Collection[str]  # modules that are not inlined

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
        if name in self.closed or name in self.others or has_hooks(module):
            return False
        if type(module) in self.kernels:
            return True
        if not _is_own(module) and not (isinstance(module, nn.Sequential) and not module._parameters):
            return False
        return all(
            self._is_inlined(path, child) or self._is_plain(path, child) for path, child in _children(name, module)
        )

    def _is_plain(self, name: str, module: nn.Module) -> bool:
        """True for a linear of the owner, and for a module that stays a call inside of an inlined one: a dropout."""
        if name in self.linears:
            return True
        return not _is_own(module) and not module._parameters and not module._modules and name not in self.others


def _is_own(module: nn.Module) -> bool:
    """True for a module with a forward of the user's own."""
    return not type(module).forward.__module__.startswith("torch.") and bool(functions_of(module))


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module by qualified name, with lists and dicts of modules replaced by their content."""
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(child, _LISTS) and not _is_own(child):
            yield from _children(path, child)
        else:
            yield path, child

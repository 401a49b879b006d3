"""The policy's mods that rewrite forwards: where they can be had in a model, and what its sites are then.

`merge_siblings` comes first, then `batch_small`, then `pad_alignment`, in whatever order the policy has them, so that a
merged linear can be padded. An owner is traced to see what stands in it; what was found is carried out and checked at
once, so that a change which is not the same function is never planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loka.graph.ir import ForwardIR
from loka.graph.refused import Refused
from loka.graph.trace.observed_shapes import Shape
from loka.mods import batch_small, merge_siblings, pad_alignment
from loka.mods.adaptation import Unchanged
from loka.mods.forward_rewrites import mod_of
from loka.mods.rewrite_result import RewriteResult
from loka.mods.rewriting_tools import Size
from loka.numerics.enums import Compute
from loka.plan.resolve import deciding
from loka.plan.rewrite.modded_sites import batched_site, merged_site, padded_site, what_words
from loka.plan.rewrite.model_in_change import ModelInChange
from loka.plan.rewrite.rewriting_tracer import OwnedChange, RewritingTracer
from loka.plan.rewrite.tracer import Tracer
from loka.policy.cascade.settings import SiteSettings
from loka.policy.policy import ModRule
from loka.sites.site import GemmKind, Site

MODS = (merge_siblings.NAME, batch_small.NAME, pad_alignment.NAME)  # in the order in which they are carried out
_NAMED = "a rule asks for it in FP8 by its name, and a batched product stays in the model's dtype"
_MIXED = "it is part of a mixing layer, for which fuse_interaction has kernels that mask sizes themselves"
_MERGED = "merge_siblings has made it one GEMM with others"
_FUSED = "fuse_interaction takes it into a kernel as it is written; leave its owner out of that mod's match instead"
_CROSSED = (
    "what multiplies its product may be a cross layer, which fuse_interaction takes with N as it is; leave its owner "
    "out of that mod's match instead"
)
_LARGE = "it is larger than max_k and max_n allow"
# Reasons that need no telling: a broad pattern cannot mean such sites.
_USUAL = frozenset({merge_siblings.ALONE, batch_small.FEW, pad_alignment.ALIGNED, _LARGE})


@dataclass(frozen=True, slots=True)
class ModdedForward:
    """What one entry of the policy's `mods` changed in forwards, and what it was asked for and leaves, and why."""

    rewritten: tuple[RewriteResult, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    known: tuple[str, ...] = ()  # names of all sites that it could be asked for


@dataclass(frozen=True, slots=True)
class Modded:
    """A model's sites and settings once forward mods have changed them."""

    sites: tuple[Site, ...]
    settings: tuple[SiteSettings, ...]
    trace: RewritingTracer  # of the model's owners, with all that was changed
    made: Mapping[str, ModdedForward] = field(default_factory=dict)  # by the entry's `source`

    @property
    def changed(self) -> frozenset[str]:
        """Names of sites that mods changed."""
        return frozenset(each.site for made in self.made.values() for each in made.rewritten)


def with_forward_mods(
    rules: Sequence[ModRule],
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    siblings: Sequence[tuple[str, ...]],
    tracer: Tracer,
    mixed: frozenset[str] = frozenset(),
    crossed: frozenset[str] = frozenset(),
) -> Modded:
    """Carry out the forward mods among some entries of `mods`; `settings[i]` belongs to `sites[i]`.

    `siblings` are names of sites that seem to read one tensor (`SiteMap.siblings`). Owners are run and traced.
    `mixed` are names of sites that `fuse_interaction` takes, `crossed` of those whose products it takes, as it knows
    them by how they are written.
    """
    mine = [rule for rule in rules if rule.use in MODS]
    if not mine:
        return Modded(tuple(sites), tuple(settings), RewritingTracer(tracer))
    model = ModelInChange(sites, settings, siblings, tracer, mixed, crossed)
    looks: dict[str, Callable[[ModelInChange, ModRule], _ModOutcome]] = {
        merge_siblings.NAME: _merge,
        batch_small.NAME: _batch,
        pad_alignment.NAME: _pad,
    }
    made: dict[str, ModdedForward] = {}
    for rule in sorted(mine, key=lambda rule: MODS.index(rule.use)):
        known = tuple(name for site in model.sites.values() for name in (*site.members, site.name))
        found = looks[rule.use](model, rule)
        made[rule.source] = ModdedForward(tuple(found.rewritten), found.told(rule), known)
    return Modded(tuple(model.sites.values()), tuple(model.settings.values()), model.trace, made)


class _ModOutcome:
    """What one entry makes, as it is found."""

    def __init__(self) -> None:
        self.rewritten: list[RewriteResult] = []
        self.left: dict[str, str] = {}  # site -> why

    def leave(self, names: Collection[str], reason: str) -> None:
        """Say why sites stay as they are; what was said first counts."""
        for name in names:
            self.left.setdefault(name, reason)

    def told(self, rule: ModRule) -> tuple[Unchanged, ...]:
        """What is left, but for what a broad pattern cannot mean; all of it where nothing was changed."""
        taken = {site for each in self.rewritten for site in (*each.sites, each.site)}
        return tuple(
            Unchanged(name, reason)
            for name, reason in self.left.items()
            if name not in taken and (reason not in _USUAL or rule.names(name) or not self.rewritten)
        )


def _wanted(model: ModelInChange, rule: ModRule, found: _ModOutcome) -> list[Site]:
    """The sites that an entry is for and that can be rewritten; a merged one where it is for all of its members."""
    wanted = []
    for site in model.sites.values():
        names = site.members or (site.name,)
        meant = [name for name in names if rule.wants(name)]
        reason = model.unsupported_reason(site)
        if reason is not None:
            found.leave(meant, reason)
        elif site.name in model.mixed:
            found.leave(meant, _FUSED)
        elif len(meant) < len(names):
            found.leave(meant, f"it is one GEMM with others, {site.name!r}, that are not all meant")
        else:
            wanted.append(site)
    return wanted


def _merge(model: ModelInChange, rule: ModRule) -> _ModOutcome:
    found = _ModOutcome()
    wanted = {site.name: site for site in _wanted(model, rule, found)}
    groups = [
        names for group in model.siblings for names in _alike(model, [name for name in group if name in wanted], found)
    ]
    model.capture([model.around(names) for names in groups])
    for names in groups:
        for owner, seen, _, sizes, called in _seen(model, names, model.around(names), found):
            siblings, unchanged = merge_siblings.find(seen, sizes)
            for each in unchanged:
                found.leave([called[each.name]], each.reason)
            for change in siblings:
                members = [called[name] for name in change.members]
                name = f"{owner}.{change.name}" if owner else change.name
                site = merged_site(name, owner, [model.sites[member] for member in members])
                _take(model, found, OwnedChange(owner, change), members, site)
    found.leave(wanted, merge_siblings.ALONE)
    return found


def _alike(model: ModelInChange, group: Sequence[str], found: _ModOutcome) -> Iterator[list[str]]:
    """The sites of a group that can be one GEMM: of one K and M and dtype, and with the same settings."""
    shapes: dict[tuple[object, ...], list[str]] = {}
    for name in group:
        site = model.sites[name]
        shapes.setdefault((site.k, site.rows, *model.kind_of_weight(site)), []).append(name)
    for names in shapes.values():
        by_policy: list[list[str]] = []
        for name in names:
            same = next((each for each in by_policy if _same(model.settings[each[0]], model.settings[name])), None)
            if same is None:
                by_policy.append([name])
            else:
                same.append(name)
        for each in by_policy:
            if len(each) > 1:
                yield each
            elif len(names) > 1:
                other = next(name for name in names if name != each[0])
                found.leave(each, f"the policy treats it otherwise than {other!r}, which reads the same tensor")


def _same(one: SiteSettings, other: SiteSettings) -> bool:
    return (one.gemms, one.budget, one.fuse) == (other.gemms, other.budget, other.fuse)


def _seen(
    model: ModelInChange, names: Sequence[str], owner: str, found: _ModOutcome
) -> Iterator[tuple[str, ForwardIR, dict[str, Shape], dict[str, Size], dict[str, str]]]:
    """An owner's forward, the shapes of its locals, its sites' sizes, and their names in the model by those in it.

    Nothing where it cannot be traced, or not with any of the sites; sites that stand in the way are left out.
    """
    names = list(names)
    while names:
        called = {model.called(name, owner): name for name in names}
        seen = model.look(owner, names)
        if not isinstance(seen, Refused):
            sizes = {inner: Size(model.sites[name].k, model.sites[name].n) for inner, name in called.items()}
            yield owner, *seen, sizes, called
            return
        odd = [name for inner, name in called.items() if seen.reason.startswith(f"'{inner}' ")]
        found.leave(odd or names, seen.reason)
        names = [name for name in names if name not in odd] if odd else []


def _take(model: ModelInChange, found: _ModOutcome, owned: OwnedChange, members: Sequence[str], site: Site) -> None:
    reason = model.take(owned, members, site)
    if reason is not None:
        found.leave(members, reason)
        return
    what = what_words(owned.change)
    found.rewritten.append(RewriteResult(mod_of(owned.change), owned.owner, tuple(members), site.name, what))


def _batch(model: ModelInChange, rule: ModRule) -> _ModOutcome:
    found, limits = _ModOutcome(), dict(rule.settings)
    wanted = {}
    for site in _wanted(model, rule, found):
        if site.k > int(limits["max_k"]) or site.n > int(limits["max_n"]):
            found.leave([site.name], _LARGE)
        elif _forced(model.settings[site.name]):
            found.leave([site.name], _NAMED)
        elif site.members:
            found.leave(site.members, _MERGED)
        else:
            wanted[site.name] = site
    groups = _families(model, wanted)
    model.capture(list(groups))
    for owner, names in groups.items():
        left = [name for name in names if name in model.sites]
        for where, seen, shapes, sizes, called in _seen(model, left, owner, found):
            batches, unchanged = batch_small.find(seen, sizes, shapes)
            for each in unchanged:
                found.leave([called[each.name]], each.reason)
            for change in batches:
                members = [called[name] for name in change.members]
                name = f"{where}.{change.name}" if where else change.name
                site = batched_site(name, where, [model.sites[member] for member in members])
                _take(model, found, OwnedChange(where, change), members, site)
    found.leave(wanted, batch_small.FEW)
    return found


def _forced(wanted: SiteSettings) -> bool:
    """Whether a rule that names this one site asks for any of its GEMMs in FP8."""
    rules = (deciding(wanted, gemm) for gemm, asked in wanted.gemms.items() if asked.compute is Compute.FP8)
    return any(rule is not None and rule.names_one_site for rule in rules)


def _families(model: ModelInChange, wanted: Mapping[str, Site]) -> dict[str, list[str]]:
    """Sites of one shape that one forward may call, by that forward's module, the innermost first.

    These are what one module calls, and what is called alike but for one number ("towers.*.fc") with the module around.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, site in wanted.items():
        shape = (site.rows, site.k, site.n, *model.kind_of_weight(site))
        alike.setdefault((site.owner, None, *shape), []).append(name)
        steps = name.split(".")
        for place, step in enumerate(steps):
            if step.isdecimal():
                family = (*steps[:place], "*", *steps[place + 1 :])
                alike.setdefault((None, family, *shape), []).append(name)
    groups: dict[str, dict[str, None]] = {}
    for names in alike.values():
        if len(names) >= batch_small.FEWEST:
            groups.setdefault(model.around(names), {}).update(dict.fromkeys(names))
    depths = sorted(groups, key=lambda owner: -len(owner.split(".")) if owner else 0)
    return {owner: list(groups[owner]) for owner in depths}


def _pad(model: ModelInChange, rule: ModRule) -> _ModOutcome:
    found, to = _ModOutcome(), int(dict(rule.settings)["to"])
    owners: dict[str, list[str]] = {}
    for site in _wanted(model, rule, found):
        multiple = _multiple(model, site.name, to)
        if site.k % multiple == 0 and site.n % multiple == 0:
            found.leave([site.name], pad_alignment.ALIGNED)
        elif site.k % multiple == 0 and site.name in model.crossed:
            found.leave([site.name], _CROSSED)
        else:
            owners.setdefault(site.name if site.kind is GemmKind.LINEAR else site.owner, []).append(site.name)
    model.capture(list(owners))
    for owner, names in owners.items():
        for where, seen, _, sizes, called in _seen(model, names, owner, found):
            mixed = _mixed(seen)
            wanted = {
                inner: (size, _multiple(model, called[inner], to))
                for inner, size in sizes.items()
                if inner not in mixed
            }
            crossed = {inner for inner in wanted if called[inner] in model.crossed}
            pads, _ = pad_alignment.find(seen, wanted, crossed)
            found.leave([called[inner] for inner in sizes if inner in mixed], _MIXED)
            for change in pads:
                name = called[change.site]
                site = padded_site(model.sites[name], change)
                _take(model, found, OwnedChange(where, change, linear=where == name), [name], site)
    return found


def _multiple(model: ModelInChange, name: str, to: int) -> int:
    """Elements that a site's sizes become multiples of: `to` bytes, in FP8 or, where all of it is kept, in 16 bits."""
    kept = all(asked.compute is Compute.KEEP for asked in model.settings[name].gemms.values())
    return to // 2 if kept else to


def _mixed(forward: ForwardIR) -> frozenset[str]:
    """The sites of mixing layers."""
    places = [place for mix in forward.mixes for place in (mix.inner, mix.compress) if place is not None]
    calls = (forward.statements[place].call for place in places)
    return frozenset(call.site for call in calls if call is not None)

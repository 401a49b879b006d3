"""The interactions of a forward that kernels of fuse_interaction support, and the reasons for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from loka.graph.ir import WEIGHTED, ConcatNorm, DotInteraction, FmInteraction, ForwardIR, NearKind
from loka.graph.patterns.concat_norm import concatenated_norm
from loka.graph.patterns.fm_interaction import without_sums
from loka.graph.patterns.linear_chain import LinearChain
from loka.graph.sites.site import Site
from loka.kernels.fused.interaction.concat_norm import unsupported_reason as why_not_joined
from loka.kernels.fused.interaction.dot import unsupported_reason as why_not_paired
from loka.kernels.fused.interaction.fm import unsupported_reason as why_not_mixed
from loka.kernels.measurements.interaction_forms import ConcatNormForm, DotForm, FmForm, Form
from loka.mods.rewriting.rewriting_tracer import writer_of


@dataclass(frozen=True, slots=True)
class Interacting:
    """Where a model may have interactions that a mod was asked for, as far as the model's sites show."""

    owners: frozenset[str] = frozenset()  # modules whose forward may contain one
    sites: tuple[Site, ...] = ()  # GEMMs that must be recognised as such in these forwards
    together: tuple[tuple[str, str], ...] = ()  # (site, the smallest module that holds all that belong together)
    crossing: tuple[str, ...] = ()  # modules with cross layers, which have no kernels of their own
    mixing: frozenset[str] = frozenset()  # names of sites that may be multiplied by in a mixing layer
    products: tuple[tuple[str, str], ...] = ()  # (module of an interaction's product, the module that holds all of it)
    likely: frozenset[str] = frozenset()  # of `owners`, those where what is around the sites is as in an interaction
    unwanted: frozenset[str] = frozenset()  # modules that the mod was not asked for


@dataclass(frozen=True, slots=True)
class Fused:
    """One interaction that a kernel computes."""

    owner: str  # the module whose forward contains it
    what: str  # description: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    sites: tuple[str, ...]  # sites fused with it
    form: Form
    columns: int  # of an embedding, or of a row
    beside: str = ""  # a site that is called as often; "" if its forward has none


@dataclass(slots=True)
class FusedInteractions:
    """The interactions found in the modules that the mod was asked for."""

    fused: list[Fused] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # owner -> reason why some or all of it is not fused
    untraced: dict[str, str] = field(default_factory=dict)  # the same for owners without a sign of an interaction

    def refuse(self, owners: Iterable[str], reason: str) -> None:
        """Record that nothing of these owners is fused."""
        for owner in owners:
            self.reasons.setdefault(owner, reason)


@dataclass(frozen=True, slots=True)
class ChosenInteractions:
    """The interactions of one forward that kernels support, and the sites fused with them, each with the operations."""

    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    dots: tuple[DotInteraction, ...] = ()
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def any(self) -> bool:
        """True if there is one."""
        return bool(self.mixes or self.joins or self.dots)


NAME = "fuse_interaction"
NOTHING = "its forward has no mixing layer, join or dot interaction in a form that a kernel takes (docs/mods.md)"
CROSS = (
    "its cross layer has no kernel of its own: the chain of its GEMM computes it or, without one, the compiler "
    "(docs/mods.md)"
)
FM_FUSED = ("transpose", "matmul", "matmul")  # the operations around a site of an FM interaction
_KEEP = "in FP8, and kernels mix in the model's dtype: keep that site (compute: keep)"


def choose_interactions(
    forward: ForwardIR,
    owners: Collection[str],
    kept: Collection[str],
    chains: Sequence[LinearChain],
    found: FusedInteractions,
    unwanted: Collection[str] = (),
) -> ChosenInteractions:
    """The interactions in the forwards of these owners that kernels support.

    `kept` names sites whose GEMMs stay in the model's dtype. A join in one of the `chains` is computed there.
    These interactions are added to `found`, and the reasons for others. Products without a site in `unwanted` modules
    are in none: which sites there are says what else is wanted.
    """
    places = {place for chain in chains for place in range(chain.first, chain.last + 1)}
    mixed = tuple(_mixes(forward, owners, kept, found, unwanted))
    joined = tuple(_joins(forward, owners, places, found))
    paired = tuple(_dots(forward, owners, found))
    mixes, joins = tuple(mix for mix, _ in mixed), tuple(join for join, _ in joined)
    found.fused += [_with_passing(fused, mix.is_added(joins)) for mix, fused in mixed]
    found.fused += [fused for _, fused in joined]
    found.fused += [fused for _, fused in paired]
    done = {fused.owner for fused in found.fused}
    mixing = {fused.owner for _, fused in mixed}
    fused_of = {NearKind.MIXING: mixing, NearKind.JOIN: done, NearKind.NORM: set(owners)}
    for near in forward.near:
        writer = writer_of(forward, near.place)
        found.refuse({writer} & set(owners) - fused_of[near.kind], near.missing)
    regions = [(site, FM_FUSED) for mix in mixes for site in sites_of(mix, forward)]
    return ChosenInteractions(mixes, joins, tuple(dot for dot, _ in paired), tuple(regions))


def sites_of(mix: FmInteraction, forward: ForwardIR) -> tuple[str, ...]:
    """The sites of an FM interaction."""
    return tuple(site for place in mix.gemms for site in _site_at(forward, place))


def _with_passing(fused: Fused, passing: bool) -> Fused:
    """The same with `passing` set in its form."""
    if isinstance(fused.form, FmForm):
        return replace(fused, form=replace(fused.form, passing=passing))
    return fused


def _mixes(
    forward: ForwardIR,
    owners: Collection[str],
    kept: Collection[str],
    found: FusedInteractions,
    unwanted: Collection[str],
) -> Iterator[tuple[FmInteraction, Fused]]:
    def is_left(place: int) -> bool:
        return forward.statements[place].op == WEIGHTED and writer_of(forward, place) in unwanted

    for mix in forward.mixes:
        if is_left(mix.gemms[0]):
            continue
        if len(mix.gemms) == 2 and is_left(mix.gemms[1]):
            mix = without_sums(mix, forward)
        owner, sites = writer_of(forward, mix.outer), sites_of(mix, forward)
        is_site = forward.statements[mix.gemms[0]].op != WEIGHTED
        while not is_site and owner not in owners and owner != forward.owner:  # no site names such a child
            owner = owner.rpartition(".")[0]
        if owner not in owners:
            continue
        if len(sites) == 2 and sites[0] in kept and sites[1] not in kept:
            mix, apart, sites = without_sums(mix, forward), sites[1], sites[:1]
            found.refuse([owner], f"its weighted sums multiply by '{apart}' {_KEEP}")
        n, d, r, c = mix.sizes
        fp8 = [site for site in sites if site not in kept]
        reason = why_not_mixed(*mix.sizes)
        if reason is not None:
            found.refuse([owner], f"no kernel mixes {n} embeddings of {d} at rank {r}: {reason}")
        elif len(sites) != sum(forward.statements[place].op != WEIGHTED for place in mix.gemms):
            found.refuse([owner], "its mixing layer multiplies by a Parameter that several calls share")
        elif fp8:
            found.refuse(
                [owner],
                f"its mixing layer multiplies by '{fp8[0]}' {_KEEP}",
            )
        else:
            sums = f", {c} weighted sums" if c else ""
            what = f"a mixing layer of {n} embeddings of {d}, rank {r}{sums}"
            yield (
                mix,
                Fused(
                    owner,
                    what,
                    tuple(dict.fromkeys(sites)),
                    FmForm(n, r, c),
                    d,
                    sites[0] if sites else _called_beside(forward, mix.outer),
                ),
            )


def _joins(
    forward: ForwardIR, owners: Collection[str], places: Collection[int], found: FusedInteractions
) -> Iterator[tuple[ConcatNorm, Fused]]:
    for join in forward.joins:
        owner, norm = writer_of(forward, join.skipped[0]), concatenated_norm(forward, join)
        if owner not in owners or norm is None or any(place in places for place in join.places):
            continue
        reason = why_not_joined(norm.kind, norm.width, len(join.parts))
        if reason is not None:
            found.refuse([owner], f"no kernel joins what its {norm.kind} takes: {reason}")
            continue
        parts = f"{len(join.parts)} parts" if len(join.parts) > 1 else "a tensor"
        residual = " and a residual" if join.residual is not None else ""
        what = f"{'an' if norm.kind == 'rms_norm' else 'a'} {norm.kind} of {parts}{residual}, {norm.width} wide"
        vectors = norm.weight is not None, norm.bias is not None
        form = ConcatNormForm(join.rows, join.residual is not None, norm.kind, *vectors)
        yield join, Fused(owner, what, (), form, norm.width, _called_beside(forward, join.skipped[0]))


def _dots(
    forward: ForwardIR, owners: Collection[str], found: FusedInteractions
) -> Iterator[tuple[DotInteraction, Fused]]:
    for dot in forward.dots:
        owner, (n, d) = writer_of(forward, dot.product), dot.sizes
        if owner not in owners:
            continue
        reason = why_not_paired(n, d)
        if reason is not None:
            found.refuse([owner], f"no kernel multiplies all pairs of {n} embeddings of {d}: {reason}")
            continue
        yield dot, Fused(owner, f"a dot interaction of {n} embeddings of {d}", (), DotForm(n), d)


def _site_at(forward: ForwardIR, place: int) -> tuple[str, ...]:
    call = forward.statements[place].call
    return () if call is None else (call.site,)


def _called_beside(forward: ForwardIR, place: int) -> str:
    """A site that the same module calls; any other of the forward where there is none."""
    calls = [(step.note == forward.statements[place].note, step.call.site) for step in forward.statements if step.call]
    return max(calls, key=lambda each: each[0], default=(False, ""))[1]

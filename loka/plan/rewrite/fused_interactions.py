"""Which interactions of a traced forward are fused for `fuse_interaction`, and why others are not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from loka.graph.ir import ConcatNorm, Cross, FmInteraction, ForwardIR, Region
from loka.graph.patterns.concat_norm import concatenated_norm
from loka.graph.patterns.fm_interaction import in_place_reason
from loka.graph.patterns.linear_chain import LinearChain
from loka.kernels.fused.cross.cross_kernel import unsupported_reason as why_not_crossed
from loka.kernels.fused.interaction.concat_norm_spec import unsupported_reason as why_not_joined
from loka.kernels.fused.interaction.fm_spec import unsupported_reason as why_not_mixed
from loka.kernels.measurements.interaction_forms import Crossing, Form, Joining, Mixing

NOTHING = "its forward has no mixing layer, join or cross layer in a form that a kernel takes (docs/mods.md)"
FM_FUSED = ("transpose", "matmul", "matmul")  # the operations around a site of a mixing layer
CROSSED = ("linear", "mul", "add")  # around the GEMM of a cross layer


@dataclass(frozen=True, slots=True)
class Fused:
    """One interaction that a kernel computes."""

    owner: str  # the module whose forward writes it
    what: str  # for people: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    sites: tuple[str, ...] = ()  # that it takes along
    form: Form | None = None  # None where the chain of its GEMMs computes it
    columns: int = 0  # of an embedding, or of a row
    beside: str = ""  # a site that is called as often, "" where its forward has none


@dataclass(slots=True)
class FusedInteractions:
    """What came of looking for interactions in the modules that the mod was asked for."""

    fused: list[Fused] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # owner -> why something of it, or all, stays

    def refuse(self, owners: Iterable[str], reason: str) -> None:
        """Nothing of these owners is fused."""
        for owner in owners:
            self.reasons.setdefault(owner, reason)

    def close(self, asked: Collection[str]) -> None:
        """Owners that nothing was found in, and nothing was said of, get the general reason."""
        found = {fused.owner for fused in self.fused}
        self.refuse(sorted(owner for owner in asked if owner not in found), NOTHING)


@dataclass(frozen=True, slots=True)
class ChosenInteractions:
    """The interactions of one forward that kernels take; the sites that they take along, each with the operations."""

    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    crosses: tuple[Cross, ...] = ()
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self.mixes or self.joins or self.crosses)

    def crosses_in(self, region: Region) -> bool:
        """Whether a region around a GEMM holds a part of a cross layer, which is then computed on its own."""
        return any(region.first <= place <= region.last for cross in self.crosses for place in cross.places)


def choose_interactions(
    forward: ForwardIR,
    asked: Collection[str],
    kept: Collection[str],
    chains: Sequence[LinearChain],
    made: FusedInteractions,
) -> ChosenInteractions:
    """The interactions that are written by the owners that are `asked` for, and that kernels take.

    `kept` names sites whose GEMMs stay in the model's dtype. A cross layer in one of the `chains` is computed there.
    `made` gets what was found, and why not.
    """
    in_place = in_place_reason(forward.statements)
    if in_place is not None:
        made.refuse(_writers(forward, asked), in_place)
        return ChosenInteractions()
    places = {place for chain in chains for place in range(chain.first, chain.last + 1)}
    mixed = tuple(_mixes(forward, asked, kept, made))
    joined = tuple(_joins(forward, asked, places, made))
    crossed = tuple(_crosses(forward, asked, places, made))
    mixes, joins = tuple(mix for mix, _ in mixed), tuple(join for join, _ in joined)
    crosses = tuple(cross for cross, fused in crossed if fused.form is not None)
    made.fused += [_with_passing(fused, any(_adds(join, mix) for join in joins)) for mix, fused in mixed]
    made.fused += [fused for _, fused in joined]
    made.fused += [_with_passing(fused, _is_read_later(cross, crosses)) for cross, fused in crossed]
    regions = [(site, FM_FUSED) for mix in mixes for site in sites_of(mix, forward)]
    regions += [(site, CROSSED) for cross in crosses for site in _site_at(forward, cross.linear)]
    return ChosenInteractions(mixes, joins, crosses, tuple(regions))


def sites_of(mix: FmInteraction, forward: ForwardIR) -> tuple[str, ...]:
    """The sites that a mixing layer multiplies by."""
    return tuple(site for place in (mix.inner, mix.compress) if place is not None for site in _site_at(forward, place))


def _with_passing(fused: Fused, passing: bool) -> Fused:
    """With what the form says of gradients that are added on the way."""
    if isinstance(fused.form, Mixing | Crossing):
        return replace(fused, form=replace(fused.form, passing=passing))
    return fused


def _adds(join: ConcatNorm, mix: FmInteraction) -> bool:
    return join.residual is not None and join.residual.text == mix.x


def _is_read_later(cross: Cross, crosses: Sequence[Cross]) -> bool:
    return any(other.factor == cross.factor and other.sum > cross.sum for other in crosses)


def _mixes(
    forward: ForwardIR, asked: Collection[str], kept: Collection[str], made: FusedInteractions
) -> Iterator[tuple[FmInteraction, Fused]]:
    for mix in forward.mixes:
        owner, sites = _writer(forward, mix.outer), sites_of(mix, forward)
        if owner not in asked:
            continue
        n, d, r, c = mix.sizes
        fp8 = [site for site in sites if site not in kept]
        reason = why_not_mixed(*mix.sizes)
        if reason is not None:
            made.refuse([owner], f"no kernel mixes {n} embeddings of {d} at rank {r}: {reason}")
        elif len(sites) != 1 + (mix.compress is not None):
            made.refuse([owner], "its mixing layer multiplies by a Parameter that several calls share")
        elif fp8:
            made.refuse(
                [owner],
                f"its mixing layer multiplies by '{fp8[0]}' in FP8, and kernels mix in the model's dtype: keep that "
                "site (compute: keep)",
            )
        else:
            sums = f", {c} weighted sums" if c else ""
            what = f"a mixing layer of {n} embeddings of {d}, rank {r}{sums}"
            yield mix, Fused(owner, what, sites, Mixing(n, r, c), d, sites[0])


def _joins(
    forward: ForwardIR, asked: Collection[str], places: Collection[int], made: FusedInteractions
) -> Iterator[tuple[ConcatNorm, Fused]]:
    for join in forward.joins:
        owner, norm = _writer(forward, join.skipped[0]), concatenated_norm(forward, join)
        if owner not in asked or norm is None or any(place in places for place in join.places):
            continue
        reason = why_not_joined(norm.kind, norm.width, len(join.parts))
        if reason is not None:
            made.refuse([owner], f"no kernel joins what its {norm.kind} takes: {reason}")
            continue
        parts = f"{len(join.parts)} parts" if len(join.parts) > 1 else "a tensor"
        residual = " and a residual" if join.residual is not None else ""
        what = f"{'an' if norm.kind == 'rms_norm' else 'a'} {norm.kind} of {parts}{residual}, {norm.width} wide"
        vectors = norm.weight is not None, norm.bias is not None
        form = Joining(join.rows, join.residual is not None, norm.kind, *vectors)
        yield join, Fused(owner, what, (), form, norm.width, _called_beside(forward, join.skipped[0]))


def _crosses(
    forward: ForwardIR, asked: Collection[str], places: Collection[int], made: FusedInteractions
) -> Iterator[tuple[Cross, Fused]]:
    for cross in forward.crosses:
        owner = _writer(forward, cross.sum)
        if owner not in asked:
            continue
        reason = why_not_crossed(cross.width)
        inside = any(place in places for place in cross.places)
        if reason is not None and not inside:
            made.refuse([owner], f"no kernel takes its cross layer: {reason}")
            continue
        where = ", in the chain of its GEMMs" if inside else ""
        # A GEMM in a chain adds its bias there.
        biased = cross.bias is not None and cross.linear not in places
        form = None if inside else Crossing(biased, cross.residual == cross.factor)
        sites = _site_at(forward, cross.linear)
        beside = sites[0] if sites else ""
        yield cross, Fused(owner, f"a cross layer, {cross.width} wide{where}", sites, form, cross.width, beside)


def _site_at(forward: ForwardIR, place: int) -> tuple[str, ...]:
    call = forward.statements[place].call
    return () if call is None else (call.site,)


def _called_beside(forward: ForwardIR, place: int) -> str:
    """A site whose call the same module writes; any other of the forward where there is none."""
    calls = [(step.note == forward.statements[place].note, step.call.site) for step in forward.statements if step.call]
    return max(calls, key=lambda each: each[0], default=(False, ""))[1]


def _writer(forward: ForwardIR, place: int) -> str:
    """The module whose forward a statement was written in."""
    return ".".join(filter(None, (forward.owner, forward.statements[place].note)))


def _writers(forward: ForwardIR, asked: Collection[str]) -> list[str]:
    """The owners asked for whose forward this is, or is inlined in this."""
    inside = {".".join(filter(None, (forward.owner, name))) for name in ("", *forward.inlined)}
    return sorted(owner for owner in asked if owner in inside)

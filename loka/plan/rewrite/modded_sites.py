"""What a site is once a mod has merged it with others, batched it or padded it, and what a profile says of it then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka.mods.batch_small import Batch
from loka.mods.forward_rewrites import Change
from loka.mods.merge_siblings import Siblings
from loka.mods.pad_alignment import Pad
from loka.numerics.enums import Gemm, Scaling
from loka.plan.evidence import ProfiledSites
from loka.probe.profile.profile import Estimate, OperandSummary, SiteProfile
from loka.sites.site import GemmKind, Site

BATCHED = "batch_small: it is one batched product with others, which stays in the model's dtype"


def merged_site(name: str, owner: str, members: Sequence[Site]) -> Site:
    """The one GEMM that siblings are: N and the share of FLOPs add up."""
    first = members[0]
    same_after = all(site.followed_by == first.followed_by for site in members)
    return replace(
        first,
        name=name,
        kind=GemmKind.FUNCTIONAL_LINEAR,
        owner=owner,
        weight=None,
        bias=None,
        n=sum(site.n for site in members),
        calls_eval=max(site.calls_eval for site in members),
        share=sum(site.share for site in members),
        input_grad=any(site.input_grad for site in members),
        followed_by=first.followed_by if same_after else (),
        members=_names(members),
    )


def batched_site(name: str, owner: str, members: Sequence[Site]) -> Site:
    """The batched product that small linears are; M, K and N are those of one, `calls` counts them all."""
    first = members[0]
    return replace(
        first,
        name=name,
        kind=GemmKind.BMM,
        owner=owner,
        weight=None,
        bias=None,
        calls=sum(site.calls for site in members),
        calls_eval=sum(site.calls_eval for site in members),
        share=sum(site.share for site in members),
        input_grad=any(site.input_grad for site in members),
        blocked=BATCHED,
        members=_names(members),
    )


def padded_site(site: Site, pad: Pad) -> Site:
    """The site with the sizes that its GEMM gets. A plain linear is a linear of its own forward then."""
    kind = GemmKind.FUNCTIONAL_LINEAR if site.kind is GemmKind.LINEAR else site.kind
    return replace(site, kind=kind, k=pad.padded.k, n=pad.padded.n)


def _names(members: Sequence[Site]) -> tuple[str, ...]:
    return tuple(site.name for site in members)


def what_words(change: Change) -> str:
    """A change for people, without names that differ from layer to layer."""
    match change:
        case Siblings():
            return f"{len(change.members)} linears over one input are one GEMM of K {change.k}, N {change.n}"
        case Batch():
            read = "stacked inputs" if change.base is None else "slices of one tensor"
            return f"{len(change.members)} linears of K {change.k}, N {change.n} over {read} are one batched product"
        case Pad():
            sizes = [("K", change.k, change.padded.k), ("N", change.n, change.padded.n)]
            left = [] if change.columns or change.n % change.to == 0 else [f"N {change.n} left to fuse_interaction"]
            return ", ".join([*(f"{name} {old} padded to {new}" for name, old, new in sizes if old != new), *left])


def known_of(known: ProfiledSites | None, sites: Sequence[Site]) -> ProfiledSites | None:
    """A profile that also speaks of merged sites, as far as what it says of their members carries over."""
    merged = [site for site in sites if site.members and site.blocked is None]
    if known is None or not merged:
        return known
    return replace(known, sites={**known.sites, **_merged(known.sites, merged)})


def _merged(seen: Mapping[str, SiteProfile], sites: Sequence[Site]) -> dict[str, SiteProfile]:
    found = {}
    for site in sites:
        members = [seen[name] for name in site.members if name in seen]
        if len(members) == len(site.members):
            worst = (_worst(each, members) for each in members[0].estimates)
            estimates = [each for each in worst if each is not None]
            operands = tuple(_largest(each, members) for each in members[0].operands)
            found[site.name] = SiteProfile(site.name, site.k, site.n, members[0].rows, operands, tuple(estimates))
    return found


def _worst(estimate: Estimate, members: Sequence[SiteProfile]) -> Estimate | None:
    """The worst estimate of the members under one recipe, where theirs bound that of the merged GEMM.

    fprop's product is theirs side by side, and wgrad's theirs one above the other, so that no error is larger than the
    largest of them, as long as each row of what differs between them has its own scale. dgrad adds their products up:
    what errors and signals do in the sum, estimates of its terms do not say.
    """
    differing = {Gemm.FPROP: 1, Gemm.WGRAD: 0}.get(estimate.gemm)  # the weight; the output gradient
    if differing is None:
        return None
    recipe = estimate.operands[differing]
    if recipe.scaling is not Scaling.ROWWISE or recipe.transposed or any(each.transposed for each in estimate.operands):
        return None
    same = [
        each
        for member in members
        for each in member.estimates
        if (each.gemm, each.operands) == (estimate.gemm, estimate.operands)
    ]
    if len(same) != len(members):
        return None
    mere = max((each.mere for each in same), key=lambda interval: interval.high)
    sqnr = min((each.sqnr_db for each in same), key=lambda interval: interval.low)
    return replace(estimate, mere=mere, sqnr_db=sqnr, draws=min(each.draws for each in same))


def _largest(operand: OperandSummary, members: Sequence[SiteProfile]) -> OperandSummary:
    """The summary of an operand from the member in which it was largest: what static ranges go by."""
    same = [each for member in members for each in member.operands if each.operand is operand.operand]
    return max(same, key=lambda each: each.amax)

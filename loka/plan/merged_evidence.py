"""What a profile says of a site that a mod has made of several: as far as what it says of these carries over.

Such a site is a GEMM whose product is theirs side by side: one K and M, and N added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka.numerics.enums import Gemm, Scaling
from loka.plan.evidence import ProfiledSites
from loka.probe.profile.profile import Estimate, OperandSummary, SiteProfile
from loka.sites.site import Site


def with_merged_sites(known: ProfiledSites | None, sites: Sequence[Site]) -> ProfiledSites | None:
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

"""Names of sites in the model and in the forward of their owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from loka.errors import LokaError
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.sites.site import Site


def weight_of(site: Site) -> str | None:
    """Name of the Parameter that a site multiplies by; merged sites use the site's name."""
    return site.name if site.members else site.weight


def called_by_owner(site: Site, owner: str) -> str:
    """Name of a site on a Parameter relative to the owner."""
    weight = weight_of(site) or ""
    return weight.removeprefix(f"{owner}.") if owner else weight


def named_as_in_model(parameters: Sequence[Site], owner: str, traced: ForwardIR) -> tuple[ForwardIR, tuple[Site, ...]]:
    """An owner's forward with its sites named as in the model, and the sites of `parameters` without a call.

    A Parameter used in several places makes several sites with one relative name, which its calls get in order.
    """
    sharing: dict[str, list[Site]] = {}
    for site in parameters:
        sharing.setdefault(called_by_owner(site, owner), []).append(site)
    calls = Counter(step.call.site for step in traced.statements if step.call is not None)
    lost = tuple(
        site
        for relative, sites in sharing.items()
        if len(sites) > 1 and calls[relative] != len(sites)
        for site in sites
    )
    unnamed = {site.name for site in lost}
    seen: Counter[str] = Counter()

    def named(step: Statement) -> Statement:
        if step.call is None:
            return step
        relative = step.call.site
        sites = sharing.get(relative)
        if sites is None:
            name = f"{owner}.{relative}" if owner else relative
        else:
            name = sites[min(seen[relative], len(sites) - 1)].name
            seen[relative] += 1
        return replace(step, call=None if name in unnamed else replace(step.call, site=name))

    statements = tuple(map(named, traced.statements))
    regions = tuple(
        replace(region, site=_call_in(statements, region.first, region.last).site)
        for region in traced.regions
        if any(step.call is not None for step in statements[region.first : region.last + 1])
    )
    return replace(traced, statements=statements, regions=regions), lost


def _call_in(statements: Sequence[Statement], first: int, last: int) -> SiteCall:
    for step in statements[first : last + 1]:
        if step.call is not None:
            return step.call
    raise LokaError("a region without a GEMM. This is a fault in LoKA: please report it.")

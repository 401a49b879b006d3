"""A plan as rows of a table: one per site, or one for all sites that are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandPair
from loka.plan.format import (
    common_pattern,
    format_decision,
    format_figure,
    format_mere,
    format_reasons,
    format_speedup,
    format_sqnr,
    pattern_of,
)
from loka.plan.plan import Evidence, GemmPlan, InteractionPlan, Plan, SitePlan
from loka.plan.select.interaction_times import interaction_by_site, place_in_interaction
from loka.probe.profile.profile import Verdict
from loka.sites.site import Site

NOT_KNOWN = "-"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Sites that differ only in the numbers in their names. `pattern` is a glob for several sites."""

    pattern: str
    count: int
    kind: str
    rows: str  # M of one call, at the plan's batch size; with the number of calls if there are several
    k: int
    n: int
    share: float  # of the model's forward GEMM FLOPs, all sites together
    runs_in: tuple[str, str, str]  # fprop, dgrad, wgrad
    region: tuple[str, ...]  # the operations of the region that is replaced around each site
    reason: str
    mere: str = "-"  # the worst of all its GEMMs, with its interval and the GEMM; `-` without evidence
    sqnr_db: str = "-"
    steps: str = "-"  # sampled steps of all steps, "40/4000"
    us: str = "-"  # all calls of one site in a training step; `-` without measurements
    as_is_us: str = "-"  # the same for the native model
    speedup: str = "-"  # "1.31x"


def group_sites(plan: Plan, alike: bool) -> tuple[PlanRow, ...]:
    """The rows of a plan in model order; `alike`: sites that differ only in the numbers of their names share a row.

    Linears that are never called have none.
    """
    in_interactions = {name: place_in_interaction(each) for name, each in interaction_by_site(plan).items()}
    return tuple(_row(plan, group, in_interactions) for group in site_groups(plan, alike))


def site_groups(plan: Plan, alike: bool = True) -> tuple[list[SitePlan], ...]:
    """The sites of each row of `group_sites`."""
    groups: dict[tuple[object, ...], list[SitePlan]] = {}
    fused = interaction_by_site(plan)
    for number, found in enumerate(plan.called):
        site = found.site
        key: tuple[object, ...] = (number,)
        if alike:
            # Sites with the same decisions share objects (loka.plan.resolve), so identities suffice here. With a
            # profile each site has its own evidence, and decisions are compared by value.
            decided = id(found.gemms) if plan.profile is None else tuple(map(_decided, found.gemms))
            key = (pattern_of(site.name), site.kind, site.rows, site.k, site.n, site.calls, decided)
            key = (*key, found.region, found.region_note, found.timing, site.name in fused)
        groups.setdefault(key, []).append(found)
    return tuple(groups.values())


def name_of_group(group: Sequence[SitePlan]) -> str:
    """The name of the only site, or the common pattern of all."""
    return group[0].site.name if len(group) == 1 else common_pattern([each.site.name for each in group])


@dataclass(frozen=True, slots=True)
class UncalledRow:
    """Linears that no forward calls, with one reason. `pattern` is a glob for several."""

    pattern: str
    count: int
    reason: str  # of the first of them


def group_uncalled(plan: Plan) -> tuple[UncalledRow, ...]:
    """The linears that no forward calls; those that differ only in the numbers of names share a row."""
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in (each.site for each in plan.sites if not each.site.called):
        reason = site.blocked or ""
        groups.setdefault((pattern_of(site.name), _DIGITS.sub("*", reason)), []).append(site)
    return tuple(
        UncalledRow(common_pattern([site.name for site in group]), len(group), group[0].blocked or "")
        for group in groups.values()
    )


def _decided(gemm: GemmPlan) -> tuple[object, ...]:
    """Key of a GEMM's decision without its figures."""
    if gemm.evidence is None:
        return (gemm.gemm, gemm.kernel, _without_amax(gemm), gemm.reason)
    reason = gemm.reason.replace(gemm.evidence.figures, "")
    return (gemm.gemm, gemm.kernel, _without_amax(gemm), reason, gemm.evidence.verdict)


def _without_amax(gemm: GemmPlan) -> OperandPair | None:
    return _plain(gemm.operands) if gemm.operands is not None else None


def _plain(pair: OperandPair) -> OperandPair:
    first, second = pair
    return first.without_amax, second.without_amax


def _row(plan: Plan, group: list[SitePlan], in_interactions: Mapping[str, str]) -> PlanRow:
    first = _worst(group)
    inside = list(dict.fromkeys(in_interactions[each.site.name] for each in group if each.site.name in in_interactions))
    site = first.site
    m = site.rows.at(plan.batch_size)
    evidence = [(gemm.gemm, gemm.evidence) for each in group for gemm in each.gemms if gemm.evidence is not None]
    mere, sqnr_db, steps = _figures(evidence)
    us, as_is_us, speedup = _times(first)
    return PlanRow(
        pattern=name_of_group(group),
        count=len(group),
        kind=site.kind.value,
        rows=str(m) if site.calls == 1 else f"{m} x{site.calls}",
        k=site.k,
        n=site.n,
        share=sum(each.site.share for each in group),
        runs_in=(
            _runs_in(group, Gemm.FPROP),
            _runs_in(group, Gemm.DGRAD),
            _runs_in(group, Gemm.WGRAD),
        ),
        region=first.region,
        reason="; ".join([format_reasons(first), *([common_pattern(inside)] if inside else [])]),
        mere=mere,
        sqnr_db=sqnr_db,
        steps=steps,
        us=us,
        as_is_us=as_is_us,
        speedup=speedup,
    )


def _times(plan: SitePlan) -> tuple[str, str, str]:
    """Time of a site in a training step, planned and native, and the speedup."""
    if plan.timing is None:
        return "-", "-", "-"
    chosen, as_is = (each.us * plan.site.calls for each in (plan.timing.chosen, plan.timing.as_is))
    return format_figure(chosen), format_figure(as_is), format_speedup(plan.timing.speedup)


@dataclass(frozen=True, slots=True)
class InteractionRow:
    """Interactions that differ only in the numbers in their owners' names."""

    what: str
    owner: str  # a glob for several
    count: int
    samples: int  # per call
    us: str  # all calls of one in a training step; `-` if unknown
    as_is_us: str  # the same with torch.compile
    speedup: str
    source: str  # of the time with LoKA's kernels


def group_interactions(plan: Plan) -> tuple[InteractionRow, ...]:
    """The interactions with their own kernels, in model order."""
    groups: dict[tuple[object, ...], list[InteractionPlan]] = {}
    for each in plan.interactions:
        key = (pattern_of(each.owner), each.what, each.samples, each.calls, each.chosen, each.as_is)
        groups.setdefault(key, []).append(each)
    return tuple(_interaction_row(group) for group in groups.values())


def _interaction_row(group: Sequence[InteractionPlan]) -> InteractionRow:
    first = group[0]
    us, as_is = (
        NOT_KNOWN if time is None else format_figure(time.us * first.calls) for time in (first.chosen, first.as_is)
    )
    return InteractionRow(
        what=first.what,
        owner=common_pattern([each.owner for each in group]) or "the model itself",
        count=len(group),
        samples=first.samples,
        us=us,
        as_is_us=as_is,
        speedup=NOT_KNOWN if first.speedup is None else format_speedup(first.speedup),
        source=first.chosen.source.value if first.chosen is not None else NOT_KNOWN,
    )


def _worst(group: list[SitePlan]) -> SitePlan:
    """The site whose reason is shown for a group: the one with the largest MERE."""

    def error(plan: SitePlan) -> float:
        evidence = (gemm.evidence for gemm in plan.gemms if gemm.evidence is not None)
        return max((each.mere.mean for each in evidence if each.verdict is not Verdict.SAFE), default=0.0)

    return max(group, key=error)


def _runs_in(group: list[SitePlan], gemm: Gemm) -> str:
    """Recipe of a GEMM of the group; without static ranges if only these differ."""
    words = {id(each.gemms): format_decision(each, gemm) for each in group}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    first = group[0]
    plain = tuple(
        each if each.operands is None else replace(each, operands=_plain(each.operands)) for each in first.gemms
    )
    return format_decision(replace(first, gemms=plain), gemm)


def _figures(evidence: Sequence[tuple[Gemm, Evidence]]) -> tuple[str, str, str]:
    """The worst MERE and SQNR of some GEMMs, each with the GEMM's name, and the sampled steps."""
    if not evidence:
        return "-", "-", "-"
    mere_of, mere = max(evidence, key=lambda each: each[1].mere.mean)
    sqnr_of, sqnr = min(evidence, key=lambda each: each[1].sqnr_db.mean)
    return (
        f"{format_mere(mere.mere)} {mere_of.value}",
        f"{format_sqnr(sqnr.sqnr_db)} {sqnr_of.value}",
        f"{mere.samples}/{mere.steps}",
    )

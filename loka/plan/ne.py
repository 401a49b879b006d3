"""The predicted change of NE of a whole plan, from the evidence for its GEMMs, and its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.numerics.enums import Compute, Gemm
from loka.plan.format import format_ne
from loka.plan.plan import GemmPlan, Plan, SitePlan
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Interval, sum_of_changes


@dataclass(frozen=True, slots=True)
class PlannedNe:
    """The change of NE by all FP8 GEMMs for which the profile has one."""

    ne_percent: Interval
    known: int  # FP8 GEMMs that it counts
    unknown: tuple[str, ...]  # sites whose FP8 forward GEMM it lacks

    @property
    def note(self) -> str:
        """The number of sites that the sum leaves out, and what says more; "" if it has all."""
        if not self.unknown:
            return ""
        return (
            f"; not measured, and left out, at {len(self.unknown)} more in FP8: loka probe measures more with fewer "
            "--ne-batches, and loka compare judges the whole model"
        )


def planned_ne(sites: Iterable[SitePlan]) -> PlannedNe | None:
    """The sum over a plan's sites; None where the profile knows none of them.

    Changes by single sites add up to that by all together as long as they are small.
    """
    known: list[Interval] = []
    unknown = []
    for site in sites:
        known += _changes(site)
        if any(gemm.fp8 and gemm.gemm is Gemm.FPROP and _change(gemm) is None for gemm in site.gemms):
            unknown.append(site.site.name)
    return PlannedNe(sum_of_changes(known), len(known), tuple(unknown)) if known else None


def over_ne_budget(plan: Plan, source: str) -> str:
    """A message with advice where the upper end of the plan's change of NE exceeds the policy's budget; otherwise "".

    `source` is the profile's name.
    """
    found = planned_ne(plan.sites)
    if plan.ne_budget is None or found is None or found.ne_percent.high <= plan.ne_budget:
        return ""
    return (
        f"the plan is over budget by {source}: a change of NE of {format_ne(found.ne_percent)}, and "
        f"budget.ne_percent is {plan.ne_budget:g}.\n"
        "Write `compute: auto` instead of `compute: fp8` where it may stay as it is, choose another recipe, or widen "
        "the budget."
    )


def sites_over_ne(sites: Sequence[SitePlan], settings: Sequence[SiteSettings], ne_budget: float) -> frozenset[str]:
    """The sites to keep so that the upper ends of the others add up to the budget at most.

    Those that lose most NE for the time they save go first; without measurements, for their FLOPs. Only sites with a
    GEMM under `compute: auto` can go: with forced ones alone, the budget may still not hold.
    """
    highs = {site.site.name: sum_of_changes(_changes(site)).high for site in sites}
    total = math.fsum(highs.values())
    movable = [
        site
        for site, wanted in zip(sites, settings, strict=True)
        if any(gemm.fp8 and wanted.gemms[gemm.gemm].compute is Compute.AUTO and _high(gemm) > 0 for gemm in site.gemms)
    ]
    movable.sort(key=lambda site: highs[site.site.name] / _worth(site) if _worth(site) > 0 else math.inf)
    kept = set()
    while total > ne_budget and movable:
        kept.add(movable.pop().site.name)
        total = math.fsum(high for name, high in highs.items() if name not in kept)
    return frozenset(kept)


def _worth(site: SitePlan) -> float:
    """What FP8 at a site saves: microseconds of a step, or without measurements its share of the FLOPs."""
    if site.timing is None:
        return site.site.share
    return site.site.calls * (site.timing.without_fp8.us - site.timing.chosen.us)


def _changes(site: SitePlan) -> list[Interval]:
    return [change for gemm in site.gemms if gemm.fp8 and (change := _change(gemm)) is not None]


def _high(gemm: GemmPlan) -> float:
    change = _change(gemm)
    return change.high if change is not None else 0.0


def _change(gemm: GemmPlan) -> Interval | None:
    return gemm.evidence.ne_percent if gemm.evidence is not None else None

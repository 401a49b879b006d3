"""The predicted change of NE of a whole plan, from the evidence for its GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from loka.probe.profile.profile import Interval, sum_of_changes


@dataclass(frozen=True, slots=True)
class PlannedNe:
    """The change of NE by all FP8 forward GEMMs for which the profile has one."""

    ne_percent: Interval
    known: int  # FP8 forward GEMMs that it counts
    unknown: tuple[str, ...]  # sites whose FP8 forward GEMM it lacks


def planned_ne(plan: Plan) -> PlannedNe | None:
    """The sum over a plan's sites; None where the profile knows none of them.

    Changes by single sites add up to that by all together as long as they are small.
    """
    known, unknown = [], []
    for site in plan.sites:
        for gemm in site.gemms:
            if gemm.gemm is not Gemm.FPROP or not gemm.fp8:
                continue
            if gemm.evidence is None or gemm.evidence.ne_percent is None:
                unknown.append(site.site.name)
            else:
                known.append(gemm.evidence.ne_percent)
    return PlannedNe(sum_of_changes(known), len(known), tuple(unknown)) if known else None

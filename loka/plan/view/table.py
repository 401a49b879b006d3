"""The table of a plan: a row for each site, or for all that are alike, a row for each interaction, and its budgets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from loka.numerics.enums import Gemm
from loka.plan.format import (
    common_pattern,
    format_decision,
    format_mere,
    format_reasons,
    format_share,
    format_speedup,
    format_sqnr,
    format_time,
    grouped,
    pattern_of,
    rule_patterns,
)
from loka.plan.plan import Evidence, GemmPlan, InteractionPlan, Plan, SitePlan, StepTime
from loka.plan.select.interaction_times import interaction_by_site, place_in_interaction
from loka.policy.settings import Assignment, Budget
from loka.probe.profile.profile import Verdict

NOTHING = "-"
# Microseconds of a training step: by torch.compile, by LoKA with native GEMMs, and as planned; the gain over the first.
TIMES = ("BF16 us", "no FP8", "FP8", "gain")
EVIDENCE = ("MERE", "SQNR dB", "steps")  # the worst of a row's sites; steps: sampled of all
RECIPES = ("fprop", "dgrad", "wgrad")
SIZES = ("site", "count", "M", "K", "N", "FLOPs")
DECISIONS = (*SIZES, *RECIPES, "region", "reason")
INTERACTIONS = ("interaction", "in", "count", "samples", "us", "compiled us", "gain", "time")
_DIGITS = re.compile(r"\d+")
_BUDGET = ("mere", "sqnr_db", "min_speedup")


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
    mere: str  # the worst of all its GEMMs, with its interval and the GEMM; `-` without evidence
    sqnr_db: str
    steps: str  # sampled steps of all steps, "40/4000"
    us: str  # all calls of one site in a training step; `-` without measurements
    without_fp8_us: str  # the same with native GEMMs, fused or compiled as the policy leaves it
    as_is_us: str  # the same for the native model by torch.compile
    speedup: str  # over the native model: "1.31x"

    @property
    def cells(self) -> dict[str, str]:
        """Column -> text."""
        sizes = (self.pattern, str(self.count), self.rows, str(self.k), str(self.n), format_share(self.share))
        return {
            **dict(zip(SIZES, sizes, strict=True)),
            **dict(zip(RECIPES, self.runs_in, strict=True)),
            **dict(zip(TIMES, (self.as_is_us, self.without_fp8_us, self.us, self.speedup), strict=True)),
            **dict(zip(EVIDENCE, (self.mere, self.sqnr_db, self.steps), strict=True)),
            **{"kind": self.kind, "region": " ".join(self.region), "reason": self.reason},
        }


def group_sites(plan: Plan, alike: bool) -> tuple[PlanRow, ...]:
    """The rows of a plan in model order; `alike`: sites that differ only in the numbers of their names share a row.

    Linears that are never called have none.
    """
    inside, names = interaction_by_site(plan), rule_names(plan)
    return tuple(_row(plan, group, inside, names) for group in site_groups(plan, alike))


def slowed_lines(plan: Plan) -> list[str]:
    """The sites that FP8 makes slower, a line for those that are alike, with both times."""
    lines, names = [], rule_names(plan)
    for group in site_groups(plan):
        site, timing = group[0], group[0].timing
        if timing is None or not site.slowed_by_fp8:
            continue
        times = (_figure(time, site.site.calls) for time in (timing.chosen, timing.without_fp8))
        lines.append(f"FP8 makes {name_of_group(group, names)} slower: {' us, without FP8 '.join(times)} us")
    return lines


def cells_of(rows: Sequence[PlanRow], columns: Sequence[str]) -> list[tuple[str, ...]]:
    """These columns of the rows."""
    return [tuple(cells[column] for column in columns) for cells in (row.cells for row in rows)]


def site_groups(plan: Plan, alike: bool = True) -> list[list[SitePlan]]:
    """The sites of each row of `group_sites`."""
    fused = interaction_by_site(plan)

    def key(found: SitePlan) -> tuple[object, ...]:
        site, decided = found.site, tuple(map(_decided, found.gemms))
        timing = found.timing
        times = (timing.chosen, timing.without_fp8, timing.as_is) if timing is not None else ()
        own = (pattern_of(site.name), site.kind, site.rows, site.k, site.n, site.calls, decided)
        return (*own, found.region, found.region_note, times, site.name in fused)

    return grouped(plan.called, key) if alike else [[each] for each in plan.called]


def rule_names(plan: Plan) -> tuple[str, ...]:
    """The names of all sites, as rules of a policy take them."""
    return tuple(name for each in plan.sites for name in each.site.rule_names)


def name_of_group(group: Sequence[SitePlan], names: Collection[str]) -> str:
    """The name of the only site, or the patterns of all, as a rule takes them; `names` are `rule_names` of the plan."""
    return ", ".join(rule_patterns([name for each in group for name in each.site.rule_names], names))


def _decided(gemm: GemmPlan) -> tuple[object, ...]:
    """Key of a GEMM's decision without its figures, and without static ranges."""
    operands = None if gemm.operands is None else tuple(each.without_amax for each in gemm.operands)
    if gemm.evidence is None:
        return gemm.gemm, gemm.kernel, operands, gemm.reason
    return gemm.gemm, gemm.kernel, operands, gemm.reason.replace(gemm.evidence.figures, ""), gemm.evidence.verdict


def _row(plan: Plan, group: list[SitePlan], inside: Mapping[str, InteractionPlan], names: Collection[str]) -> PlanRow:
    first = max(group, key=_error)
    site, timing = first.site, first.timing
    m = site.rows.at(plan.batch_size)
    places = {place_in_interaction(inside[each.site.name]): None for each in group if each.site.name in inside}
    mere, sqnr_db, steps = _figures(
        [(gemm.gemm, gemm.evidence) for each in group for gemm in each.gemms if gemm.evidence is not None]
    )
    return PlanRow(
        pattern=name_of_group(group, names),
        count=len(group),
        kind=site.kind.value,
        rows=str(m) if site.calls == 1 else f"{m} x{site.calls}",
        k=site.k,
        n=site.n,
        share=sum(each.site.share for each in group),
        runs_in=(_runs_in(group, Gemm.FPROP), _runs_in(group, Gemm.DGRAD), _runs_in(group, Gemm.WGRAD)),
        region=first.region,
        reason="; ".join([format_reasons(first), *([common_pattern(list(places))] if places else [])]),
        mere=mere,
        sqnr_db=sqnr_db,
        steps=steps,
        us=_figure(timing.chosen if timing is not None else None, site.calls),
        without_fp8_us=_figure(timing.without_fp8 if timing is not None else None, site.calls),
        as_is_us=_figure(timing.as_is if timing is not None else None, site.calls),
        speedup=_gain(timing.speedup if timing is not None else None),
    )


def _error(plan: SitePlan) -> float:
    """The largest MERE of GEMMs that are not safe: a group shows the reason of the site with the largest."""
    found = [gemm.evidence for gemm in plan.gemms if gemm.evidence is not None]
    return max((each.mere.mean for each in found if each.verdict is not Verdict.SAFE), default=0.0)


def _runs_in(group: Sequence[SitePlan], gemm: Gemm) -> str:
    """Recipe of a GEMM of the group; without static ranges if only these differ."""
    words = {id(each.gemms): format_decision(each, gemm) for each in group}
    return words.popitem()[1] if len(set(words.values())) == 1 else format_decision(group[0], gemm, with_amax=False)


def _figures(evidence: Sequence[tuple[Gemm, Evidence]]) -> tuple[str, str, str]:
    """The worst MERE and SQNR of some GEMMs, each with the GEMM's name, and the sampled steps."""
    if not evidence:
        return NOTHING, NOTHING, NOTHING
    mere_of, mere = max(evidence, key=lambda each: each[1].mere.mean)
    sqnr_of, sqnr = min(evidence, key=lambda each: each[1].sqnr_db.mean)
    return (
        f"{format_mere(mere.mere)} {mere_of.value}",
        f"{format_sqnr(sqnr.sqnr_db)} {sqnr_of.value}",
        f"{mere.samples}/{mere.steps}",
    )


def _figure(time: StepTime | None, calls: int) -> str:
    return NOTHING if time is None else format_time(time, calls)


def _gain(speedup: float | None) -> str:
    return NOTHING if speedup is None else format_speedup(speedup)


def interaction_groups(plan: Plan) -> list[list[InteractionPlan]]:
    """The interactions with their own kernels, those that differ only in the numbers of their owners together."""
    return grouped(
        plan.interactions,
        lambda each: (pattern_of(each.owner), each.what, each.samples, each.calls, each.chosen, each.as_is),
    )


def owner_of_group(group: Sequence[InteractionPlan]) -> str:
    """The owner of the only interaction, or the common pattern of all."""
    return common_pattern([each.owner for each in group]) or "the model itself"


def interaction_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row of INTERACTIONS for each group: times of all calls of one in a training step, beside torch.compile."""
    return [
        (
            *(first.what, owner_of_group(group), str(len(group)), str(first.samples)),
            *(_figure(first.chosen, first.calls), _figure(first.as_is, first.calls), _gain(first.speedup)),
            first.chosen.source.value if first.chosen is not None else NOTHING,
        )
        for group in interaction_groups(plan)
        for first in group[:1]
    ]


def uncalled_lines(plan: Plan) -> list[str]:
    """The linears that no forward calls; those that differ only in the numbers of names share a line."""
    uncalled, names = [each for each in plan.sites if not each.site.called], rule_names(plan)
    lines = []
    for group in grouped(
        uncalled, lambda each: (pattern_of(each.site.name), _DIGITS.sub("*", each.site.blocked or ""))
    ):
        count = f" ({len(group)} linears)" if len(group) > 1 else ""
        lines.append(f"NEVER CALLED {name_of_group(group, names)}{count}: {group[0].site.blocked or ''}")
    return lines


def budget_of(history: Mapping[str, tuple[Assignment, ...]]) -> Budget:
    """A site's budget, from the assignments in effect, which a plan keeps."""
    given = {name: float(history[f"budget.{name}"][-1].value) for name in _BUDGET if history.get(f"budget.{name}")}
    return Budget(**given)


def budget_lines(plan: Plan) -> list[str]:
    """`budget of MERE 0.2, SQNR 24 dB, min_speedup 1.05: 3 sites` for each budget of a plan's sites."""
    known = {id(site.history): budget_of(site.history) for site in plan.sites}  # sites that are alike share a history
    found: dict[Budget, int] = {}
    for site in plan.sites:
        budget = known[id(site.history)]
        found[budget] = found.get(budget, 0) + 1
    return [
        f"budget of MERE {budget.mere:g}, SQNR {budget.sqnr_db:g} dB, min_speedup {budget.min_speedup:g}: "
        f"{count} site{'s' if count != 1 else ''}"
        for budget, count in found.items()
    ]

"""Evidence of a profile for one site, judged against the site's budget, for `loka explain`."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.enums import OPERANDS, Gemm
from loka.plan.evidence import NEVER_RAN, ProfiledSites, evidence_of, ran
from loka.plan.format import format_operands, format_speedup
from loka.plan.plan import Plan, SitePlan
from loka.policy.settings import Assignment, Budget
from loka.probe.profile.profile import (
    Estimate,
    Finding,
    Interval,
    NeEstimate,
    OperandSummary,
    Profile,
    SiteProfile,
    Verdict,
)

NOT_JUDGED = "not judged: no measurement decides here, nor does min_speedup"


@dataclass(frozen=True, slots=True)
class Tried:
    """One recipe of the profile for one GEMM. `runs` marks the one in the plan."""

    gemm: Gemm
    recipe: str
    mere: Interval
    sqnr_db: Interval
    draws: int
    verdict: Verdict
    figures: str  # those over or near the budget
    runs: bool
    ne: NeEstimate | None = None


@dataclass(frozen=True, slots=True)
class ProfileView:
    """The evidence of one site."""

    profile: str
    created: str
    steps: int
    samples: int
    note: str  # why there is no evidence, or ""
    speed: str
    budget: Budget
    operands: tuple[OperandSummary, ...]
    recipes: tuple[Tried, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[Gemm, ...] = ()  # without an estimate although its operands were recorded: kept, or never finite


def profile_view(
    known: ProfiledSites, site: str, budget: Budget, running: dict[Gemm, str], speed: str = NOT_JUDGED
) -> ProfileView:
    """Evidence of the profile for a site. `running` is the text of each GEMM's planned recipe."""
    found = known.sites.get(site)
    note = "the profile does not have this site: run loka probe" if found is None else ""
    if found is not None and not ran(found):
        note = NEVER_RAN
    profile = known.profile
    tried: list[Tried] = []
    if found is not None:
        tried = [_tried(estimate, found, budget, profile, running) for estimate in found.estimates]
    judged = {each.gemm for each in tried}
    operands = {each.operand for each in found.operands} if found is not None else set()
    return ProfileView(
        profile=known.name,
        created=profile.created,
        steps=profile.steps,
        samples=profile.samples,
        note=note,
        speed=speed,
        budget=budget,
        operands=found.operands if found is not None else (),
        recipes=tuple(sorted(tried, key=lambda each: list(Gemm).index(each.gemm))),
        findings=tuple(finding for finding in profile.findings if finding.site == site),
        unjudged=tuple(gemm for gemm in running if gemm not in judged and operands.issuperset(OPERANDS[gemm])),
    )


def _tried(estimate: Estimate, site: SiteProfile, budget: Budget, profile: Profile, running: dict[Gemm, str]) -> Tried:
    evidence = evidence_of(estimate, budget, profile, site)
    recipe = format_operands(estimate.gemm, estimate.operands)
    return Tried(
        gemm=estimate.gemm,
        recipe=recipe,
        mere=estimate.mere,
        sqnr_db=estimate.sqnr_db,
        draws=estimate.draws,
        verdict=evidence.verdict,
        figures=evidence.figures,
        runs=running.get(estimate.gemm) == recipe,
        ne=site.ne_estimate(estimate.gemm, estimate.operands),
    )


def describe_speed(plan: SitePlan, budget: Budget) -> str:
    """The measured speedup against the budget's `min_speedup`, in words."""
    if plan.timing is None:
        return NOT_JUDGED
    return f"{format_speedup(plan.timing.speedup)}, {budget.min_speedup:g} at least to be in FP8"


def budget_of(history: dict[str, tuple[Assignment, ...]]) -> Budget:
    """A site's budget, from the assignments in effect, which a plan keeps."""
    given = {name: float(history[f"budget.{name}"][-1].value) for name in _BUDGET if history.get(f"budget.{name}")}
    return Budget(**given)


def budgets(plan: Plan) -> dict[Budget, int]:
    """The budgets of a plan's sites, in the order of the sites, with the number of sites of each."""
    known: dict[int, Budget] = {}  # by identity of a history, which sites that are alike share
    found: dict[Budget, int] = {}
    for site in plan.sites:
        if id(site.history) not in known:
            known[id(site.history)] = budget_of(site.history)
        budget = known[id(site.history)]
        found[budget] = found.get(budget, 0) + 1
    return found


_BUDGET = ("mere", "sqnr_db", "min_speedup")

"""Explanation of one site: all its facts and decisions with reasons, and the evidence of a profile."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loka.errors import Code, InputError
from loka.graph.ir import GEMMS
from loka.graph.patterns.norm import BATCH_NORM
from loka.graph.sites import flow
from loka.graph.sites.op_names import BOUNDARIES
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.numerics.enums import OPERANDS, Gemm
from loka.plan.evidence import NEVER_RAN, ProfiledSites, evidence_of, ran, with_merged_sites
from loka.plan.format import format_gemm, format_operands, format_place, format_speedup
from loka.plan.mod_words import Touch, touches
from loka.plan.plan import GatherPlan, InteractionPlan, Plan, SitePlan
from loka.plan.select.interaction_times import interaction_by_site, kernel_names, place_in_interaction
from loka.plan.view.table import budget_of
from loka.policy.settings import Assignment, Budget
from loka.probe.profile.profile import Estimate, Finding, Interval, NeEstimate, OperandSummary, SiteProfile, Verdict

NOT_JUDGED = "not judged: no measurement decides here, nor does min_speedup"
_LISTED = 8  # names of sites in a message
_BATCH_NORM = (
    "kernels take an nn.BatchNorm1d right after a linear, as its only reader, on a matrix, called once, with running "
    "statistics and a momentum, and without hooks"
)
_OTHER_ACTIVATIONS = flow.ACTIVATIONS.union({"prelu"}).difference(ACTIVATIONS)  # which no kernel takes
_ACTIVATION = f"of activations kernels take {', '.join(ACTIVATIONS)}"
_DROPOUT = (
    "kernels take an nn.Dropout on a matrix of up to 16384 columns, right after a norm or an activation, without hooks"
)
_ELEMENTWISE = (
    "kernels take a sum and a product with a matrix of the same shape, made before: both right behind a linear in FP8, "
    "the product also behind a LayerNorm, an RMSNorm or an activation, up to 16384 columns"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Value of one policy field with its source and position (`file:line`; "" for built-in defaults)."""

    value: str
    source: str
    place: str
    note: str = ""  # the policy's note for the rule

    def __str__(self) -> str:
        return f"{self.source} ({self.place})" if self.place else self.source


@dataclass(frozen=True, slots=True)
class FieldHistory:
    """One field of a site's settings: the assignment in effect, and those that it overrode, the latest first."""

    path: str
    holds: Setting
    overrode: tuple[Setting, ...]


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
    ne: NeEstimate | None


@dataclass(frozen=True, slots=True)
class SiteEvidence:
    """The evidence of the profile for one site, judged against the site's budget."""

    profile: str
    created: str
    steps: int
    samples: int
    note: str  # why there is no evidence, or ""
    speed: str  # the measured speedup against the budget's `min_speedup`, in words
    budget: Budget
    operands: tuple[OperandSummary, ...]
    recipes: tuple[Tried, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[Gemm, ...]  # without an estimate although its operands were recorded: kept, or never finite


@dataclass(frozen=True, slots=True)
class Explanation:
    """Data of `loka explain`: a site of a plan, and what the rest of the plan and the profile say of it."""

    plan: Plan
    found: SitePlan
    fields: tuple[FieldHistory, ...]
    evidence: SiteEvidence | None  # None if the policy names no profile
    mods: tuple[Touch, ...]  # changes of mods at the site and next to it
    inside: InteractionPlan | None  # the interaction that it is part of
    bound_in: str  # "modules.LayersFmb0, with 3 modules alike"; "" if nothing of it is replaced
    untimed: str  # why it has no times although there are measurements
    gather: GatherPlan | None  # what the all-gather of its weight carries; None where the policy says nothing of it
    region_ends: tuple[str, ...]  # the operations at which its region ends, each with the reason

    @property
    def m(self) -> int:
        """Rows of one call at the plan's batch size."""
        return self.found.site.rows.at(self.plan.batch_size)

    @property
    def flops(self) -> int:
        """Of the site's GEMMs in one training step."""
        return self.found.site.flops_per_row * self.m * self.found.site.calls * len(self.found.gemms)

    @property
    def min_speedup(self) -> float:
        """The budget's: FP8 has to be faster by this factor."""
        return budget_of(self.found.history).min_speedup

    @property
    def measurements(self) -> str:
        """The set that decided the times."""
        return self.plan.measurements[0] if self.plan.measurements is not None else "the measurements"

    def json(self) -> dict[str, object]:
        """The facts for `--json`."""
        site, found, timing, inside = self.found.site, self.found, self.found.timing, self.inside
        same = ("kind", "owner", "weight", "bias", "where")
        more = ("k", "n", "calls", "calls_eval", "share")
        around = ("fed_by", "followed_by", "blocked")
        return {
            "site": site.name,
            **{name: getattr(site, name) for name in same},
            "rows": str(site.rows),
            "m": self.m,
            **{name: getattr(site, name) for name in more},
            "flops": self.flops,
            **{name: getattr(site, name) for name in around},
            "region": found.region,
            "region_note": found.region_note,
            "bound_in": self.bound_in,
            "gemms": [
                {
                    "gemm": gemm.gemm,
                    "runs_in": format_gemm(gemm),
                    "kernel": gemm.kernel,
                    "reason": gemm.reason,
                    "rejected": [(each.kernel, each.reason) for each in gemm.rejected],
                    "times": gemm.times,
                    "accumulation": gemm.accumulation,
                }
                for gemm in found.gemms
            ],
            "fields": self.fields,
            "evidence": self.evidence,
            "timing": None
            if timing is None
            else {
                "measurements": self.measurements,
                "chosen": timing.chosen,
                "without_fp8": timing.without_fp8,
                "as_is": timing.as_is,
                "speedup": round(timing.speedup, 4),
                "by_fp8": round(timing.by_fp8, 4),
                "min_speedup": self.min_speedup,
                "gemms": [gemm.gemm for gemm in found.gemms],
                "candidates": found.options,
            },
            "members": site.members,
            "untimed": self.untimed,
            "mods": self.mods,
            "inside": None
            if inside is None
            else {
                "what": inside.what,
                "owner": inside.owner,
                "kernels": kernel_names(inside),
                "chosen": inside.chosen,
                "as_is": inside.as_is,
            },
            "gather": self.gather,
            "region_ends": self.region_ends,
        }


def explain(plan: Plan, name: str, known: ProfiledSites | None = None) -> Explanation:
    """Collect everything that the plan has on one site, and the evidence of the profile.

    Raises InputError for an unknown name.
    """
    found = find_site(plan, name)
    site = found.site
    return Explanation(
        plan=plan,
        found=found,
        fields=_fields(plan, found),
        evidence=_evidence(known, found) if known is not None else None,
        mods=touches(plan, site.name),
        inside=interaction_by_site(plan).get(site.name),
        bound_in=_bound_in(plan, site.name),
        untimed=_untimed(plan, found),
        gather=next((each for each in plan.gathers if {*site.rule_names} & {*each.sites}), None),
        region_ends=_region_ends(found),
    )


def find_site(plan: Plan, name: str) -> SitePlan:
    """The site of that name, or the merged site that contains it; for a glob, as `loka plan` prints, the first.

    Raises InputError for an unknown name, with the closest names, or with the first where none is close.
    """
    for candidate in plan.sites:
        known = {candidate.site.name, *candidate.site.members}
        if name in known or ("*" in name and any(fnmatchcase(each, name) for each in known)):
            return candidate
    names = [candidate.site.name for candidate in plan.sites]
    inside = [other for other in names if other.startswith(name + ".") or other.endswith("." + name)]
    near = difflib.get_close_matches(name, names, n=3) if len(names) <= 2000 else []
    hints = list(dict.fromkeys([*near, *inside]))[:3]
    if not names:
        raise InputError(
            f"no site is called {name!r} in {plan.name!r}: its model has no GEMM, so that it has no sites",
            Code.NO_MATCH,
        )
    hint = (
        f"did you mean {' or '.join(repr(other) for other in hints)}?"
        if hints
        else f"{'they are' if len(names) <= _LISTED else 'there are, for example,'} "
        + ", ".join(repr(other) for other in names[:_LISTED])
    )
    raise InputError(
        f"no site is called {name!r} in {plan.name!r}; {hint} (`loka plan` lists all {len(names)})", Code.NO_MATCH
    )


def _untimed(plan: Plan, found: SitePlan) -> str:
    if plan.measurements is None or found.timing is not None:
        return ""
    inside = interaction_by_site(plan).get(found.site.name)
    if inside is not None:
        return f"it is {place_in_interaction(inside)}"
    if found.site.blocked is not None:
        return "it cannot be patched"
    return (
        f"{plan.measurements[0]} lacks its own GEMMs, or the recipe that it may run in, or what makes the operands of "
        "that: the order of the catalogue decides"
    )


def _fields(plan: Plan, found: SitePlan) -> tuple[FieldHistory, ...]:
    """All fields, those set by the policy first; a range from the profile appears as if the profile had set it."""
    history = {path: entries for path, entries in found.history.items() if entries}
    for gemm in found.gemms:
        for operand, recipe in zip(OPERANDS[gemm.gemm], gemm.operands or (), strict=False):
            path = f"{gemm.gemm.value}.{operand.value}.amax"
            entries = history.get(path, ())
            written = bool(entries) and entries[-1].line > 0
            if recipe.is_static and recipe.amax is not None and not written and plan.profile is not None:
                source = f"the largest |x| seen in {plan.profile[0]}"
                history[path] = (*entries, Assignment(path, f"{recipe.amax:g}", source, "", 0))
    notes, fields = dict(plan.rule_notes), []
    for path, entries in sorted(history.items()):
        settings = [
            Setting(each.value, each.source, format_place(each), notes.get(each.source, ""))
            for each in reversed(entries)
        ]
        fields.append(FieldHistory(path, settings[0], tuple(settings[1:])))
    return tuple(sorted(fields, key=lambda field: not field.holds.place))


def _bound_in(plan: Plan, name: str) -> str:
    for binding in plan.bindings:
        if any(name in sites for sites in binding.sites):
            others = len(binding.modules) - 1
            alike = f", with {others} module{'s' if others != 1 else ''} alike" if others else ""
            return f"modules.{binding.name}{alike}"
    return ""


def _evidence(known: ProfiledSites, found: SitePlan) -> SiteEvidence:
    known = with_merged_sites(known, [found.site])
    profile, seen = known.profile, known.sites.get(found.site.name)
    budget, timing = budget_of(found.history), found.timing
    running = {gemm.gemm: format_gemm(gemm) for gemm in found.gemms}
    note = "" if seen is not None else "the profile does not have this site: run loka probe"
    if seen is not None and not ran(seen):
        note = NEVER_RAN
    tried = [_tried(estimate, seen, known, budget, running) for estimate in seen.estimates] if seen is not None else []
    tried.sort(key=lambda each: list(Gemm).index(each.gemm))
    operands = seen.operands if seen is not None else ()
    recorded, judged = {each.operand for each in operands}, {each.gemm for each in tried}
    speed = NOT_JUDGED
    if timing is not None:
        speed = f"{format_speedup(timing.by_fp8)}, {budget.min_speedup:g} at least to be in FP8"
    return SiteEvidence(
        profile=known.name,
        created=profile.created,
        steps=profile.steps,
        samples=profile.samples,
        note=note,
        speed=speed,
        budget=budget,
        operands=operands,
        recipes=tuple(tried),
        findings=tuple(finding for finding in profile.findings if finding.site == found.site.name),
        unjudged=tuple(gemm for gemm in running if gemm not in judged and recorded.issuperset(OPERANDS[gemm])),
    )


def _tried(
    estimate: Estimate, site: SiteProfile, known: ProfiledSites, budget: Budget, running: dict[Gemm, str]
) -> Tried:
    evidence = evidence_of(estimate, budget, known.profile, site)
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


def _region_ends(found: SitePlan) -> tuple[str, ...]:
    """The BatchNorm or dropout before and after a site's region, and another operation after it, each with the reason.

    Empty where something else ends the region. What is after another linear is of that one's region, and a BatchNorm
    after this linear ends a region only where tracing found that no kernel takes it.
    """
    site = found.site
    before, after = site.boundaries or ((), ())
    traced = bool(found.region or found.region_note)
    ends = []
    for (place, op), module in zip(_boundaries(site.followed_by), after, strict=True):
        if set(site.followed_by[:place]) <= set(found.region) and op not in found.region:
            ends += [_end(op, module, "after")] if traced or op != BATCH_NORM else []
            break
    following = next((op for op in site.followed_by if op not in found.region), "")
    if following in _OTHER_ACTIVATIONS:
        ends.append(f"{following} after it: {_ACTIVATION}")
    if following in flow.ELEMENTWISE and found.fp8 and traced:
        ends.append(f"{following} after it: {_ELEMENTWISE}")
    for (place, op), module in zip(_boundaries(site.fed_by), before, strict=True):
        if not GEMMS.isdisjoint(site.fed_by[place + 1 :]):
            break
        between = " and ".join(name for name in site.fed_by[:place] if name not in found.region)
        rest = f"; {between} between them is no GEMM's, so that no kernel has it" if between else ""
        ends.append(_end(op, module, "before") + rest)
        break
    return tuple(ends)


def _boundaries(ops: Sequence[str]) -> list[tuple[int, str]]:
    """The BatchNorms and dropouts among operations, with their places."""
    return [(place, op) for place, op in enumerate(ops) if op in BOUNDARIES]


def _end(op: str, module: str, side: str) -> str:
    what, reason = ("BatchNorm", _BATCH_NORM) if op == BATCH_NORM else ("dropout", _DROPOUT)
    name = f"{what} {module!r}" if module else f"a {what} in the model's own forward"
    return f"{name} {side} it: {reason}"

"""Explanation of one site: all its facts and decisions, with reasons."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Accumulation, Gemm
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_gemm, format_place
from loka.plan.mod_words import Touch, touches
from loka.plan.plan import KernelTime, Plan, PlannedBinding, SitePlan, StepTime, TimedOption
from loka.plan.report.profile_view import ProfileView, budget_of, describe_speed, profile_view
from loka.plan.report.region_ends import region_ends
from loka.plan.select.interaction_times import interaction_by_site, kernel_names, place_in_interaction
from loka.policy.settings import Assignment

_LISTED = 8  # names of sites in a message


@dataclass(frozen=True, slots=True)
class ExplainedSetting:
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
    holds: ExplainedSetting
    overrode: tuple[ExplainedSetting, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """One GEMM of the site."""

    gemm: Gemm
    runs_in: str
    kernel: str
    reason: str
    rejected: tuple[tuple[str, str], ...]  # (kernel, reason)
    times: tuple[KernelTime, ...] = ()  # of the product alone, on every measured kernel
    accumulation: Accumulation | None = None


@dataclass(frozen=True, slots=True)
class ExplainedTiming:
    """Time of one call of the site, the measurements used, and the execution options compared."""

    measurements: str
    chosen: StepTime
    as_is: StepTime
    speedup: float
    min_speedup: float
    gemms: tuple[Gemm, ...]  # the GEMMs of the candidates' kernels
    candidates: tuple[TimedOption, ...]


@dataclass(frozen=True, slots=True)
class Inside:
    """The interaction that a site is part of. A cross layer's GEMM stays separate."""

    what: str  # "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    owner: str
    takes: bool  # the site's GEMMs are computed in it
    kernels: tuple[str, ...]  # forward and gradients
    chosen: StepTime | None  # per call
    as_is: StepTime | None  # with torch.compile


@dataclass(frozen=True, slots=True)
class Explanation:
    """Data of `loka explain`."""

    site: str
    kind: str
    owner: str
    weight: str | None
    bias: str | None
    where: str
    rows: str  # M as a function of the batch: "32B"
    m: int
    k: int
    n: int
    calls: int
    calls_eval: int
    share: float  # of the model's forward GEMM FLOPs
    flops: int  # of the site's GEMMs in one training step
    fed_by: tuple[str, ...]
    followed_by: tuple[str, ...]
    blocked: str | None
    region: tuple[str, ...]
    region_note: str
    bound_in: str  # "modules.LayersFmb0, with 3 modules alike"; "" if nothing of it is replaced
    gemms: tuple[Decision, ...]
    fields: tuple[FieldHistory, ...]
    evidence: ProfileView | None = None  # None if the policy names no profile
    timing: ExplainedTiming | None = None  # None if no measurement decided
    members: tuple[str, ...] = ()  # the sites that a mod merged into it
    untimed: str = ""  # why it has no times although there are measurements
    mods: tuple[Touch, ...] = ()  # changes of mods at the site and next to it
    inside: Inside | None = None  # the interaction that it is part of
    region_ends: tuple[str, ...] = ()  # the BatchNorm or dropout at which its region ends, with the reason


def find_site(plan: Plan, name: str) -> SitePlan:
    """The site of that name, or the merged site that contains it.

    Raises InputError for an unknown name, with the closest names, or with the first where none is close.
    """
    for candidate in plan.sites:
        if name == candidate.site.name or name in candidate.site.members:
            return candidate
    names = [candidate.site.name for candidate in plan.sites]
    inside = [other for other in names if other.startswith(name + ".") or other.endswith("." + name)]
    near = difflib.get_close_matches(name, names, n=3) if len(names) <= 2000 else []
    hints = list(dict.fromkeys([*near, *inside]))[:3]
    if not names:
        raise InputError(f"no site is called {name!r} in {plan.name!r}: its model has no GEMM, so that it has no sites")
    hint = (
        f"did you mean {' or '.join(repr(other) for other in hints)}?"
        if hints
        else f"{'they are' if len(names) <= _LISTED else 'there are, for example,'} "
        + ", ".join(repr(other) for other in names[:_LISTED])
    )
    raise InputError(f"no site is called {name!r} in {plan.name!r}; {hint} (`loka plan` lists all {len(names)})")


def explain(plan: Plan, name: str, known: ProfiledSites | None = None) -> Explanation:
    """Collect everything that the plan has on one site, and the evidence of the profile.

    Raises InputError for an unknown name.
    """
    found = find_site(plan, name)
    site = found.site
    m = site.rows.at(plan.batch_size)
    return Explanation(
        site=site.name,
        kind=site.kind.value,
        owner=site.owner,
        weight=site.weight,
        bias=site.bias,
        where=site.where,
        rows=str(site.rows),
        m=m,
        k=site.k,
        n=site.n,
        calls=site.calls,
        calls_eval=site.calls_eval,
        share=site.share,
        flops=site.flops_per_row * m * site.calls * len(found.gemms),
        fed_by=site.fed_by,
        followed_by=site.followed_by,
        blocked=site.blocked,
        region=found.region,
        region_note=found.region_note,
        bound_in=_bound_in(plan, site.name),
        gemms=tuple(
            Decision(
                gemm=gemm.gemm,
                runs_in=format_gemm(gemm),
                kernel=gemm.kernel,
                reason=gemm.reason,
                rejected=tuple((rejected.kernel, rejected.reason) for rejected in gemm.rejected),
                times=gemm.times,
                accumulation=gemm.accumulation,
            )
            for gemm in found.gemms
        ),
        fields=_fields(plan, found, dict(plan.rule_notes)),
        evidence=_profile_view(found, known) if known is not None else None,
        timing=_timing(plan, found),
        members=site.members,
        untimed=_untimed(plan, found),
        mods=touches(plan, site.name),
        inside=_inside(plan, site.name),
        region_ends=region_ends(site, found.region),
    )


def _inside(plan: Plan, name: str) -> Inside | None:
    for each in plan.interactions:
        if name in each.sites:
            kernels = kernel_names(each)
            return Inside(each.what, each.owner, name in each.takes, kernels, each.chosen, each.as_is)
    return None


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


def _timing(plan: Plan, found: SitePlan) -> ExplainedTiming | None:
    if found.timing is None:
        return None
    return ExplainedTiming(
        measurements=plan.measurements[0] if plan.measurements is not None else "the measurements",
        chosen=found.timing.chosen,
        as_is=found.timing.as_is,
        speedup=round(found.timing.speedup, 4),
        min_speedup=budget_of(found.history).min_speedup,
        gemms=tuple(gemm.gemm for gemm in found.gemms),
        candidates=found.options,
    )


def _profile_view(found: SitePlan, known: ProfiledSites) -> ProfileView:
    running = {gemm.gemm: format_gemm(gemm) for gemm in found.gemms}
    budget = budget_of(found.history)
    return profile_view(known, found.site.name, budget, running, describe_speed(found, budget))


def _fields(plan: Plan, found: SitePlan, notes: Mapping[str, str]) -> tuple[FieldHistory, ...]:
    """All fields, those set by the policy first; a range from the profile appears as if the profile had set it."""
    history = {path: entries for path, entries in found.history.items() if entries}
    history |= {path: (*history.get(path, ()), given) for path, given in _given_ranges(plan, found)}
    fields = [_field(path, entries, notes) for path, entries in sorted(history.items())]
    return tuple(sorted(fields, key=lambda field: not field.holds.place))


def _given_ranges(plan: Plan, found: SitePlan) -> list[tuple[str, Assignment]]:
    """The static ranges of a site that no rule gave, each as an assignment by the profile."""
    given = []
    for gemm in found.gemms:
        for operand, recipe in zip(OPERANDS[gemm.gemm], gemm.operands or (), strict=False):
            path = f"{gemm.gemm.value}.{operand.value}.amax"
            entries = found.history.get(path)
            written = bool(entries) and entries is not None and entries[-1].line > 0
            if recipe.is_static and recipe.amax is not None and not written and plan.profile is not None:
                source = f"the largest |x| seen in {plan.profile[0]}"
                given.append((path, Assignment(path, f"{recipe.amax:g}", source, "", 0)))
    return given


def _field(path: str, assignments: tuple[Assignment, ...], notes: Mapping[str, str]) -> FieldHistory:
    settings = tuple(
        ExplainedSetting(entry.value, entry.source, format_place(entry), notes.get(entry.source, ""))
        for entry in reversed(assignments)
    )
    return FieldHistory(path, settings[0], settings[1:])


def _bound_in(plan: Plan, name: str) -> str:
    for binding in plan.bindings:
        if any(name in sites for sites in binding.sites):
            return f"modules.{binding.name}{_alike(binding)}"
    return ""


def _alike(binding: PlannedBinding) -> str:
    others = len(binding.modules) - 1
    return f", with {others} module{'s' if others != 1 else ''} alike" if others else ""

"""Differences between two plans."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.enums import Gemm
from loka.plan.format import format_decision, format_evidence
from loka.plan.mod_words import describe_changes
from loka.plan.plan import Evidence, Plan, SitePlan, StepTime
from loka.plan.report.plan_rows import NOT_KNOWN, group_interactions
from loka.plan.totals import format_summed, total_time


@dataclass(frozen=True, slots=True)
class GemmChange:
    """One GEMM that runs differently in the second plan. `-` stands for a GEMM that does not exist."""

    site: str
    gemm: Gemm
    before: str
    after: str
    share: float  # of the model's forward FLOPs, in the second plan
    evidence: str = ""  # if it changed too: "undecided: ... -> safe: ..."


@dataclass(frozen=True, slots=True)
class RegionChange:
    """A site whose replaced region differs; an empty tuple if only the site itself is replaced."""

    site: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimeChange:
    """A site whose time differs, in microseconds of one call; None where a plan has none."""

    site: str
    before: float | None
    after: float | None
    source: tuple[str, str]  # measured, interpolated or estimated; "" if a plan has none


@dataclass(frozen=True, slots=True)
class InteractionChange:
    """Interactions that differ between the plans; those with equal owners except for numbers share a row."""

    what: str  # "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    owner: str  # "layers.*"
    count: tuple[int, int]  # number of them, before and after
    us: tuple[str, str]  # of one in a training step; "-" if unknown


@dataclass(frozen=True, slots=True)
class ModChange:
    """A mod with different changes in the second plan; "-" stands for a mod that a plan does not have."""

    mod: str  # "block_norm"
    before: str  # "8 LayerNorm -> BlockNorm 256"
    after: str
    added: tuple[str, ...]  # modules that it changes, or sites whose owner it rewrites, only in the second plan
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The difference between two plans, in the order of the second one."""

    added: tuple[str, ...]  # sites only in the second plan
    removed: tuple[str, ...]
    resized: tuple[str, ...]  # sites whose M, K or N differ
    gemms: tuple[GemmChange, ...]
    regions: tuple[RegionChange, ...]
    target: tuple[str, str]
    batch_size: tuple[int, int]
    share_fp8: tuple[float, float]  # of the training GEMM FLOPs, before and after
    times: tuple[TimeChange, ...] = ()
    total_us: tuple[float | None, float | None] = (None, None)  # of everything timed in a training step
    counted: tuple[str, str] = ("", "")  # what was timed: "GEMMs with their norms and interactions"
    measurements: tuple[str, str] = ("", "")  # names of the sets, with the start of their hashes
    mods: tuple[ModChange, ...] = ()
    interactions: tuple[InteractionChange, ...] = ()

    @property
    def same(self) -> bool:
        """True if both plans make the same decisions, whatever their times."""
        lists = (self.mods, self.added, self.removed, self.resized, self.gemms, self.regions)
        if any(each.count[0] != each.count[1] for each in self.interactions):
            return False
        return not any(lists) and self.target[0] == self.target[1] and self.batch_size[0] == self.batch_size[1]


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans site by site; sites are matched by name."""
    old = {plan.site.name: plan for plan in before.sites}
    new = {plan.site.name: plan for plan in after.sites}
    both = [(old[name], plan) for name, plan in new.items() if name in old]
    return PlanDiff(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        resized=tuple(b.site.name for a, b in both if _sizes(a, before) != _sizes(b, after)),
        gemms=tuple(change for a, b in both for change in _gemm_changes(a, b)),
        regions=tuple(RegionChange(b.site.name, a.region, b.region) for a, b in both if a.region != b.region),
        target=(before.target.value, after.target.value),
        batch_size=(before.batch_size, after.batch_size),
        share_fp8=(before.share_fp8, after.share_fp8),
        times=tuple(change for a, b in both if (change := _time_change(a, b)) is not None),
        total_us=(_total(before), _total(after)),
        measurements=(_measurements(before), _measurements(after)),
        mods=_mod_changes(before, after),
        counted=(_counted(before), _counted(after)),
        interactions=_interaction_changes(before, after),
    )


def _counted(plan: Plan) -> str:
    total = total_time(plan)
    return format_summed(total) if total is not None else ""


def _interaction_changes(before: Plan, after: Plan) -> tuple[InteractionChange, ...]:
    was, now = ({(row.what, row.owner): row for row in group_interactions(plan)} for plan in (before, after))
    changes = []
    for what, owner in dict.fromkeys((*now, *was)):
        rows = (was.get((what, owner)), now.get((what, owner)))
        count = tuple(row.count if row is not None else 0 for row in rows)
        us = tuple(row.us if row is not None else NOT_KNOWN for row in rows)
        if count[0] != count[1] or us[0] != us[1]:
            changes.append(InteractionChange(what, owner, (count[0], count[1]), (us[0], us[1])))
    return tuple(changes)


def _mod_changes(before: Plan, after: Plan) -> tuple[ModChange, ...]:
    """Changes of each mod; entries of one mod are combined."""
    uses = dict.fromkeys(mod.use for mod in (*after.mods, *before.mods))
    changes = []
    for use in uses:
        (was, old), (now, new) = _mod(before, use), _mod(after, use)
        if (was, old) != (now, new):
            added = tuple(name for name in new if name not in old)
            changes.append(ModChange(use, was, now, added, tuple(name for name in old if name not in new)))
    return tuple(changes)


def _mod(plan: Plan, use: str) -> tuple[str, tuple[str, ...]]:
    """Changes of a mod's entries in words, and the modules and sites."""
    mods = [mod for mod in plan.mods if mod.use == use]
    names = [name for mod in mods for adaptation in mod.adaptations for name in adaptation.modules]
    names += [name for mod in mods for made in mod.rewritten for name in made.sites]
    return "; ".join(map(describe_changes, mods)) or "-", tuple(names)


def _time_change(before: SitePlan, after: SitePlan) -> TimeChange | None:
    was, now = (plan.timing.chosen if plan.timing is not None else None for plan in (before, after))
    if was == now:
        return None
    return TimeChange(after.site.name, _us(was), _us(now), (_source(was), _source(now)))


def _us(time: StepTime | None) -> float | None:
    return round(time.us, 3) if time is not None else None


def _source(time: StepTime | None) -> str:
    return time.source.value if time is not None else ""


def _total(plan: Plan) -> float | None:
    total = total_time(plan)
    return total.us if total is not None else None


def _measurements(plan: Plan) -> str:
    return f"{plan.measurements[0]} ({plan.measurements[1][:8]})" if plan.measurements is not None else ""


def _sizes(plan: SitePlan, whole: Plan) -> tuple[int, int, int, int]:
    site = plan.site
    return site.rows.at(whole.batch_size), site.k, site.n, site.calls


def _gemm_changes(before: SitePlan, after: SitePlan) -> list[GemmChange]:
    changes = []
    for gemm in Gemm:
        was, now = format_decision(before, gemm), format_decision(after, gemm)
        if was == now:
            was, now = _kernel(before, gemm, was), _kernel(after, gemm, now)
        if was != now:
            changes.append(GemmChange(after.site.name, gemm, was, now, after.site.share, _because(before, after, gemm)))
    return changes


def _because(before: SitePlan, after: SitePlan, gemm: Gemm) -> str:
    """Change of the evidence for a GEMM; "" if it did not change."""
    was, now = (_evidence_of(plan, gemm) for plan in (before, after))
    return f"{format_evidence(was)} -> {format_evidence(now)}" if was != now else ""


def _evidence_of(plan: SitePlan, gemm: Gemm) -> Evidence | None:
    return next((decision.evidence for decision in plan.gemms if decision.gemm is gemm), None)


def _kernel(plan: SitePlan, gemm: Gemm, words: str) -> str:
    """The recipe with kernel and accumulation, for GEMMs whose short text is the same in both plans."""
    for decision in plan.gemms:
        if decision.gemm is gemm and decision.accumulation is not None:
            return f"{words} by {decision.kernel}, {decision.accumulation.value} accumulation"
    return words

"""Differences between two plans."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.enums import Gemm
from loka.plan.communication import exchange_words
from loka.plan.format import format_decision, format_evidence
from loka.plan.mod_words import describe_changes
from loka.plan.plan import Plan, SitePlan
from loka.plan.totals import format_summed, total_time
from loka.plan.view.table import INTERACTIONS, NOTHING, interaction_rows


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
class GatherChange:
    """A site whose weight's all-gather carries something else; "-" where a plan says nothing of it."""

    site: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The difference between two plans, in the order of the second one. Pairs are before and after."""

    added: tuple[str, ...]  # sites only in the second plan
    removed: tuple[str, ...]
    resized: tuple[str, ...]  # sites whose M, K or N differ
    gemms: tuple[GemmChange, ...]
    regions: tuple[RegionChange, ...]
    target: tuple[str, str]
    batch_size: tuple[int, int]
    share_fp8: tuple[float, float]  # of the training GEMM FLOPs
    times: tuple[TimeChange, ...]
    total_us: tuple[float | None, float | None]  # of everything timed in a training step
    counted: tuple[str, str]  # what was timed: "GEMMs with their norms and interactions"
    measurements: tuple[str, str]  # names of the sets, with the start of their hashes
    mods: tuple[ModChange, ...]
    interactions: tuple[InteractionChange, ...]
    gathers: tuple[GatherChange, ...]
    exchange: tuple[str, str]  # what TorchRec's ranks send each other; "-" where a plan says nothing of it

    @property
    def same(self) -> bool:
        """True if both plans make the same decisions, whatever their times."""
        lists = (self.mods, self.gathers, self.added, self.removed, self.resized, self.gemms, self.regions)
        if any(each.count[0] != each.count[1] for each in self.interactions):
            return False
        pairs = (self.target, self.batch_size, self.exchange)
        return not any(lists) and all(before == after for before, after in pairs)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans site by site; sites are matched by name."""
    old = {plan.site.name: plan for plan in before.sites}
    new = {plan.site.name: plan for plan in after.sites}
    both = [(old[name], plan) for name, plan in new.items() if name in old]
    was, now = total_time(before), total_time(after)
    return PlanDiff(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        resized=tuple(b.site.name for a, b in both if _sizes(a, before) != _sizes(b, after)),
        gemms=tuple(change for a, b in both for change in _gemm_changes(a, b)),
        regions=tuple(RegionChange(b.site.name, a.region, b.region) for a, b in both if a.region != b.region),
        target=(before.target, after.target),
        batch_size=(before.batch_size, after.batch_size),
        share_fp8=(before.share_fp8, after.share_fp8),
        times=tuple(change for a, b in both if (change := _time_change(a, b)) is not None),
        total_us=(was.us if was else None, now.us if now else None),
        counted=(format_summed(was) if was else "", format_summed(now) if now else ""),
        measurements=(_measurements(before), _measurements(after)),
        mods=_mod_changes(before, after),
        interactions=_interaction_changes(before, after),
        gathers=_gather_changes(before, after),
        exchange=(exchange_words(before.exchange), exchange_words(after.exchange)),
    )


def _gather_changes(before: Plan, after: Plan) -> tuple[GatherChange, ...]:
    old, new = ({site: each.wire.value for each in plan.gathers for site in each.sites} for plan in (before, after))
    pairs = ((site, old.get(site, NOTHING), new.get(site, NOTHING)) for site in {**new, **old})
    return tuple(GatherChange(*each) for each in pairs if each[1] != each[2])


def _interaction_changes(before: Plan, after: Plan) -> tuple[InteractionChange, ...]:
    count, us = INTERACTIONS.index("count"), INTERACTIONS.index("us")
    was, now = (
        {(row[0], row[1]): (int(row[count]), row[us]) for row in interaction_rows(plan)} for plan in (before, after)
    )
    changes = []
    for what, owner in dict.fromkeys((*now, *was)):
        (first, first_us), (second, second_us) = (rows.get((what, owner), (0, NOTHING)) for rows in (was, now))
        if (first, first_us) != (second, second_us):
            changes.append(InteractionChange(what, owner, (first, second), (first_us, second_us)))
    return tuple(changes)


def _mod_changes(before: Plan, after: Plan) -> tuple[ModChange, ...]:
    """Changes of each mod; entries of one mod are combined."""
    changes = []
    for use in dict.fromkeys(mod.use for mod in (*after.mods, *before.mods)):
        (was, old), (now, new) = _mod(before, use), _mod(after, use)
        if (was, old) != (now, new):
            added = tuple(name for name in new if name not in old)
            changes.append(ModChange(use, was, now, added, tuple(name for name in old if name not in new)))
    return tuple(changes)


def _mod(plan: Plan, use: str) -> tuple[str, list[str]]:
    """Changes of a mod's entries in words, and the modules and sites."""
    mods = [mod for mod in plan.mods if mod.use == use]
    names = [name for mod in mods for adaptation in mod.adaptations for name in adaptation.modules]
    names += [name for mod in mods for made in mod.rewritten for name in made.sites]
    return "; ".join(map(describe_changes, mods)) or NOTHING, names


def _time_change(before: SitePlan, after: SitePlan) -> TimeChange | None:
    was, now = (plan.timing.chosen if plan.timing is not None else None for plan in (before, after))
    if was == now:
        return None
    (first, was_from), (second, now_from) = (
        (round(each.us, 3), each.source.value) if each is not None else (None, "") for each in (was, now)
    )
    return TimeChange(after.site.name, first, second, (was_from, now_from))


def _measurements(plan: Plan) -> str:
    return f"{plan.measurements[0]} ({plan.measurements[1][:8]})" if plan.measurements is not None else ""


def _sizes(plan: SitePlan, whole: Plan) -> tuple[int, int, int, int]:
    site = plan.site
    return site.rows.at(whole.batch_size), site.k, site.n, site.calls


def _gemm_changes(before: SitePlan, after: SitePlan) -> list[GemmChange]:
    changes = []
    old, new = ({each.gemm: each for each in plan.gemms} for plan in (before, after))
    for gemm in Gemm:
        was, now = format_decision(before, gemm), format_decision(after, gemm)
        if was == now:  # the short text leaves accumulation out
            was, now = (
                f"{words} by {each.kernel}, {each.accumulation.value} accumulation"
                if (each := plan.get(gemm)) is not None and each.accumulation is not None
                else words
                for words, plan in ((was, old), (now, new))
            )
        if was != now:
            seen = [each.evidence if (each := plan.get(gemm)) is not None else None for plan in (old, new)]
            because = " -> ".join(map(format_evidence, seen)) if seen[0] != seen[1] else ""
            changes.append(GemmChange(after.site.name, gemm, was, now, after.site.share, because))
    return changes

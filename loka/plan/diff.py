"""What changed between two plans."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.names import Gemm
from loka.plan.plan import Evidence, Plan, SitePlan
from loka.plan.words import decision_words, evidence_words


@dataclass(frozen=True, slots=True)
class GemmChange:
    """One GEMM that runs differently in the second plan. `-` stands for a GEMM that does not exist."""

    site: str
    gemm: Gemm
    before: str
    after: str
    share: float  # of the model's forward FLOPs, in the second plan
    evidence: str = ""  # where it changed too: "undecided: ... -> safe: ..."


@dataclass(frozen=True, slots=True)
class RegionChange:
    """A site whose replaced region differs; an empty tuple where only the site itself is replaced."""

    site: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The difference between two plans, in the order of the second one."""

    added: tuple[str, ...]  # sites that only the second plan has
    removed: tuple[str, ...]
    resized: tuple[str, ...]  # sites whose M, K or N differ
    gemms: tuple[GemmChange, ...]
    regions: tuple[RegionChange, ...]
    target: tuple[str, str]
    batch_size: tuple[int, int]
    share_fp8: tuple[float, float]  # of the training GEMM FLOPs, before and after

    @property
    def same(self) -> bool:
        """Whether both plans decide the same."""
        lists = (self.added, self.removed, self.resized, self.gemms, self.regions)
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
    )


def _sizes(plan: SitePlan, whole: Plan) -> tuple[int, int, int, int]:
    site = plan.site
    return site.rows.at(whole.batch_size), site.k, site.n, site.calls


def _gemm_changes(before: SitePlan, after: SitePlan) -> list[GemmChange]:
    changes = []
    for gemm in Gemm:
        was, now = decision_words(before, gemm), decision_words(after, gemm)
        if was == now:
            was, now = _kernel(before, gemm, was), _kernel(after, gemm, now)
        if was != now:
            changes.append(GemmChange(after.site.name, gemm, was, now, after.site.share, _because(before, after, gemm)))
    return changes


def _because(before: SitePlan, after: SitePlan, gemm: Gemm) -> str:
    """How the evidence for a GEMM changed, "" where it did not."""
    was, now = (_evidence_of(plan, gemm) for plan in (before, after))
    return f"{evidence_words(was)} -> {evidence_words(now)}" if was != now else ""


def _evidence_of(plan: SitePlan, gemm: Gemm) -> Evidence | None:
    return next((decision.evidence for decision in plan.gemms if decision.gemm is gemm), None)


def _kernel(plan: SitePlan, gemm: Gemm, words: str) -> str:
    """The recipe with what the short words leave out, for GEMMs whose operands are the same."""
    for decision in plan.gemms:
        if decision.gemm is gemm and decision.accumulation is not None:
            return f"{words} by {decision.kernel}, {decision.accumulation.value} accumulation"
    return words

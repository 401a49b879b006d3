"""Resolves a policy's settings: one decision for every GEMM of every site, each with its reason.

A pure function of settings, sites and the results of tracing, without access to a model or a device. Policy and
evidence decide which GEMMs may run in FP8 (decide); measurements, if there are any, then decide which do
(decide_by_time).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka.devices.targets import spec_of
from loka.errors import Code, InputError
from loka.graph.sites.site import Site
from loka.kernels.gemm.catalogue import kernel_named
from loka.numerics.enums import OPERANDS, Compute, Fuse, Gemm
from loka.numerics.scalings import PROBED
from loka.plan.decide import Decider, Situation, pinned_reason
from loka.plan.decide_by_time import ByTime, SiteDraft
from loka.plan.ne import sites_over_ne
from loka.plan.plan import GemmPlan, SitePlan
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.workload import TracedNeighbours
from loka.policy.settings import ANY_KERNEL, Assignment, SiteSettings


class ImpossibleRuleError(InputError):
    """Rules that each name one site and request something impossible for it: a line for each in the message."""


def resolve(
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    situation: Situation,
    refused: Mapping[str, str],
    traced: TracedNeighbours | None = None,
) -> tuple[SitePlan, ...]:
    """Decide every GEMM of every site; `settings[i]` belongs to `sites[i]`.

    `refused` has the reason for each site whose owner's forward cannot be rewritten: such a site is kept. A GEMM that a
    broad rule or the defaults request in FP8, but that cannot run in FP8, is kept with the reason. `traced` has the
    sites that are neighbours in a chain; without it, each site is timed as if it could be fused with its neighbours.

    Raises ImpossibleRuleError where a rule that names exactly one site requests FP8 and it cannot run so.
    """
    kept: frozenset[str] = frozenset()
    while True:
        plans = _resolved(sites, settings, situation, refused, traced, kept)
        if situation.ne_budget is None:
            return plans
        more = sites_over_ne(plans, settings, situation.ne_budget)
        if not more:
            return plans
        kept |= more  # their neighbours in chains decide anew


def _resolved(
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    situation: Situation,
    refused: Mapping[str, str],
    traced: TracedNeighbours | None,
    over_ne: frozenset[str],
) -> tuple[SitePlan, ...]:
    """As `resolve`, with what `compute: auto` leaves open kept at the sites `over_ne`."""
    costs = situation.costs
    mode = situation.execution.mode if situation.execution is not None else None
    perf_model = PerfModel(costs, spec_of(situation.target), mode) if costs is not None else None
    decider = Decider(situation, perf_model, over_ne)
    never = [problem for wanted in settings for problem in _never_planned(wanted, situation)]
    if never:
        raise ImpossibleRuleError("\n".join(dict.fromkeys(never)), Code.IMPOSSIBLE)
    ways = [_drafts(sites, way, situation, refused, decider, over_ne) for way in _ways(settings)]
    decided = ByTime(situation, decider, perf_model).decide(ways, traced or TracedNeighbours())
    problems = [problem for draft in decided for problem in _problems(draft, situation)]
    if problems:
        raise ImpossibleRuleError("\n".join(dict.fromkeys(problems)), Code.IMPOSSIBLE)
    return tuple(
        SitePlan(
            draft.site,
            draft.gemms,
            draft.wanted.history,
            timing=draft.timing,
            gains_by_fusing=draft.fused and draft.wanted.fuse is Fuse.AUTO,
        )
        for draft in decided
    )


def _ways(settings: Sequence[SiteSettings]) -> list[Sequence[SiteSettings]]:
    """The settings with the recipes of the rules; with the first of those that are left open, the second, and so on."""
    most = max((len(wanted.alternatives) for wanted in settings), default=0)
    return [
        settings,
        *([(wanted, *wanted.alternatives)[way % (len(wanted.alternatives) + 1)] for wanted in settings]
          for way in range(1, most + 1)),
    ]  # fmt: skip


def _drafts(
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    situation: Situation,
    refused: Mapping[str, str],
    decider: Decider,
    over_ne: frozenset[str],
) -> list[SiteDraft]:
    """The sites as decided by policy and evidence; those that are alike share their decisions."""
    decided: dict[tuple[object, ...], tuple[GemmPlan, ...]] = {}
    seen = situation.known.sites if situation.known is not None else {}
    drafts = []
    for site, wanted in zip(sites, settings, strict=True):
        obstacle = site.blocked or refused.get(site.name)
        evidence = (id(seen.get(site.name)), site.name in over_ne)
        key = (id(wanted), site.rows, site.k, site.n, site.gemms, site.blocked, obstacle, *evidence)
        gemms = decided.get(key)
        if gemms is None:
            gemms = decider.decide(site, wanted, obstacle)
            decided[key] = gemms
        drafts.append(SiteDraft(site, wanted, obstacle, gemms))
    return drafts


def _problems(draft: SiteDraft, situation: Situation) -> list[str]:
    """A message for GEMMs that are kept for one reason although a rule for this one site requests a kernel, or FP8."""
    refused: dict[tuple[str, str], list[str]] = {}  # the GEMMs by what is said before and behind them
    for plan in draft.gemms:
        requested = draft.wanted.gemms[plan.gemm]
        if plan.fp8 or requested.compute is Compute.KEEP:
            continue
        by = _kernel_set_by(draft.wanted, plan.gemm)
        if (
            by is not None
            and by.names_one_site
            and plan.reason == pinned_reason(draft.site, plan.gemm, requested, situation)
        ):
            start = f"{_place(by, situation)}: {by.source} wants"
            rest = f"on {requested.kernel}, which cannot be: {plan.reason}; write another kernel there, or leave it out"
            refused.setdefault((start, rest), []).append(plan.gemm.value)
            continue
        by = draft.wanted.compute_set_by(plan.gemm)
        if by is not None and by.names_one_site and requested.compute is Compute.FP8:
            start = f"{_place(by, situation)}: {by.source} asks for"
            rest = f"in FP8, which cannot be: {plan.reason}; write `compute: keep` there, or leave the rule out"
            refused.setdefault((start, rest), []).append(plan.gemm.value)
    return [f"{start} {', '.join(gemms)} of {draft.site.name!r} {rest}" for (start, rest), gemms in refused.items()]


def _never_planned(wanted: SiteSettings, situation: Situation) -> list[str]:
    """A message for each kernel name in a rule that does not exist, and each scaling that the Probe alone knows."""
    problems = []
    for gemm, requested in wanted.gemms.items():
        probed = [each.scaling for each in requested.operands if each.scaling in PROBED]
        if probed and requested.compute is not Compute.KEEP:
            asks = wanted.history[f"{gemm.value}.{OPERANDS[gemm][0].value}.scaling"][-1]
            problems.append(
                f"{_place(asks, situation)}: {asks.source} asks for {gemm.value} in {probed[0].value}, which "
                "loka probe alone simulates: write another scaling to plan"
            )
        try:
            if requested.kernel != ANY_KERNEL:
                kernel_named(requested.kernel)
        except InputError as error:
            by = _kernel_set_by(wanted, gemm)
            problems.append(f"{_place(by, situation)}: {error}" if by is not None else str(error))
    return problems


def _kernel_set_by(wanted: SiteSettings, gemm: Gemm) -> Assignment | None:
    history = wanted.history.get(f"{gemm.value}.kernel")
    return history[-1] if history else None


def _place(by: Assignment, situation: Situation) -> str:
    return f"{situation.files.get(by.file, by.file)}:{by.line}"

"""Revises by measured times what policy and evidence have decided: sites that are neighbours in a chain together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from loka.devices.targets import spec_of
from loka.graph.sites.site import Site
from loka.numerics.enums import Compute, Fuse
from loka.plan.decide import Decider, Situation
from loka.plan.evidence import waits_for_evidence
from loka.plan.plan import GemmPlan, SiteTiming, StepTime
from loka.plan.select.enumerate import SiteOptions, enumerate_options
from loka.plan.select.perf_model import HostModel, PerfModel
from loka.plan.select.select import SelectionProblem, TimedDecision, problem_of, revise, select
from loka.plan.select.workload import Surroundings, TracedNeighbours, surroundings_of
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Verdict

HOST_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the host's time in what is minimised for a site


@dataclass(frozen=True, slots=True)
class SiteDraft:
    """A site as decided by policy and evidence, and then by its times."""

    site: Site
    wanted: SiteSettings
    obstacle: str | None
    gemms: tuple[GemmPlan, ...]
    timing: SiteTiming | None = None  # None where measurements are missing
    fused: bool = False  # by its times, with its neighbours

    @property
    def chosen(self) -> StepTime | None:
        """The time of one call as decided."""
        return self.timing.chosen if self.timing is not None else None


class ByTime:
    """Decides the sites of one plan by their times; results that sites share are computed once.

    Without `perf_model` there are no times, and nothing is decided.
    """

    def __init__(self, situation: Situation, decider: Decider, perf_model: PerfModel | None) -> None:
        self._situation = situation
        self._decider = decider
        self._perf_model = perf_model
        execution = situation.execution
        device = spec_of(situation.target)
        self._host = HostModel(device.host, execution.mode) if execution is not None else None
        self._enumerated: dict[tuple[object, ...], SiteOptions | None] = {}
        self._around: dict[tuple[object, ...], Surroundings] = {}
        self._after_fused: frozenset[str] = frozenset()

    def decide(self, ways: Sequence[Sequence[SiteDraft]], traced: TracedNeighbours) -> list[SiteDraft]:
        """Each site as its measurements decide it.

        `ways` are all sites with one recipe each, then with other recipes. Sites that are neighbours in a chain take
        theirs from one way: the one that leaves the least of what is forced undone or over budget, then the fastest,
        then the first. Where the host is considered, what is minimised is the longer of its time and the GPU's in the
        whole step. Both are sums over sites, so each share of the one in the other (`HOST_WEIGHTS`) gives a candidate.
        """
        self._after_fused = _after_fused([draft.site for draft in ways[0]], traced)
        problems = [[self._problem(draft, traced) for draft in drafts] for drafts in ways]
        weights = HOST_WEIGHTS if self._host is not None else HOST_WEIGHTS[:1]
        selections = []
        for weight in weights:
            found = [_selected(*each, traced, weight) for each in zip(ways, problems, strict=True)]
            selections.append(_best_of(found, traced, weight))
        return min(selections, key=self._step_us)

    def _step_us(self, drafts: Sequence[SiteDraft]) -> float:
        """The longer of the GPU's and the host's time in a step, microseconds; 0 where the host is not considered."""
        execution = self._situation.execution
        if execution is None:
            return 0.0
        times = [(draft.site.calls, draft.chosen) for draft in drafts if draft.chosen is not None]
        gpu_us = sum(calls * time.us for calls, time in times)
        host_us = sum(calls * (time.host_us or 0.0) for calls, time in times)
        return max(1e3 * execution.gpu_ms + gpu_us, 1e3 * execution.host_ms + host_us)

    def _problem(self, draft: SiteDraft, traced: TracedNeighbours) -> SelectionProblem | None:
        if draft.obstacle is not None:
            return None
        return problem_of(self._options_of(draft, traced), draft.gemms, draft.wanted)

    def _options_of(self, draft: SiteDraft, traced: TracedNeighbours) -> SiteOptions | None:
        site, wanted = draft.site, draft.wanted
        if self._perf_model is None:
            return None
        key: tuple[object, ...] = (site.fed_by, site.followed_by)
        if key not in self._around:
            self._around[key] = surroundings_of(site)
        around = self._around[key]
        if site.name in traced.around:
            around = around.in_chain(traced.around[site.name])
        elif site.name in self._after_fused:
            around = replace(around, made_before=True)
        fuse = Fuse.NEVER if site.name in traced.alone else wanted.fuse
        native = Fuse.NEVER if waits_for_evidence(draft.gemms) else fuse
        key = (id(wanted), site.rows, site.k, site.n, site.gemms, around, fuse, native)
        if key not in self._enumerated:
            self._enumerated[key] = enumerate_options(
                self._situation.sizes_of(site),
                site.gemms,
                self._decider.offers(site, wanted, draft.gemms),
                around,
                fuse,
                self._perf_model,
                self._host,
                native,
            )
        return self._enumerated[key]


def _after_fused(sites: Sequence[Site], traced: TracedNeighbours) -> frozenset[str]:
    """The sites that no kernel takes along, and whose norm or activation before ends the chain of the site before."""
    found = set()
    for previous, site in pairwise(sites):
        chained = traced.around.get(previous.name)
        if chained is not None and site.name in traced.alone and chained.last and site.k == previous.n:
            before = surroundings_of(site).before
            if before and before == chained.after:
                found.add(site.name)
    return frozenset(found)


def _selected(
    drafts: Sequence[SiteDraft],
    problems: Sequence[SelectionProblem | None],
    traced: TracedNeighbours,
    host_weight: float,
) -> list[SiteDraft]:
    """The drafts as their times decide; chains that are alike are decided once."""
    found = list(drafts)
    known: dict[tuple[object, ...], tuple[TimedDecision, ...]] = {}
    for run in _runs(drafts, problems, traced):
        chain = [(drafts[place].gemms, problem) for place, problem in run]
        key = tuple((id(gemms), id(problem.site_options)) for gemms, problem in chain)
        if key not in known:
            chosen = select([problem for _, problem in chain], host_weight)
            known[key] = tuple(
                revise(problem, gemms, option) for (gemms, problem), option in zip(chain, chosen, strict=True)
            )
        for (place, _), timed in zip(run, known[key], strict=True):
            found[place] = replace(drafts[place], gemms=timed.gemms, timing=timed.timing, fused=timed.fused)
    return found


def _best_of(ways: Sequence[Sequence[SiteDraft]], traced: TracedNeighbours, host_weight: float) -> list[SiteDraft]:
    """Of each chain, and of each site outside of them, the drafts of the best way."""
    drafts = list(ways[0])
    if len(ways) > 1:
        for chain in _together(drafts, traced):
            losses = [_loss([way[place] for place in chain], host_weight) for way in ways]
            best = losses.index(min(losses))
            for place in chain:
                drafts[place] = ways[best][place]
                if drafts[place].timing is not None:
                    times = {way[place].wanted.recipe: us for way, (*_, us) in zip(ways, losses, strict=True)}
                    drafts[place] = _explained(drafts[place], times)
    return drafts


def _explained(draft: SiteDraft, times: Mapping[str, float]) -> SiteDraft:
    """A draft whose history says which recipe `scaling: auto` took, and the microseconds of its chain in each."""
    history, recipe = draft.wanted.history, draft.wanted.recipe
    if len(times) < 2:
        return draft
    by = history["scaling"][-1]
    compared = ", ".join(f"{label}: {us:.1f} us" for label, us in times.items())
    chosen = replace(by, value=recipe, source=f"{by.source}, by the time of its chain: {compared}")
    return replace(draft, wanted=replace(draft.wanted, history={**history, "scaling": (*history["scaling"], chosen)}))


def _loss(chain: Sequence[SiteDraft], host_weight: float) -> tuple[int, int, int, float]:
    """What to compare ways by: forced GEMMs that are kept, forced ones over budget, sites without times, and the time;
    less is better. Without measurements, the GEMMs that stay as they are stand for the time.
    """
    kept = over = untimed = 0
    us = 0.0
    for draft in chain:
        forced = [plan for plan in draft.gemms if draft.wanted.gemms[plan.gemm].compute is Compute.FP8]
        kept += sum(not plan.fp8 for plan in forced)
        over += sum(plan.evidence is not None and plan.evidence.verdict is Verdict.UNSAFE for plan in forced)
        if draft.chosen is not None:
            host_us = draft.chosen.host_us or 0.0
            us += draft.site.calls * ((1 - host_weight) * draft.chosen.us + host_weight * host_us)
        else:
            untimed += 1
            us += sum(not plan.fp8 for plan in draft.gemms)
    return kept, over, untimed, us


def _together(drafts: Sequence[SiteDraft], traced: TracedNeighbours) -> Iterator[list[int]]:
    """The sites that are neighbours in a chain, by index, and every other site separately."""
    places = {draft.site.name: place for place, draft in enumerate(drafts)}
    in_chains = {name for chain in traced.chains for name in chain}
    for chain in (*traced.chains, *((name,) for name in places if name not in in_chains)):
        yield [places[name] for name in chain]


def _runs(
    drafts: Sequence[SiteDraft], problems: Sequence[SelectionProblem | None], traced: TracedNeighbours
) -> Iterator[list[tuple[int, SelectionProblem]]]:
    """The sites that decide together, by index: neighbours in a chain, every other site separately."""
    for chain in _together(drafts, traced):
        run: list[tuple[int, SelectionProblem]] = []
        for place in chain:
            problem = problems[place]
            if problem is not None:
                run.append((place, problem))
            elif run:
                yield run
                run = []
        if run:
            yield run

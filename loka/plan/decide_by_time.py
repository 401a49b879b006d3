"""Revises by measured times what policy and evidence have decided: sites that are neighbours in a chain together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.devices.targets import DEVICES
from loka.numerics.enums import Compute, Fuse
from loka.plan.decide import Decider, Situation, site_gemms
from loka.plan.plan import GemmPlan
from loka.plan.select.enumerate import SiteOptions, enumerate_options
from loka.plan.select.host_model import HostModel
from loka.plan.select.latency_selection import LatencySelection, problem_of, revise
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.select import SelectionProblem, select
from loka.plan.select.workload import SiteSizes, Surroundings, TracedNeighbours, surroundings_of
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Verdict
from loka.sites.site import Site

HOST_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the host's time in what is minimised for a site


@dataclass(frozen=True, slots=True)
class Draft:
    """A site as decided by policy and evidence."""

    site: Site
    wanted: SiteSettings
    obstacle: str | None
    gemms: tuple[GemmPlan, ...]


class ByTime:
    """Decides the sites of one plan by their times; results that sites share are computed once.

    Without `perf_model` there are no times, and nothing is decided.
    """

    def __init__(self, situation: Situation, decider: Decider, perf_model: PerfModel | None) -> None:
        self._situation = situation
        self._decider = decider
        self._perf_model = perf_model
        execution = situation.execution
        device = DEVICES[situation.target]
        self._host = HostModel(device.host, execution.mode) if execution is not None else None
        self._enumerated: dict[tuple[object, ...], SiteOptions | None] = {}
        self._around: dict[tuple[object, ...], Surroundings] = {}

    def decide(
        self, ways: Sequence[Sequence[Draft]], traced: TracedNeighbours
    ) -> list[tuple[Draft, LatencySelection | None]]:
        """Each site's draft and its decision by measurements, None where measurements are missing.

        `ways` are all sites with one recipe each, then with other recipes. Sites that are neighbours in a chain take
        theirs from one way: the one that leaves the least of what is forced undone or over budget, then the fastest,
        then the first. Where the host is considered, what is minimised is the longer of its time and the GPU's in the
        whole step. Both are sums over sites, so each share of the one in the other (`HOST_WEIGHTS`) gives a candidate.
        """
        problems = [[self._problem(draft, traced) for draft in drafts] for drafts in ways]
        weights = HOST_WEIGHTS if self._host is not None else HOST_WEIGHTS[:1]
        selections = []
        for weight in weights:
            found = [self._selected(*each, traced, weight) for each in zip(ways, problems, strict=True)]
            selections.append(_best_of(ways, found, traced, weight))
        return min(selections, key=self._step_us)

    def _step_us(self, found: Sequence[tuple[Draft, LatencySelection | None]]) -> float:
        """The longer of the GPU's and the host's time in a step, microseconds; 0 where the host is not considered."""
        execution = self._situation.execution
        if execution is None:
            return 0.0
        times = [(draft.site.calls, each.timing.chosen) for draft, each in found if each is not None]
        gpu_us = sum(calls * time.us for calls, time in times)
        host_us = sum(calls * (time.host_us or 0.0) for calls, time in times)
        return max(1e3 * execution.gpu_ms + gpu_us, 1e3 * execution.host_ms + host_us)

    def _selected(
        self,
        drafts: Sequence[Draft],
        problems: Sequence[SelectionProblem | None],
        traced: TracedNeighbours,
        host_weight: float,
    ) -> list[LatencySelection | None]:
        found: list[LatencySelection | None] = [None] * len(drafts)
        known: dict[tuple[object, ...], tuple[LatencySelection, ...]] = {}
        for run in _runs(drafts, problems, traced):
            chain = [(drafts[place].gemms, problem) for place, problem in run]
            key = tuple((id(gemms), id(problem.site_options)) for gemms, problem in chain)
            if key not in known:
                chosen = select([problem for _, problem in chain], host_weight)
                known[key] = tuple(
                    revise(problem, gemms, option) for (gemms, problem), option in zip(chain, chosen, strict=True)
                )
            for (place, _), timed in zip(run, known[key], strict=True):
                found[place] = timed
        return found

    def _problem(self, draft: Draft, traced: TracedNeighbours) -> SelectionProblem | None:
        if draft.obstacle is not None:
            return None
        return problem_of(self._options_of(draft, traced), draft.gemms, draft.wanted)

    def _options_of(self, draft: Draft, traced: TracedNeighbours) -> SiteOptions | None:
        site, wanted = draft.site, draft.wanted
        if self._perf_model is None:
            return None
        key: tuple[object, ...] = (site.fed_by, site.followed_by)
        if key not in self._around:
            self._around[key] = surroundings_of(site)
        around = self._around[key]
        if site.name in traced.around:
            around = around.in_chain(traced.around[site.name])
        fuse = Fuse.NEVER if site.name in traced.alone else wanted.fuse
        key = (id(wanted), site.rows, site.k, site.n, site.input_grad, around, fuse)
        if key not in self._enumerated:
            sizes = SiteSizes(site.rows.at(self._situation.batch_size), site.k, site.n)
            self._enumerated[key] = enumerate_options(
                sizes,
                site_gemms(site),
                self._decider.offers(site, wanted, draft.gemms),
                around,
                fuse,
                self._perf_model,
                self._host,
            )
        return self._enumerated[key]


def _best_of(
    ways: Sequence[Sequence[Draft]],
    found: Sequence[Sequence[LatencySelection | None]],
    traced: TracedNeighbours,
    host_weight: float,
) -> list[tuple[Draft, LatencySelection | None]]:
    """Of each chain, and of each site outside of them, the drafts and decisions of the best way."""
    drafts, decisions = list(ways[0]), list(found[0])
    if len(ways) > 1:
        for chain in _together(drafts, traced):
            badness = [_badness(chain, way, timed, host_weight) for way, timed in zip(ways, found, strict=True)]
            best = badness.index(min(badness))
            for place in chain:
                drafts[place], decisions[place] = ways[best][place], found[best][place]
                if decisions[place] is not None:
                    times = {way[place].wanted.recipe: us for way, (*_, us) in zip(ways, badness, strict=True)}
                    drafts[place] = _explained(drafts[place], times)
    return list(zip(drafts, decisions, strict=True))


def _explained(draft: Draft, times: Mapping[str, float]) -> Draft:
    """A draft whose history says which recipe `scaling: auto` took, and the microseconds of its chain in each."""
    history, recipe = draft.wanted.history, draft.wanted.recipe
    if len(times) < 2:
        return draft
    by = history["scaling"][-1]
    compared = ", ".join(f"{label}: {us:.1f} us" for label, us in times.items())
    chosen = replace(by, value=recipe, source=f"{by.source}, by the time of its chain: {compared}")
    return replace(draft, wanted=replace(draft.wanted, history={**history, "scaling": (*history["scaling"], chosen)}))


def _badness(
    chain: Sequence[int], drafts: Sequence[Draft], found: Sequence[LatencySelection | None], host_weight: float
) -> tuple[int, int, int, float]:
    """What to compare ways by: forced GEMMs that are kept, forced ones over budget, sites without times, and the time;
    less is better. Without measurements, the GEMMs that stay as they are stand for the time.
    """
    kept = over = untimed = 0
    us = 0.0
    for place in chain:
        draft, timed = drafts[place], found[place]
        gemms = timed.gemms if timed is not None else draft.gemms
        forced = [plan for plan in gemms if draft.wanted.gemms[plan.gemm].compute is Compute.FP8]
        kept += sum(not plan.fp8 for plan in forced)
        over += sum(plan.evidence is not None and plan.evidence.verdict is Verdict.UNSAFE for plan in forced)
        if timed is not None:
            chosen = timed.timing.chosen
            us += draft.site.calls * ((1 - host_weight) * chosen.us + host_weight * (chosen.host_us or 0.0))
        else:
            untimed += 1
            us += sum(not plan.fp8 for plan in gemms)
    return kept, over, untimed, us


def _together(drafts: Sequence[Draft], traced: TracedNeighbours) -> Iterator[list[int]]:
    """The sites that are neighbours in a chain, by index, and every other site separately."""
    places = {draft.site.name: place for place, draft in enumerate(drafts)}
    in_chains = {name for chain in traced.chains for name in chain}
    for chain in (*traced.chains, *((name,) for name in places if name not in in_chains)):
        yield [places[name] for name in chain]


def _runs(
    drafts: Sequence[Draft], problems: Sequence[SelectionProblem | None], traced: TracedNeighbours
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

"""Revises by measured times what policy and evidence have decided: sites that are neighbours in a chain together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loka.devices.targets import DEVICES
from loka.numerics.enums import Fuse
from loka.plan.decide import Decider, Situation, site_gemms
from loka.plan.plan import GemmPlan
from loka.plan.select.enumerate import SiteOptions, enumerate_options
from loka.plan.select.host_model import HostModel
from loka.plan.select.latency_selection import LatencySelection, problem_of, revise
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.select import SelectionProblem, select
from loka.plan.select.workload import SiteSizes, Surroundings, TracedNeighbours, surroundings_of
from loka.policy.cascade.settings import SiteSettings
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

    def decide(self, drafts: Sequence[Draft], traced: TracedNeighbours) -> list[LatencySelection | None]:
        """Decisions by measurements for the drafts; None where measurements are missing.

        Where the host is considered, what is minimised is the longer of its time and the GPU's in the whole step. Both
        are sums over sites, so each share of the one in the other (`HOST_WEIGHTS`) gives a candidate.
        """
        if self._perf_model is None:
            return [None] * len(drafts)
        problems = [self._problem(draft, traced) for draft in drafts]
        weights = HOST_WEIGHTS if self._host is not None else HOST_WEIGHTS[:1]
        selections = [self._selected(drafts, problems, traced, weight) for weight in weights]
        return min(selections, key=lambda found: self._step_us(drafts, found))

    def _step_us(self, drafts: Sequence[Draft], found: Sequence[LatencySelection | None]) -> float:
        """The longer of the GPU's and the host's time in a step, microseconds; 0 where the host is not considered."""
        execution = self._situation.execution
        if execution is None:
            return 0.0
        times = [
            (draft.site.calls, each.timing.chosen)
            for draft, each in zip(drafts, found, strict=True)
            if each is not None
        ]
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


def _runs(
    drafts: Sequence[Draft], problems: Sequence[SelectionProblem | None], traced: TracedNeighbours
) -> Iterator[list[tuple[int, SelectionProblem]]]:
    """The sites that decide together, by index: neighbours in a chain, every other site separately."""
    places = {draft.site.name: place for place, draft in enumerate(drafts)}
    in_chains = {name for chain in traced.chains for name in chain}
    for chain in (*traced.chains, *((name,) for name in places if name not in in_chains)):
        run: list[tuple[int, SelectionProblem]] = []
        for name in chain:
            problem = problems[places[name]]
            if problem is not None:
                run.append((places[name], problem))
            elif run:
                yield run
                run = []
        if run:
            yield run

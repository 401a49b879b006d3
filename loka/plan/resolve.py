"""Resolves a policy's settings: one decision for every GEMM of every site, each with its reason.

A pure function of settings, sites and the results of tracing, without access to a model or a device. Policy and
evidence decide which GEMMs may run in FP8; measurements, if there are any, then decide which do (latency_selection).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loka.devices.targets import DEVICES, TargetDevice
from loka.errors import InputError
from loka.kernels.gemm.catalogue import GEMM_KERNELS, PREFERRED, Kernel
from loka.kernels.measurements.parts import PartCosts
from loka.numerics.enums import Accumulation, Compute, Fuse, Gemm
from loka.numerics.recipe import OperandPair, transposed_form, with_scalings
from loka.plan.evidence import JudgedGemm, ProfiledSites, judge, with_ranges
from loka.plan.ne import sites_over_ne
from loka.plan.plan import NATIVE, GemmPlan, Rejected, SitePlan
from loka.plan.report.format import format_ne, format_place
from loka.plan.select.enumerate import Offer, SiteOptions, enumerate_options, unsupported_transpose
from loka.plan.select.host_model import HostModel
from loka.plan.select.latency_selection import SAFE, LatencySelection, problem_of, revise
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.select import (
    SelectionProblem,
    accepted_operands,
    candidates,
    impossible_overrides,
    overridden_operands,
    select,
    unknown_kernels,
)
from loka.plan.select.workload import SiteSizes, Surroundings, TracedNeighbours, gemm_part, surroundings_of
from loka.policy.cascade.settings import Assignment, GemmSettings, SiteSettings
from loka.policy.policy import ExecutionSpec
from loka.probe.profile.profile import Verdict
from loka.sites.site import Site

NO_NE_EVIDENCE = "no evidence for the change of NE"
HOST_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the host's time in what is minimised for a site
# Kernels that can run a GEMM, each with the form of its operands; and rejected ones.
_Sifted = tuple[dict[str, OperandPair], tuple[Rejected, ...]]


@dataclass(frozen=True, slots=True)
class Situation:
    """Conditions common to all sites of a plan."""

    target: TargetDevice
    batch_size: int
    files: Mapping[str, str] = field(default_factory=dict)  # policy file as named in the plan -> as named by the user
    kernels: tuple[Kernel, ...] = ()  # FP8 kernels, preferred first; () means PREFERRED, or all with measurements
    known: ProfiledSites | None = None  # the policy's profile
    costs: PartCosts | None = None  # the measurements for the target
    execution: ExecutionSpec | None = None  # how the model runs; None: the host is not considered
    ne_budget: float | None = None  # the largest change of NE by the whole plan, in per cent; None: no limit

    @property
    def considered(self) -> tuple[Kernel, ...]:
        """The kernels that FP8 may run on."""
        if self.kernels or self.costs is None:
            return self.kernels or PREFERRED
        return tuple(kernel for kernel in GEMM_KERNELS if kernel.name != NATIVE)


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
    resolver = _Resolver(situation, over_ne)
    decided: dict[tuple[object, ...], tuple[GemmPlan, ...]] = {}  # sites that are alike share their decisions
    seen = situation.known.sites if situation.known is not None else {}
    problems: dict[str, None] = {}
    drafts = []
    for site, wanted in zip(sites, settings, strict=True):
        unknown = unknown_kernels(wanted, situation.files)
        if unknown:
            problems.update(dict.fromkeys(unknown))
            continue
        obstacle = site.blocked or refused.get(site.name)
        evidence = (id(seen.get(site.name)), site.name in over_ne)
        key = (id(wanted), site.rows, site.k, site.n, site.input_grad, obstacle, *evidence)
        gemms = decided.get(key)
        if gemms is None:
            gemms = resolver.decide(site, wanted, obstacle)
            decided[key] = gemms
        overrides = impossible_overrides(
            site, wanted, gemms, situation.files, situation.batch_size, situation.target.value
        )
        others = [plan for plan in gemms if plan.gemm not in overrides]  # reported once, for the rule with the kernel
        problems.update(dict.fromkeys(_impossible(site, wanted, others, situation.files)))
        problems.update(dict.fromkeys(overrides.values()))
        drafts.append(_Draft(site, wanted, obstacle, gemms))
    if problems:
        raise ImpossibleRuleError("\n".join(problems))
    timed = resolver.by_time(drafts, traced or TracedNeighbours())
    return tuple(
        SitePlan(draft.site, draft.gemms, draft.wanted.history) if found is None else _timed_plan(draft, found)
        for draft, found in zip(drafts, timed, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A site as decided by policy and evidence."""

    site: Site
    wanted: SiteSettings
    obstacle: str | None
    gemms: tuple[GemmPlan, ...]


def _timed_plan(draft: _Draft, found: LatencySelection) -> SitePlan:
    gains = found.fused and draft.wanted.fuse is Fuse.AUTO
    return SitePlan(
        draft.site,
        found.gemms,
        draft.wanted.history,
        timing=found.timing,
        candidates=found.candidates,
        gains_by_fusing=gains,
    )


def site_gemms(site: Site) -> tuple[Gemm, ...]:
    """The GEMMs of one training step, without dgrad if the input needs no gradient."""
    return tuple(gemm for gemm in Gemm if gemm is not Gemm.DGRAD or site.input_grad)


class _Resolver:
    """Decides the sites of one plan; results that sites share are computed once."""

    def __init__(self, situation: Situation, over_ne: frozenset[str] = frozenset()) -> None:
        self._situation = situation
        self._over_ne = over_ne
        self._sifted: dict[tuple[object, ...], _Sifted] = {}
        device, costs = DEVICES[situation.target], situation.costs
        self._perf_model = PerfModel(costs, device) if costs is not None else None
        execution = situation.execution
        self._host = HostModel(device.host, execution.mode) if execution is not None else None
        self._enumerated: dict[tuple[object, ...], SiteOptions | None] = {}
        self._around: dict[tuple[object, ...], Surroundings] = {}

    def decide(self, site: Site, wanted: SiteSettings, obstacle: str | None) -> tuple[GemmPlan, ...]:
        """Decide fprop, then dgrad, then wgrad: transposed operands come from GEMMs decided before."""
        gemms: dict[Gemm, GemmPlan] = {}
        for gemm in site_gemms(site):
            unable = obstacle or unsupported_transpose(gemm, wanted.gemms[gemm].operands, gemms)
            gemms[gemm] = self._decide(site, gemm, wanted, unable)
        return tuple(gemms.values())

    def _decide(self, site: Site, gemm: Gemm, wanted: SiteSettings, obstacle: str | None) -> GemmPlan:
        requested, known = wanted.gemms[gemm], self._situation.known
        by = _by(wanted.compute_set_by(gemm))
        operands, lacking = with_ranges(known, site.name, gemm, requested.operands)
        judged = judge(known, site.name, gemm, requested.operands, operands, wanted.budget)
        operands = self._overridden(site, gemm, replace(requested, operands=operands))
        if requested.compute is Compute.KEEP:
            return _kept(gemm, f"keep{by}", judged)
        obstacle = obstacle or lacking
        if obstacle is not None:
            kernels = candidates(requested, self._situation.considered)
            return _kept(gemm, obstacle, judged, tuple(Rejected(kernel.name, obstacle) for kernel in kernels))
        able, rejected = self._kernels(site, gemm, wanted, replace(requested, operands=operands))
        if not able:
            return _kept(gemm, rejected[0].reason if rejected else "no kernel is known", judged, rejected)
        if requested.compute is Compute.AUTO:
            unsafe = judged.unsupported_reason or self._ne_reason(site, gemm, judged)
            if unsafe:
                waiting = tuple(Rejected(name, unsafe) for name in able)
                return _kept(gemm, unsafe, judged, (*waiting, *rejected))
            reason = f"{SAFE}, auto{by}"
        else:
            reason = f"fp8{by}{_over_budget(judged)}"
        first, *others = able
        later = tuple(Rejected(name, f"{first} is preferred where no measurement decides") for name in others)
        operands = with_scalings(operands, able[first])
        return GemmPlan(gemm, first, operands, requested.accumulation, reason, (*later, *rejected), judged.evidence)

    def _ne_reason(self, site: Site, gemm: Gemm, judged: JudgedGemm) -> str:
        """Why the plan's budget of NE keeps a GEMM, or ""."""
        budget = self._situation.ne_budget
        if budget is None:
            return ""
        change = judged.evidence.ne_percent if judged.evidence is not None else None
        if change is None:
            return f"{NO_NE_EVIDENCE}: run loka probe" if gemm is Gemm.FPROP else ""
        if site.name not in self._over_ne:
            return ""
        return f"kept: with its change of NE, {format_ne(change)}, the plan would be over the budget {budget:g} %"

    def _kernels(self, site: Site, gemm: Gemm, wanted: SiteSettings, requested: GemmSettings) -> _Sifted:
        """The kernels that can run a GEMM, and the rejected ones; cached for sites that are alike."""
        key = (gemm, id(wanted), site.rows, site.k, site.n, requested.accumulation)
        if key not in self._sifted:
            self._sifted[key] = _sift(site, gemm, requested, self._situation, self._perf_model)
        return self._sifted[key]

    def _overridden(self, site: Site, gemm: Gemm, requested: GemmSettings) -> OperandPair:
        return overridden_operands(site, gemm, requested, self._situation.batch_size, self._situation.target.value)

    def by_time(self, drafts: Sequence[_Draft], traced: TracedNeighbours) -> list[LatencySelection | None]:
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

    def _step_us(self, drafts: Sequence[_Draft], found: Sequence[LatencySelection | None]) -> float:
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
        drafts: Sequence[_Draft],
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

    def _problem(self, draft: _Draft, traced: TracedNeighbours) -> SelectionProblem | None:
        if draft.obstacle is not None:
            return None
        return problem_of(self._options_of(draft, traced), draft.gemms, draft.wanted)

    def _options_of(self, draft: _Draft, traced: TracedNeighbours) -> SiteOptions | None:
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
                sizes, site_gemms(site), self._offers(draft), around, fuse, self._perf_model, self._host
            )
        return self._enumerated[key]

    def _offers(self, draft: _Draft) -> dict[Gemm, Offer]:
        """The GEMMs of a site that some kernel could run in FP8, regardless of policy and evidence."""
        offers = {}
        for plan in draft.gemms:
            requested = draft.wanted.gemms[plan.gemm]
            operands = plan.operands or self._overridden(draft.site, plan.gemm, requested)
            requested = replace(requested, operands=operands)
            able = {(name, requested.accumulation): form for name, form in self._able(draft, plan.gemm, requested)}
            if requested.may_be_fast:
                faster = self._able(draft, plan.gemm, replace(requested, accumulation=Accumulation.FAST))
                able |= {(name, Accumulation.FAST): form for name, form in faster}
            if able:
                offers[plan.gemm] = Offer(able, requested.padding)
        return offers

    def _able(self, draft: _Draft, gemm: Gemm, requested: GemmSettings) -> Iterable[tuple[str, OperandPair]]:
        """The kernels that can run a GEMM, each with the form of its operands."""
        return self._kernels(draft.site, gemm, draft.wanted, requested)[0].items()


def _runs(
    drafts: Sequence[_Draft], problems: Sequence[SelectionProblem | None], traced: TracedNeighbours
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


def _over_budget(judged: JudgedGemm) -> str:
    """Text for a GEMM that is forced into FP8 against the evidence."""
    evidence = judged.evidence
    return f", over budget: {evidence.figures}" if evidence is not None and evidence.verdict is Verdict.UNSAFE else ""


def _sift(
    site: Site, gemm: Gemm, requested: GemmSettings, situation: Situation, perf_model: PerfModel | None
) -> _Sifted:
    """The kernels that can run a GEMM, in order, and those that cannot or gave wrong results, with reasons."""
    able: dict[str, OperandPair] = {}
    rejected = []
    sizes, target = SiteSizes(site.rows.at(situation.batch_size), site.k, site.n), situation.target.value
    shape = (sizes.m, sizes.k, sizes.n)
    for kernel in candidates(requested, situation.considered):
        operands = accepted_operands(kernel, gemm, requested, shape, target)
        reason = kernel.unsupported_reason(gemm, operands, requested.accumulation, requested.padding, *shape, target)
        if reason is None and perf_model is not None:
            wrong = perf_model.wrong_reason(gemm_part(gemm, sizes, kernel.name, operands, requested.accumulation))
            reason = f"its numbers were wrong when it was measured: {wrong}" if wrong else None
        if reason is None:
            able[kernel.name] = _faster_form(
                kernel, gemm, replace(requested, operands=operands), sizes, target, perf_model
            )
        else:
            rejected.append(Rejected(kernel.name, reason))
    return able, tuple(rejected)


def _faster_form(
    kernel: Kernel, gemm: Gemm, requested: GemmSettings, sizes: SiteSizes, target: str, perf_model: PerfModel | None
) -> OperandPair:
    """The operands as requested, or in their other form if a kernel is faster with it by more than the noise."""
    other = transposed_form(requested.operands)
    if perf_model is None or other is None:
        return requested.operands
    here, there = (
        gemm_part(gemm, sizes, kernel.name, form, requested.accumulation) for form in (requested.operands, other)
    )
    refused = kernel.unsupported_reason(
        gemm, other, requested.accumulation, requested.padding, sizes.m, sizes.k, sizes.n, target
    )
    latency, beside = perf_model.part(here), perf_model.part(there)
    if refused is not None or latency is None or beside is None or perf_model.wrong_reason(there):
        return requested.operands
    return other if beside.us < latency.us and not beside.ties_with(latency) else requested.operands


def _kept(gemm: Gemm, reason: str, judged: JudgedGemm, rejected: tuple[Rejected, ...] = ()) -> GemmPlan:
    return GemmPlan(gemm, NATIVE, None, None, reason, rejected, judged.evidence)


def _by(assignment: Assignment | None) -> str:
    """The source of a decision: ` by policies/ranker.yaml:14`."""
    place = format_place(assignment) if assignment is not None else ""
    return f" by {place}" if place else ""


def _impossible(site: Site, wanted: SiteSettings, gemms: Sequence[GemmPlan], files: Mapping[str, str]) -> list[str]:
    """A message for each GEMM that is kept although a rule for this one site requests FP8."""
    problems = []
    for plan in gemms:
        if plan.fp8 or wanted.gemms[plan.gemm].compute is not Compute.FP8:
            continue
        rule = wanted.compute_set_by(plan.gemm)
        if rule is not None and rule.names_one_site:
            where = f"{files.get(rule.file, rule.file)}:{rule.line}"
            problems.append(
                f"{where}: {rule.source} asks for {plan.gemm.value} of {site.name!r} in FP8, which cannot be: "
                f"{plan.reason}; write `compute: keep` there, or leave the rule out"
            )
    return problems

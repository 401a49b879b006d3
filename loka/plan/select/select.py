"""Selects an execution option for each site of a chain: the least total time, subject to the budgets.

The sites of a chain are decided together, since the kernel between two linears can write FP8 for the second only if
both are in the chain: if a site leaves it, the next one has to quantize its own input. The sum of the times is
minimised by dynamic programming over the chain, one state for "this site is in it" and one for "it is not".

Native GEMMs are compiled or fused with their neighbours; where the policy leaves that open, they are fused if that
takes less time beyond the noise. FP8 is compared with the better of the two: it is never chosen for what fusing gains.

`min_speedup` is a handicap. The time of an option with more FP8 than the policy forces is multiplied by the site's
`min_speedup`, so that it wins only if (time of the least FP8) / (its own time) reaches that. In a chain this holds for
each run of neighbours in FP8 as a whole, so one site may lose a little (`LITTLE`) if its neighbour gains more.

Among options that tie with the fastest (`Latency.ties_with`), the first in order is chosen: by the position of fprop's
kernel in the catalogue, then dgrad's, then wgrad's, native ones last. So the choice is reproducible, and does not
depend on the noise of a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from loka.kernels.measurements.parts import less_sure
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import with_scalings
from loka.plan.format import format_kernel, format_us
from loka.plan.plan import LITTLE, NATIVE, GemmPlan, Rejected, SiteTiming, StepTime, TimedOption
from loka.plan.select.enumerate import ExecutionOption, Order, SiteOptions
from loka.plan.select.perf_model import Latency
from loka.policy.settings import SiteSettings

SAFE = "safe by evidence"  # start of the reason of a GEMM that `auto` runs in FP8


@dataclass(frozen=True, slots=True)
class SelectionProblem:
    """A site and its possible options: every GEMM of `must` runs in FP8, and none outside `may`."""

    site_options: SiteOptions
    must: frozenset[Gemm]
    may: frozenset[Gemm]
    min_speedup: float

    @property
    def allowed(self) -> tuple[ExecutionOption, ...]:
        """The options within the policy and the error budget."""
        return tuple(option for option in self.site_options.options if self.must <= option.fp8 <= self.may)

    @property
    def least_fp8(self) -> frozenset[Gemm]:
        """The fewest GEMMs in FP8: forced ones and the sources of their operands. Options with more must be faster."""
        return min(self.allowed, key=lambda option: (len(option.fp8), option.order)).fp8

    def least(self, joined: bool, host_weight: float) -> ExecutionOption:
        """The option with the least FP8."""
        return _simplest([option for option in self.allowed if option.fp8 == self.least_fp8], joined, host_weight)

    def native_time(self, host_weight: float) -> StepTime:
        """The time with every GEMM in the model's dtype, compiled or fused, whatever the policy forces."""
        return _simplest(self.site_options.with_fp8(frozenset()), False, host_weight).apart


@dataclass(frozen=True, slots=True)
class Selection:
    """A site's option; `joined` if its input comes from the kernel of the site before."""

    option: ExecutionOption
    joined: bool
    host_weight: float  # share of the host's time in what was minimised

    @property
    def time(self) -> StepTime:
        """Its time."""
        return self.option.time(self.joined)


@dataclass(frozen=True, slots=True)
class _Path:
    """The best options up to some site."""

    us: float  # including handicaps
    picks: tuple[Selection, ...] = ()

    @property
    def key(self) -> tuple[float, tuple[Order, ...]]:
        """Less time first; for equal times the first in order, which has more FP8."""
        return self.us, tuple(pick.option.order for pick in self.picks)


def select(chain: Sequence[SelectionProblem], host_weight: float = 0.0) -> tuple[Selection, ...]:
    """The options selected for the sites of a chain; a site without neighbours is a chain of one.

    `host_weight` is the share of the host's time in what is minimised, the rest being the GPU's.

    Each problem's `allowed` must contain the option that runs all of `may` in FP8.
    """
    paths = {False: _Path(0.0)}
    for problem in chain:
        reached: dict[bool, _Path] = {}
        for joined, path in paths.items():
            for option, handicap in _options(problem, joined, len(chain) == 1, host_weight):
                us = path.us + handicap * _weighed(option.time(joined), host_weight).us
                longer = _Path(us, (*path.picks, Selection(option, joined, host_weight)))
                known = reached.get(option.chained)
                if known is None or longer.key < known.key:
                    reached[option.chained] = longer
        paths = reached
    return min(paths.values(), key=lambda path: path.key).picks


def _options(
    problem: SelectionProblem, joined: bool, alone: bool, host_weight: float
) -> list[tuple[ExecutionOption, float]]:
    """The options of a site, each with its handicap: the best in the chain, the best outside, the least FP8.

    More FP8 than the least is no option where it costs the site itself more than a little. Noise is considered only
    here: the sums of whole chains are compared directly.
    """
    least = problem.least(joined, host_weight)
    most_us = (1 + LITTLE) * _weighed(least.time(joined), host_weight).us
    others = [
        option
        for option in problem.allowed
        if option.fp8 != least.fp8 and _weighed(option.time(joined), host_weight).us <= most_us
    ]
    groups = [others] if alone else [[option for option in others if option.chained is kind] for kind in (True, False)]
    return [*((_best(group, joined, host_weight), problem.min_speedup) for group in groups if group), (least, 1.0)]


def _best(options: Sequence[ExecutionOption], joined: bool, host_weight: float) -> ExecutionOption:
    """The fastest; among ties with it, the first in order."""
    times = [(_weighed(option.time(joined), host_weight), option) for option in options]
    fastest = min((time for time, _ in times), key=lambda time: time.us)
    return min((option for time, option in times if time.ties_with(fastest)), key=lambda option: option.order)


def _simplest(options: Sequence[ExecutionOption], joined: bool, host_weight: float) -> ExecutionOption:
    """The first, unless a later one is faster beyond the noise."""
    best = options[0]
    for option in options[1:]:
        time, other = (_weighed(each.time(joined), host_weight) for each in (option, best))
        best = option if time.us < other.us and not time.ties_with(other) else best
    return best


def _weighed(time: StepTime, host_weight: float) -> Latency:
    """A time with that share of it replaced by the host's."""
    us = (1 - host_weight) * time.us + host_weight * (time.host_us or 0.0)
    return Latency(us, (1 - host_weight) * time.noise, time.source)


def problem_of(
    site_options: SiteOptions | None, gemms: Sequence[GemmPlan], wanted: SiteSettings
) -> SelectionProblem | None:
    """The selection problem of a site; None where its measurements do not suffice.

    `gemms` are decided by policy and evidence: those in FP8 may return to the native kernel, unless the policy forces
    them, or a measured step decided (`GemmSettings.by_time`).
    """
    may = frozenset(plan.gemm for plan in gemms if plan.fp8)
    if site_options is None or not site_options.with_fp8(may):
        return None
    must = frozenset(
        gemm for gemm in may if wanted.gemms[gemm].compute is Compute.FP8 or not wanted.gemms[gemm].by_time
    )
    return SelectionProblem(site_options, must, may, wanted.budget.min_speedup)


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """A site's decision by times."""

    gemms: tuple[GemmPlan, ...]
    timing: SiteTiming
    fused: bool  # with its neighbours, in one kernel


def revise(problem: SelectionProblem, gemms: Sequence[GemmPlan], chosen: Selection) -> TimedDecision:
    """The decisions with the kernels and reasons of the chosen option."""
    site_options, option, time = problem.site_options, chosen.option, chosen.time
    without_fp8 = problem.native_time(chosen.host_weight)
    revised = []
    for plan in gemms:
        if plan.gemm in option.fp8:
            choice = site_options.choices[plan.gemm]
            reason = plan.reason
            if reason.startswith(SAFE) and plan.gemm not in problem.least_fp8:
                reason = reason.replace(SAFE, f"{SAFE} and faster", 1)
            elif time.us > without_fp8.us:
                reason = f"{reason}, slower than BF16 here"
            plan = replace(
                plan,
                kernel=choice.kernel,
                operands=with_scalings(plan.operands, choice.operands) if plan.operands is not None else None,
                accumulation=choice.accumulation,
                m_buckets=choice.m_buckets,
                reason=reason,
                rejected=_with_untimed(choice.rejected, plan, site_options),
            )
        elif plan.fp8:
            plan = _kept(plan, problem, chosen)
        revised.append(replace(plan, times=site_options.times(plan.gemm)))
    options = tuple(_timed(each, problem, chosen) for each in site_options.options)
    as_is = site_options.as_is.rounded
    timing = SiteTiming(time.rounded, without_fp8.rounded, as_is, option.fp8 != problem.may, options)
    return TimedDecision(tuple(revised), timing, option.fused)


def _timed(option: ExecutionOption, problem: SelectionProblem, chosen: Selection) -> TimedOption:
    """An option with its time beside the chosen one, and why it was taken or not."""
    mere, sqnr_db = option.error or (None, None)
    time, outcome = option.time(chosen.joined).rounded, _outcome(option, problem, chosen)
    return TimedOption(option.kernels, time, outcome, mere, sqnr_db, option.fused)


def _with_untimed(found: Iterable[Rejected], plan: GemmPlan, site_options: SiteOptions) -> tuple[Rejected, ...]:
    """Rejected kernels, each with its first reason, and those of the plan that were never timed."""
    timed = {each.kernel for each in site_options.times(plan.gemm)}
    first: dict[str, Rejected] = {}
    for each in (*found, *(each for each in plan.rejected if each.kernel not in timed)):
        first.setdefault(each.kernel, each)
    return tuple(first.values())


def _kept(plan: GemmPlan, problem: SelectionProblem, chosen: Selection) -> GemmPlan:
    """A GEMM that may run in FP8, but is kept because of its time."""
    reason = f"kept: {_why_native(plan.gemm, problem, chosen)}"
    slower = [
        Rejected(format_kernel(each.kernel, each.accumulation), reason)
        for each in problem.site_options.times(plan.gemm)
        if each.kernel != NATIVE
    ]
    rejected = _with_untimed(slower, plan, problem.site_options)
    return replace(plan, kernel=NATIVE, operands=None, accumulation=None, reason=reason, rejected=rejected)


def _why_native(gemm: Gemm, problem: SelectionProblem, chosen: Selection) -> str:
    """Why a GEMM is not in FP8: compared with the fastest option that has it in FP8; if there is none, any GEMM."""
    least = problem.least_fp8
    others = [
        option
        for option in problem.allowed
        if (option.fp8 != least if chosen.option.fp8 == least else gemm in option.fp8)
    ]
    best = min(others, key=lambda option: (option.time(chosen.joined).us, option.order))
    here, there = chosen.time, best.time(chosen.joined)
    source = less_sure(here.source, there.source).value
    figures = f"{format_us(here.us)} against {format_us(there.us)} ({source})"
    if here.us <= there.us:
        return f"BF16 is faster here: {figures}"
    if chosen.option.fp8 == least and here.us < problem.min_speedup * there.us:
        return f"{here.us / there.us:.2f}x is under min_speedup {problem.min_speedup:g}: {figures}"
    waits = _host_words(chosen, best)
    if waits:
        return waits
    return f"FP8 gains nothing here beyond the noise, or for the neighbours: {figures}"


def _outcome(option: ExecutionOption, problem: SelectionProblem, chosen: Selection) -> str:
    """Why an option was chosen or not."""
    if option is chosen.option:
        return "chosen"
    if not problem.must <= option.fp8:
        return f"forced into FP8: {_names(problem.must - option.fp8)}"
    if not option.fp8 <= problem.may:
        return f"not in FP8: {_names(option.fp8 - problem.may)}"
    here, there = option.time(chosen.joined), chosen.time
    if here.us > there.us and not here.ties_with(there):
        return f"slower: {format_us(here.us)} against {format_us(there.us)}"
    if option.fp8 == chosen.option.fp8:  # native both
        return _host_words(chosen, option) or "no faster beyond the noise"
    if here.ties_with(there) and chosen.option.order < option.order:
        return "as fast within the noise, and later in the catalogue"
    if chosen.option.fp8 == problem.least_fp8 and there.us < problem.min_speedup * here.us:
        return f"{there.us / here.us:.2f}x is under min_speedup {problem.min_speedup:g}"
    return _host_words(chosen, option) or "slower together with its neighbours"


def _host_words(chosen: Selection, other: ExecutionOption) -> str:
    """That the step waits for the host, if another option takes more of its time than the chosen one; or ""."""
    here, there = chosen.time.host_us, other.time(chosen.joined).host_us
    if here is None or there is None or there <= here:
        return ""
    return f"the step waits for the host, which this costs {format_us(there)} against {format_us(here)}"


def _names(gemms: Iterable[Gemm]) -> str:
    return ", ".join(gemm.value for gemm in Gemm if gemm in frozenset(gemms))

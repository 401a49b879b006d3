"""Selection by latency: among the GEMMs that may run in FP8, measurements decide which do, and on which kernel.

A site without measurements, of its recipe or of its native GEMMs, keeps the decision made without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import with_scalings
from loka.plan.plan import NATIVE, Candidate, GemmPlan, Rejected, SiteTiming
from loka.plan.report.format import format_kernel, format_us
from loka.plan.select.enumerate import ExecutionOption, SiteOptions
from loka.plan.select.select import Selection, SelectionProblem
from loka.policy.cascade.settings import SiteSettings

SAFE = "safe by evidence"  # start of the reason of a GEMM that `auto` runs in FP8


@dataclass(frozen=True, slots=True)
class LatencySelection:
    """A site's decision by latency, with the fields of `SitePlan`."""

    gemms: tuple[GemmPlan, ...]
    timing: SiteTiming
    candidates: tuple[Candidate, ...]
    fused: bool  # with its neighbours, in one kernel


def problem_of(
    site_options: SiteOptions | None, gemms: Sequence[GemmPlan], wanted: SiteSettings
) -> SelectionProblem | None:
    """The selection problem of a site; None where its measurements do not suffice.

    `gemms` are decided by policy and evidence: those in FP8 may return to the native kernel, unless the policy forces
    them.
    """
    may = frozenset(plan.gemm for plan in gemms if plan.fp8)
    if site_options is None or site_options.option(may) is None:
        return None
    must = frozenset(gemm for gemm in may if wanted.gemms[gemm].compute is Compute.FP8)
    return SelectionProblem(site_options, must, may, wanted.budget.min_speedup)


def revise(problem: SelectionProblem, gemms: Sequence[GemmPlan], chosen: Selection) -> LatencySelection:
    """The decisions with the kernels and reasons of the chosen option."""
    site_options, option, cost = problem.site_options, chosen.option, chosen.cost
    native = site_options.native.cost(False).rounded()
    timing = SiteTiming(cost.rounded(), native, kept=option.fp8 != problem.may)
    slower = cost.total.us > site_options.native.apart.total.us
    revised = []
    for plan in gemms:
        if plan.gemm in option.fp8:
            choice = site_options.choices[plan.gemm]
            unable = tuple(each for each in plan.rejected if each.kernel not in _timed(site_options, plan.gemm))
            reason = plan.reason
            if reason.startswith(SAFE) and plan.gemm not in problem.least.fp8:
                reason = reason.replace(SAFE, f"{SAFE} and faster", 1)
            elif slower:
                reason = f"{reason}, slower than BF16 here"
            rejected = _once((*choice.rejected, *unable))
            operands = with_scalings(plan.operands, choice.operands) if plan.operands is not None else None
            plan = replace(plan, kernel=choice.kernel, operands=operands, accumulation=choice.accumulation)
            plan = replace(plan, m_buckets=choice.m_buckets, reason=reason, rejected=rejected)
        elif plan.fp8:
            plan = _kept(plan, problem, chosen)
        revised.append(replace(plan, times=site_options.times(plan.gemm)))
    candidates = tuple(
        Candidate(
            other.kernels,
            other.cost(chosen.joined).rounded(),
            _outcome(other, problem, chosen),
            *(other.error or (None, None)),
        )
        for other in site_options.options
    )
    return LatencySelection(tuple(revised), timing, candidates, option.fused)


def _timed(site_options: SiteOptions, gemm: Gemm) -> frozenset[str]:
    """The kernels measured for a GEMM."""
    return frozenset(each.kernel for each in site_options.times(gemm))


def _once(rejected: Iterable[Rejected]) -> tuple[Rejected, ...]:
    """Each kernel with its first reason."""
    first: dict[str, Rejected] = {}
    for each in rejected:
        first.setdefault(each.kernel, each)
    return tuple(first.values())


def _kept(plan: GemmPlan, problem: SelectionProblem, chosen: Selection) -> GemmPlan:
    """A GEMM that may run in FP8, but is kept because of its time."""
    reason = f"kept: {_why_native(plan.gemm, problem, chosen)}"
    able = [
        Rejected(format_kernel(each.kernel, each.accumulation), reason)
        for each in problem.site_options.times(plan.gemm)
        if each.kernel != NATIVE
    ]
    unable = [each for each in plan.rejected if each.kernel not in _timed(problem.site_options, plan.gemm)]
    return replace(
        plan, kernel=NATIVE, operands=None, accumulation=None, reason=reason, rejected=_once((*able, *unable))
    )


def _why_native(gemm: Gemm, problem: SelectionProblem, chosen: Selection) -> str:
    """Why a GEMM is not in FP8: compared with the fastest option that has it in FP8; if there is none, any GEMM."""
    least = problem.least
    others = [
        option for option in problem.allowed if (option is not least if chosen.option is least else gemm in option.fp8)
    ]
    best = min(others, key=lambda option: (option.cost(chosen.joined).total.us, option.order))
    here, there = chosen.cost.total, best.cost(chosen.joined).total
    source = (here + there).source.value
    figures = f"{format_us(here.us)} against {format_us(there.us)} ({source})"
    if here.us <= there.us:
        return f"BF16 is faster here: {figures}"
    if chosen.option is least and here.us < problem.min_speedup * there.us:
        return f"{here.us / there.us:.2f}x is under min_speedup {problem.min_speedup:g}: {figures}"
    return f"FP8 gains nothing here beyond the noise, or for the neighbours: {figures}"


def _outcome(option: ExecutionOption, problem: SelectionProblem, chosen: Selection) -> str:
    """Why an option was chosen or not."""
    if option is chosen.option:
        return "chosen"
    if not problem.must <= option.fp8:
        return f"forced into FP8: {_names(problem.must - option.fp8)}"
    if not option.fp8 <= problem.may:
        return f"not in FP8: {_names(option.fp8 - problem.may)}"
    here, there = option.cost(chosen.joined).total, chosen.cost.total
    if here.us > there.us and not here.ties_with(there):
        return f"slower: {format_us(here.us)} against {format_us(there.us)}"
    if here.ties_with(there) and chosen.option.order < option.order:
        return "as fast within the noise, and later in the catalogue"
    if chosen.option is problem.least and there.us < problem.min_speedup * here.us:
        return f"{there.us / here.us:.2f}x is under min_speedup {problem.min_speedup:g}"
    return "slower together with its neighbours"


def _names(gemms: Iterable[Gemm]) -> str:
    return ", ".join(gemm.value for gemm in Gemm if gemm in frozenset(gemms))

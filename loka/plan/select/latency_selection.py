"""Selection by latency: among the GEMMs that may run in FP8, measurements decide which do, and on which kernel.

A site without measurements, of its recipe or of its native GEMMs, keeps the decision made without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.interaction.interaction_specs import specs_of
from loka.kernels.measurements.interaction_forms import CrossForm, FmForm, Form, form_of, parts_of
from loka.kernels.measurements.part_bounds import added_us
from loka.kernels.measurements.parts import COMPILED, RENDERED, PartCosts, PartKind, TimeSource
from loka.mods.rewriting.interactions import Fused
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import with_scalings
from loka.plan.format import format_kernel, format_us
from loka.plan.plan import (
    NATIVE,
    GemmPlan,
    InteractionPlan,
    Plan,
    Rejected,
    SitePlan,
    SiteTiming,
    StepTime,
    TimedOption,
)
from loka.plan.select.enumerate import Cost, ExecutionOption, SiteOptions
from loka.plan.select.perf_model import Latency, PerfModel
from loka.plan.select.select import Selection, SelectionProblem
from loka.policy.settings import SiteSettings
from loka.sites.site import GemmKind, Site

SAFE = "safe by evidence"  # start of the reason of a GEMM that `auto` runs in FP8


@dataclass(frozen=True, slots=True)
class LatencySelection:
    """A site's decision by latency, with the fields of `SitePlan`."""

    gemms: tuple[GemmPlan, ...]
    timing: SiteTiming
    fused: bool  # with its neighbours, in one kernel


def problem_of(
    site_options: SiteOptions | None, gemms: Sequence[GemmPlan], wanted: SiteSettings
) -> SelectionProblem | None:
    """The selection problem of a site; None where its measurements do not suffice.

    `gemms` are decided by policy and evidence: those in FP8 may return to the native kernel, unless the policy forces
    them, or a measured step decided (`GemmSettings.by_time`).
    """
    may = frozenset(plan.gemm for plan in gemms if plan.fp8)
    if site_options is None or site_options.option(may) is None:
        return None
    must = frozenset(
        gemm for gemm in may if wanted.gemms[gemm].compute is Compute.FP8 or not wanted.gemms[gemm].by_time
    )
    return SelectionProblem(site_options, must, may, wanted.budget.min_speedup)


def revise(problem: SelectionProblem, gemms: Sequence[GemmPlan], chosen: Selection) -> LatencySelection:
    """The decisions with the kernels and reasons of the chosen option."""
    site_options, option, cost = problem.site_options, chosen.option, chosen.cost
    native = site_options.native.cost(False).rounded()
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
    options = tuple(
        TimedOption(
            other.kernels,
            other.cost(chosen.joined).rounded(),
            _outcome(other, problem, chosen),
            *(other.error or (None, None)),
        )
        for other in site_options.options
    )
    timing = SiteTiming(cost.rounded(), native, option.fp8 != problem.may, options)
    return LatencySelection(tuple(revised), timing, option.fused)


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
    here, there = option.cost(chosen.joined).total, chosen.cost.total
    if here.us > there.us and not here.ties_with(there):
        return f"slower: {format_us(here.us)} against {format_us(there.us)}"
    if here.ties_with(there) and chosen.option.order < option.order:
        return "as fast within the noise, and later in the catalogue"
    if chosen.option is problem.least and there.us < problem.min_speedup * here.us:
        return f"{there.us / here.us:.2f}x is under min_speedup {problem.min_speedup:g}"
    return _host_words(chosen, option) or "slower together with its neighbours"


def _host_words(chosen: Selection, other: ExecutionOption) -> str:
    """That the step waits for the host, if another option takes more of its time than the chosen one; or ""."""
    here, there = chosen.cost.host_us, other.cost(chosen.joined).host_us
    if here is None or there is None or there <= here:
        return ""
    return f"the step waits for the host, which this costs {format_us(there)} against {format_us(here)}"


def _names(gemms: Iterable[Gemm]) -> str:
    return ", ".join(gemm.value for gemm in Gemm if gemm in frozenset(gemms))


def interaction_plans(
    fused: Sequence[Fused],
    plans: Sequence[SitePlan],
    batch_size: int,
    costs: PartCosts | None,
    device: DeviceSpec = DEFAULT,
) -> tuple[InteractionPlan, ...]:
    """The interactions with their own kernels, with times if there are `costs`."""
    sites = {plan.site.name: plan.site for plan in plans}
    perf_model = PerfModel(costs, device) if costs is not None else None
    claimed: set[str] = set()
    found = []
    for each in fused:
        if each.form is None:
            continue
        forward, backward = parts_of(each.form, _samples(each, sites, batch_size), each.columns, RENDERED)
        fused_sites = each.sites
        if forward.work is PartKind.FM_INTERACTION:
            products = (site.name for site in sites.values() if _multiplies(site, each, forward.rows, batch_size))
            fused_sites += tuple(name for name in products if name not in claimed)[:1]
            claimed.update(fused_sites)
        beside = sites.get(each.beside)
        found.append(
            InteractionPlan(
                work=forward.work,
                owner=each.owner,
                what=each.what,
                form=backward.around,
                samples=forward.rows,
                columns=each.columns,
                calls=beside.calls if beside is not None else 1,
                sites=fused_sites,
                chosen=_time(each.form, forward.rows, each.columns, RENDERED, perf_model),
                as_is=_time(each.form, forward.rows, each.columns, COMPILED, perf_model),
            )
        )
    return tuple(found)


def without_fused_sites(plans: Sequence[SitePlan], interactions: Sequence[InteractionPlan]) -> tuple[SitePlan, ...]:
    """The plans, without times for sites fused into interactions, which are no separate GEMMs any more."""
    fused_sites = {name for each in interactions for name in each.takes}
    if not fused_sites:
        return tuple(plans)
    return tuple(replace(plan, timing=None) if plan.site.name in fused_sites else plan for plan in plans)


def interaction_by_site(plan: Plan) -> Mapping[str, InteractionPlan]:
    """The interaction that a site is fused into, by the site's name."""
    return {name: each for each in plan.interactions for name in each.takes}


def place_in_interaction(interaction: InteractionPlan) -> str:
    """Text for a site fused into an interaction: `in the mixing layer of layers.0`."""
    return f"in the mixing layer of {interaction.owner or 'the model itself'}"


def kernel_names(interaction: InteractionPlan) -> tuple[str, str]:
    """Names of its forward and gradient kernels in a generated package's fused.py."""
    forward, gradients = specs_of(form_of(interaction.work, interaction.form), interaction.columns)
    return forward.function, gradients.function


def step_times(interactions: Sequence[InteractionPlan]) -> Iterator[tuple[InteractionPlan, StepTime, StepTime]]:
    """The interactions with both times known, with these times."""
    for each in interactions:
        if each.chosen is not None and each.as_is is not None:
            yield each, each.chosen, each.as_is


def _samples(fused: Fused, sites: Mapping[str, Site], batch_size: int) -> int:
    """Samples of one call, from the rows of one of its sites, if any. A concatenation norm follows the batch."""
    site = sites.get(fused.sites[0]) if fused.sites else None
    if site is None or fused.form is None:
        return batch_size
    rows = site.rows.at(batch_size)
    return rows // fused.columns if isinstance(fused.form, FmForm) else rows  # x^T (B, d, n) times rank


def _multiplies(site: Site, fused: Fused, samples: int, batch_size: int) -> bool:
    """True if a product without a Parameter is the outer one of an FM interaction: x (B, n, d) times x^T @ rank."""
    form = fused.form
    if site.kind is not GemmKind.BMM or site.owner != fused.owner or not isinstance(form, FmForm):
        return False
    return (site.k, site.rows.at(batch_size)) == (fused.columns, samples * form.embeddings) and site.n == form.rank


def _time(form: Form, samples: int, columns: int, kernel: str, perf_model: PerfModel | None) -> StepTime | None:
    if perf_model is None:
        return None
    first, second = parts_of(form, samples, columns, kernel)
    forward, backward = perf_model.part(first), perf_model.part(second)
    if forward is None or backward is None:
        return None
    if kernel == RENDERED and isinstance(form, CrossForm) and form.passing:
        # Another linear and another cross layer read the sum: their gradients are added in a pass between LoKA's
        # kernels, and by torch.compile within others (docs/results/LOG.md, "cross layers in kernels of their own").
        backward += Latency(added_us(samples, columns, second.dtype, perf_model.device), 0.0, TimeSource.ESTIMATED)
    return Cost.of(forward, backward).rounded()

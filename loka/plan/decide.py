"""Decides by policy and evidence which GEMMs of a site may run in FP8, on which kernels, and gives each reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from loka.devices.targets import spec_of
from loka.graph.sites.site import Site
from loka.kernels.gemm.catalogue import GEMM_KERNELS, PREFERRED, GemmRequest, Kernel, kernel_named
from loka.kernels.measurements.parts import PartCosts
from loka.numerics.enums import Accumulation, Compute, Gemm
from loka.numerics.recipe import OperandPair, transposed_form, with_scalings
from loka.plan.evidence import JudgedGemm, ProfiledSites, judge
from loka.plan.format import format_ne, format_place
from loka.plan.plan import NATIVE, GemmPlan, Rejected
from loka.plan.select.enumerate import Offer, unsupported_transpose
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.select import SAFE
from loka.plan.select.workload import SiteSizes, gemm_part
from loka.policy.policy import ExecutionSpec
from loka.policy.settings import ANY_KERNEL, Assignment, GemmSettings, SiteSettings
from loka.probe.profile.profile import Verdict, with_ranges

NO_NE_EVIDENCE = "no evidence for the change of NE"
# Kernels that can run a GEMM, each with the form of its operands; and rejected ones.
_Sifted = tuple[dict[str, OperandPair], tuple[Rejected, ...]]


@dataclass(frozen=True, slots=True)
class Situation:
    """Conditions common to all sites of a plan."""

    target: str
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

    def sizes_of(self, site: Site) -> SiteSizes:
        """A site's sizes at the batch size."""
        return SiteSizes(site.rows.at(self.batch_size), site.k, site.n)


class Decider:
    """Decides the GEMMs of sites by policy and evidence; results that sites share are computed once."""

    def __init__(
        self, situation: Situation, perf_model: PerfModel | None = None, over_ne: frozenset[str] = frozenset()
    ) -> None:
        self._situation = situation
        self._perf_model = perf_model
        self._over_ne = over_ne
        self._sifted: dict[tuple[object, ...], _Sifted] = {}

    def decide(self, site: Site, wanted: SiteSettings, obstacle: str | None) -> tuple[GemmPlan, ...]:
        """Decide fprop, then dgrad, then wgrad: transposed operands come from GEMMs decided before."""
        gemms: dict[Gemm, GemmPlan] = {}
        for gemm in site.gemms:
            before = {each: plan.operands for each, plan in gemms.items()}
            unable = obstacle or unsupported_transpose(gemm, wanted.gemms[gemm].operands, before)
            gemms[gemm] = self._decide(site, gemm, wanted, unable)
        return tuple(gemms.values())

    def _decide(self, site: Site, gemm: Gemm, wanted: SiteSettings, obstacle: str | None) -> GemmPlan:
        requested, known = wanted.gemms[gemm], self._situation.known
        by = _by(wanted.compute_set_by(gemm))
        seen = known.sites.get(site.name) if known is not None else None
        operands, lacking = with_ranges(seen, gemm, requested.operands)
        judged = judge(known, site.name, gemm, requested.operands, wanted.budget)
        operands = _overridden(site, gemm, replace(requested, operands=operands), self._situation)
        if requested.compute is Compute.KEEP:
            return _kept(gemm, site.blocked or f"keep{by}", judged)
        obstacle = obstacle or lacking
        if obstacle is not None:
            kernels = _candidates(requested, self._situation.considered)
            return _kept(gemm, obstacle, judged, tuple(Rejected(kernel.name, obstacle) for kernel in kernels))
        able, rejected = self._kernels(site, gemm, wanted, replace(requested, operands=operands))
        if not able:
            return _kept(gemm, rejected[0].reason if rejected else "no kernel is known", judged, rejected)
        if requested.compute is Compute.AUTO:
            unsafe = self._unmeasured() or judged.unsupported_reason or self._ne_reason(site, gemm, judged)
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

    def _unmeasured(self) -> str:
        """Why `compute: auto` keeps everything on a device that nothing was measured on, or ""."""
        device = spec_of(self._situation.target)
        if self._situation.costs is not None or not device.lacks_measurements:
            return ""
        return (
            f"nothing was measured on {device.title}: record there with `loka bench kernels --record FILE`, and name "
            "the file in `measurements:`"
        )

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

    def offers(self, site: Site, wanted: SiteSettings, gemms: Sequence[GemmPlan]) -> dict[Gemm, Offer]:
        """The GEMMs of a site that some kernel could run in FP8, regardless of policy and evidence."""
        offers = {}
        for plan in gemms:
            requested = wanted.gemms[plan.gemm]
            operands = plan.operands or _overridden(site, plan.gemm, requested, self._situation)
            requested = replace(requested, operands=operands)
            ways = [requested]
            if requested.may_be_fast:
                ways.append(replace(requested, accumulation=Accumulation.FAST))
            able = {
                (name, way.accumulation): form
                for way in ways
                for name, form in self._kernels(site, plan.gemm, wanted, way)[0].items()
            }
            if able:
                offers[plan.gemm] = Offer(able, requested.padding)
        return offers


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
    sizes, target = situation.sizes_of(site), situation.target
    for kernel in _candidates(requested, situation.considered):
        operands = accepted_operands(kernel, gemm, requested, sizes, target)
        reason = _refusal(kernel, gemm, operands, requested, sizes, target)
        if reason is None and perf_model is not None:
            wrong = perf_model.costs.wrong_reason(gemm_part(gemm, sizes, kernel.name, operands, requested.accumulation))
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
    refused = _refusal(kernel, gemm, other, requested, sizes, target)
    latency, beside = perf_model.part(here), perf_model.part(there)
    if refused is not None or latency is None or beside is None or perf_model.costs.wrong_reason(there):
        return requested.operands
    return other if beside.us < latency.us and not beside.ties_with(latency) else requested.operands


def _kept(gemm: Gemm, reason: str, judged: JudgedGemm, rejected: tuple[Rejected, ...] = ()) -> GemmPlan:
    return GemmPlan(gemm, NATIVE, None, None, reason, rejected, judged.evidence)


def _by(assignment: Assignment | None) -> str:
    """The source of a decision: ` by policies/ranker.yaml:14`."""
    place = format_place(assignment) if assignment is not None else ""
    return f" by {place}" if place else ""


def _candidates(requested: GemmSettings, usual: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The kernels that a GEMM may run on: the one that the policy names, or the usual ones."""
    return tuple(usual) if requested.kernel == ANY_KERNEL else (kernel_named(requested.kernel),)


def _refusal(
    kernel: Kernel, gemm: Gemm, operands: OperandPair, requested: GemmSettings, sizes: SiteSizes, target: str
) -> str | None:
    """Why a kernel cannot run a GEMM with these operands; None where it can."""
    return kernel.unsupported_reason(
        GemmRequest(gemm, operands, requested.accumulation, requested.padding, sizes.m, sizes.k, sizes.n, target)
    )


def accepted_operands(
    kernel: Kernel, gemm: Gemm, requested: GemmSettings, sizes: SiteSizes, target: str
) -> OperandPair:
    """The operands in the form that a kernel supports, if any.

    Two transposed operands have one scale each, which can be passed as a tensorwise or a rowwise scale: a kernel
    without support for tensorwise scales takes them rowwise.
    """
    asked, rows = requested.operands, transposed_form(requested.operands)
    if rows is None or not all(each.reads_first_scale for each in asked):
        return asked
    by_form = {form: _refusal(kernel, gemm, form, requested, sizes, target) for form in (asked, rows)}
    return rows if by_form[asked] is not None and by_form[rows] is None else asked


def _overridden(site: Site, gemm: Gemm, requested: GemmSettings, situation: Situation) -> OperandPair:
    """`accepted_operands` of the kernel that the policy names; without one, the policy's operands."""
    if requested.kernel == ANY_KERNEL:
        return requested.operands
    kernel, sizes = kernel_named(requested.kernel), situation.sizes_of(site)
    return accepted_operands(kernel, gemm, requested, sizes, situation.target)


def pinned_reason(site: Site, gemm: Gemm, requested: GemmSettings, situation: Situation) -> str | None:
    """Why the kernel that the policy names for a GEMM rejects it; None where it takes it, or none is named."""
    if requested.kernel == ANY_KERNEL:
        return None
    operands = _overridden(site, gemm, requested, situation)
    kernel, sizes = kernel_named(requested.kernel), situation.sizes_of(site)
    return _refusal(kernel, gemm, operands, requested, sizes, situation.target)

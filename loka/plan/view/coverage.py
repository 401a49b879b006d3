"""Coverage of a plan: the share of FLOPs in FP8, of GPU time in fused regions, and what stays the compiler's.

Everything is derived from the plan alone. The GPU time is that of one training step as far as a plan predicts it:

- the GEMMs of all sites, the kernels that make their operands, and the norms and activations around them;
- interactions in kernels of their own (`fuse_interaction`);
- `execution.gpu_ms`, if the policy has it.

Embeddings, other elementwise work, loss and optimiser are not in it unless `execution.gpu_ms` is. A site without times
(it cannot be patched, or was never measured) counts with the least time that the device needs for its GEMMs, and so do
opaque products, such as those of recurrent layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loka.devices.targets import spec_of
from loka.graph.sites.site import Opaque
from loka.kernels.measurements.part_bounds import bound_us
from loka.numerics.enums import Fuse, Gemm
from loka.plan.evidence import waits_for_evidence
from loka.plan.format import (
    format_figure,
    format_gemm_reasons,
    format_place,
    format_share,
    format_us,
    grouped,
    pattern_of,
)
from loka.plan.plan import NATIVE, NOTHING_AROUND, GemmPlan, Plan, SitePlan
from loka.plan.select.interaction_times import interaction_by_site
from loka.plan.select.workload import SiteSizes, gemm_part, surroundings_of
from loka.plan.view.table import name_of_group, rule_names

LARGEST = 3  # pieces of the compiler's time that are named
BESIDE = "the rest of the step"
OPAQUE = "LoKA does not replace it"
ROUNDING = 0.01  # us; a plan's times are rounded to the nanosecond, each by itself
_FIGURES = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """Work that stays the compiler's: sites that differ only in the numbers of their names, or the rest of the step."""

    name: str  # a glob for several sites
    count: int  # of sites; 0 for the rest of the step
    what: str  # "fprop, wgrad", "fprop, dgrad, wgrad, layer_norm relu"
    us: float | None  # in a training step; None if the plan has no times
    share: float  # of the GPU time; without times, of the training GEMM FLOPs
    at_least: bool  # the time has a lower bound in it
    reason: str

    @property
    def words(self) -> str:
        """`head.out (fprop, wgrad): 18.9 us, 2.7 %: keep by ranker.yaml:28`."""
        sites = f"{self.count} sites: " if self.count > 1 else ""
        name = f"{self.name} ({sites}{self.what})" if self.what else self.name
        us = f"{'at least ' if self.at_least else ''}{format_us(self.us)}, " if self.us is not None else ""
        return f"{name}: {us}{format_share(self.share)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Predicted GPU time of one training step in microseconds, and its shares."""

    us: float
    fused: float  # in LoKA's fused regions: interactions, and sites whose neighbours its kernels compute
    fp8: float  # of FP8 GEMMs outside of these, with the kernels that make their operands
    compiler: float  # the rest: GEMMs in the model's dtype, with the norms and activations that torch computes
    fused_us: float
    fp8_us: float
    compiler_us: float
    beside_us: float  # of `compiler_us`: `execution.gpu_ms`
    bounded: int  # sites that count with a lower bound

    @classmethod
    def of(cls, fused: float, fp8: float, compiler: float, beside: float, bounded: int) -> GpuTime:
        """The time that is the sum of the first three."""
        fused, fp8, compiler = round(fused, 3), round(fp8, 3), round(compiler, 3)
        us = fused + fp8 + compiler
        a, b, c = (round(each / us, 4) if us else 0.0 for each in (fused, fp8, compiler))
        return cls(round(us, 3), a, b, c, fused, fp8, compiler, round(beside, 3), bounded)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a model a plan changes."""

    flops_training: float  # share of the training GEMM FLOPs in FP8
    flops_inference: float  # share of the GEMM FLOPs of an evaluation forward in FP8
    time: GpuTime | None  # None without measurements
    largest: tuple[Piece, ...]  # of what stays the compiler's, at most LARGEST, the largest first

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The shares in words: name, share and, with times, microseconds ("" for FLOPs)."""
        rows: list[tuple[str, ...]] = [
            ("training GEMM FLOPs in FP8", format_share(self.flops_training)),
            ("inference GEMM FLOPs in FP8", format_share(self.flops_inference)),
        ]
        if (time := self.time) is None:
            return rows
        times = (
            ("GPU time in LoKA's fused regions", time.fused_us),
            ("GPU time of FP8 GEMMs outside of them", time.fp8_us),
            ("GPU time that stays the compiler's", time.compiler_us),
        )
        timed = [(name, format_share(us / time.us if time.us else 0.0), format_figure(us)) for name, us in times]
        return [*((*row, "") for row in rows), *timed]

    @property
    def step_words(self) -> str:
        """What the GPU time contains, or why there is none."""
        time = self.time
        if time is None:
            largest = "; what follows goes by GEMM FLOPs" if self.largest else ""
            return f"GPU time: not known, as no measurement decided this plan{largest}."
        rest = (
            f", and {format_us(time.beside_us)} of execution.gpu_ms for the rest"
            if time.beside_us
            else "; not embeddings, other elementwise work, loss and optimiser"
        )
        text = (
            f"GPU time: {format_us(time.us)} predicted for a training step: GEMMs, what quantizes for them, norms and "
            f"activations around them, interactions{rest}."
        )
        if time.bounded:
            sites = "1 site without times counts" if time.bounded == 1 else f"{time.bounded} sites without times count"
            text += f" {sites} with the least time that the device needs."
        return text


def coverage_of(plan: Plan) -> Coverage:
    """The coverage of a plan, in time linear in its sites."""
    timed = plan.measurements is not None and any(site.timing is not None for site in plan.sites)
    inside = interaction_by_site(plan)
    sites = [site for site in plan.sites if site.site.calls and site.site.name not in inside]
    if timed:
        parts = [_site_time(plan, *pair) for pair in zip(sites, [None, *sites], strict=False)]
    else:
        parts = [_site_flops(plan, site) for site in sites]
    opaque = {each: _opaque_work(plan, each, timed) for each in plan.opaque if each.calls}
    beside_us = 1e3 * plan.execution.gpu_ms if timed and plan.execution is not None else 0.0
    interactions = sum(each.chosen.us * each.calls for each in plan.interactions if each.chosen is not None)
    time = GpuTime.of(
        fused=sum(part.fused for part in parts) + interactions,
        fp8=sum(part.fp8 for part in parts),
        compiler=sum(part.compiler for part in parts) + sum(opaque.values()) + beside_us,
        beside=beside_us,
        bounded=sum(part.bounded for part in parts),
    )
    whole = time.us if timed else sum(part.fp8 + part.compiler for part in parts) + sum(opaque.values())
    pieces = [_piece(group, whole, timed, rule_names(plan)) for group in _alike(parts)]
    pieces += [_opaque_piece(each, work, whole, timed) for each, work in opaque.items()]
    if beside_us:
        reason = "execution.gpu_ms: what the policy says the GPU does besides these sites"
        pieces.append(Piece(BESIDE, 0, "", round(beside_us, 3), round(beside_us / whole, 4), False, reason))
    pieces.sort(key=lambda piece: (-piece.share, piece.name))
    return Coverage(plan.share_fp8, _inference_share(plan), time if timed else None, tuple(pieces[:LARGEST]))


def _opaque_work(plan: Plan, opaque: Opaque, timed: bool) -> float:
    """FLOPs of opaque products in a training step, three products for each as for sites; or the least time, in us."""
    flops = 3.0 * opaque.flops.at(plan.batch_size)
    return 1e6 * flops / spec_of(plan.target).flops["bfloat16"] if timed else flops


def _opaque_piece(opaque: Opaque, work: float, whole: float, timed: bool) -> Piece:
    names = ", ".join(owner or "the model" for owner in opaque.owners[:LARGEST])
    more = f" and {len(opaque.owners) - LARGEST} more" if len(opaque.owners) > LARGEST else ""
    share = round(work / whole, 4) if whole else 0.0
    return Piece(f"{opaque.what} of {names}{more}", 1, "", round(work, 3) if timed else None, share, timed, OPAQUE)


def _inference_share(plan: Plan) -> float:
    """Share of the GEMM FLOPs of an evaluation forward that run in FP8."""
    total = fp8 = 0.0
    for each in plan.sites:
        flops = float(each.site.flops_per_row * each.site.rows.at(plan.batch_size) * each.site.calls_eval)
        total += flops
        fp8 += flops * any(gemm.fp8 for gemm in each.gemms if gemm.gemm is Gemm.FPROP)
    return fp8 / total * (1 - sum(each.share_eval for each in plan.opaque)) if total else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """A site's part of a step, in microseconds, or in FLOPs if the plan has no times."""

    site: SitePlan
    fused: float = 0.0
    fp8: float = 0.0
    compiler: float = 0.0
    bounded: bool = False
    native: Sequence[GemmPlan] = ()  # GEMMs that stay the compiler's
    norms: bool = False  # so do the norms and activations around it

    @property
    def reason(self) -> str:
        """Why the compiler keeps its part."""
        gemms = [format_gemm_reasons(self.native)] if self.native else []
        if not self.norms:
            return "".join(gemms)
        why = _why_not_fused(self.site)
        return "; ".join([*gemms, f"what is around it: {why}"]) if gemms else why


def _site_flops(plan: Plan, site: SitePlan) -> _Part:
    """GEMMs that are not in FP8 count as the compiler's."""
    flops = float(site.site.flops_per_row * site.site.rows.at(plan.batch_size) * site.site.calls)
    native = [gemm for gemm in site.gemms if not gemm.fp8]
    return _Part(site, fp8=flops * (len(site.gemms) - len(native)), compiler=flops * len(native), native=native)


def _site_time(plan: Plan, site: SitePlan, previous: SitePlan | None) -> _Part:
    calls, native = site.site.calls, [gemm for gemm in site.gemms if not gemm.fp8]
    bounded = site.timing is None
    if site.timing is None:
        times = {gemm.gemm: _least_us(plan, site, gemm) for gemm in site.gemms}
        whole, around = sum(times.values()), 0.0
    else:
        times = {gemm.gemm: _native_us(gemm) for gemm in site.gemms}
        # Of the norms and activations around it by themselves: a native time less its GEMMs'.
        whole = site.timing.chosen.us
        around = (site.timing.as_is.us if site.fp8 else whole) - sum(times.values())
        around = around if around > ROUNDING else 0.0
    if in_fused_region(plan, site):
        return _Part(site, fused=calls * whole, bounded=bounded)
    compiler = min(sum(times[gemm.gemm] for gemm in native) + around, whole) if site.fp8 else whole
    fused = around if around and previous is not None and _takes_norms_of(plan, previous, site) else 0.0
    compiler, around = compiler - fused, around - fused
    fp8 = whole - compiler - fused
    return _Part(site, calls * fused, calls * fp8, calls * compiler, bounded, native, norms=around > 0)


def in_fused_region(plan: Plan, site: SitePlan) -> bool:
    """True if kernels of LoKA compute a site together with its neighbours.

    A site in FP8 has to have a chain's recipe: around others the region is a function of torch's own operations. In a
    chain of several linears, a site may have no region of its own.
    """
    if not site.fp8:
        return bool(site.region)
    recipe = site.recipe
    if not _sizes(plan, site).fits or not (recipe.is_chain or recipe.keeps_wgrad):
        return False
    fuses = site.gains_by_fusing or _fuse(site)[0] is Fuse.ALWAYS
    return bool(site.region) or (fuses and not site.region_note)


def _takes_norms_of(plan: Plan, previous: SitePlan, site: SitePlan) -> bool:
    """True if the norms and activations that count with a site are those that end the fused region before it.

    A norm's forward counts with the linear that reads it (`workload`), wherever it is computed.
    """
    ends = previous.region[-1:] == site.site.fed_by[:1] and not surroundings_of(site.site).after
    return ends and bool(previous.region) and in_fused_region(plan, previous)


def _fuse(site: SitePlan) -> tuple[Fuse, str]:
    """The policy's `fuse` of a site, and where it says so."""
    history = site.history.get("fuse", ())
    return (Fuse(history[-1].value), format_place(history[-1])) if history else (Fuse.AUTO, "")


def _native_us(gemm: GemmPlan) -> float:
    return next((each.us for each in gemm.times if each.kernel == NATIVE), 0.0)


def _sizes(plan: Plan, site: SitePlan) -> SiteSizes:
    return SiteSizes(site.site.rows.at(plan.batch_size), site.site.k, site.site.n)


def _least_us(plan: Plan, site: SitePlan, gemm: GemmPlan) -> float:
    """The least time that the device needs for a GEMM, by its bytes and FLOPs."""
    part = gemm_part(gemm.gemm, _sizes(plan, site), gemm.kernel, gemm.operands, gemm.accumulation)
    return bound_us(part, spec_of(plan.target))


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts that stay the compiler's, those that differ only in numbers in one group."""
    reasons: dict[tuple[object, ...], str] = {}  # sites that are alike share their GEMMs

    def key(part: _Part) -> tuple[object, ...]:
        site, own = part.site.site, (id(part.site.gemms), part.site.region_note, part.norms)
        if own not in reasons:
            reasons[own] = _FIGURES.sub("", part.reason)
        return pattern_of(site.name), site.k, site.n, reasons[own]

    return grouped((part for part in parts if part.compiler), key)


def _piece(group: Sequence[_Part], whole: float, timed: bool, names: Collection[str]) -> Piece:
    amount = sum(part.compiler for part in group)
    first = max(group, key=lambda part: part.compiler)
    around = surroundings_of(first.site.site)
    norms = dict.fromkeys(words for words in (around.before, around.after) if words)
    what = [*(gemm.gemm.value for gemm in first.native), *(norms if first.norms else ())]
    return Piece(
        name=name_of_group([part.site for part in group], names),
        count=len(group),
        what=", ".join(what),
        us=round(amount, 3) if timed else None,
        share=round(amount / whole, 4) if whole else 0.0,
        at_least=any(part.bounded for part in group),
        reason=first.reason,
    )


def _why_not_fused(site: SitePlan) -> str:
    if site.site.blocked is not None:
        return "its site cannot be patched"
    if site.region_note:
        return "no kernel takes them along" if site.region_note == NOTHING_AROUND else site.region_note
    wanted, place = _fuse(site)
    by = f" by {place}" if place else ""
    if wanted is Fuse.NEVER:
        return f"fuse: never{by}"
    if waits_for_evidence(site.gemms):
        return f"fuse: {wanted.value}{by} waits for the profile as well"
    if not site.fp8 and site.timing is None:
        return f"fuse: {wanted.value}{by} fuses around GEMMs in BF16 where times are known"
    if site.fp8 and not site.recipe.is_chain:
        return "this recipe is none of a chain's, around which kernels can fuse"
    return f"fuse: {wanted.value}{by}, and by the measurements fusing gains nothing"

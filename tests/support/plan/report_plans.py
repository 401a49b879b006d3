"""Small plans by hand, with every figure that a page shows."""

from __future__ import annotations

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.kernels.measurements.parts import PartKind, TimeSource
from loka.numerics.enums import Accumulation, Format, Gemm
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import NATIVE, Evidence, GemmPlan, InteractionPlan, Plan, SitePlan, SiteTiming, StepTime
from loka.policy.settings import Assignment
from loka.probe.profile.profile import Interval, Verdict

E4M3, E5M2 = OperandRecipe(), OperandRecipe(format=Format.E5M2)


def evidence_of(mere: float, verdict: Verdict = Verdict.SAFE, ne: float | None = None) -> Evidence:
    """Evidence with a MERE, and an SQNR of 30 dB."""
    change = Interval(ne, ne / 2, 2 * ne) if ne is not None else None
    return Evidence(
        Interval(mere, 0.9 * mere, 1.1 * mere), Interval(30.0, 29.0, 31.0), 16, 200, 20, verdict, "", change
    )


def gemm_plan(
    gemm: Gemm, operands: tuple[OperandRecipe, OperandRecipe] | None, evidence: Evidence | None = None
) -> GemmPlan:
    """A GEMM in FP8, or in the model's own dtype."""
    if operands is None:
        return GemmPlan(gemm, NATIVE, None, None, "keep by shop.yaml:9", evidence=evidence)
    return GemmPlan(gemm, "torch.scaled_mm", operands, Accumulation.PRECISE, "fp8 by shop.yaml:5", evidence=evidence)


def site_plan(
    name: str,
    fp8: bool = True,
    us: float | None = 10.0,
    as_is_us: float = 20.0,
    without_fp8_us: float | None = None,
    share: float = 0.1,
    mere: float | None = 0.1,
    region: tuple[str, ...] = (),
    source: TimeSource = TimeSource.MEASURED,
    verdict: Verdict = Verdict.SAFE,
    recipe: tuple[OperandRecipe, OperandRecipe] = (E4M3, E4M3),
    budget: float = 0.2,
) -> SitePlan:
    """A linear with three GEMMs, all of them in FP8 or none; without FP8 it takes `as_is_us` unless told."""
    site = Site(
        name, GemmKind.LINEAR, name, f"{name}.weight", None, RowCount(1), 64, 32, 1, 1, share, True, (), (), ""
    )  # fmt: skip
    found = evidence_of(mere, verdict) if mere is not None else None
    native_us = us if not fp8 else as_is_us if without_fp8_us is None else without_fp8_us
    timing = None
    if us is not None and native_us is not None:
        timing = SiteTiming(_step(us, source), _step(native_us, source), _step(as_is_us, source))
    history = {"budget.mere": (Assignment("budget.mere", str(budget), "defaults", "shop.yaml", 3),)}
    gemms = tuple(gemm_plan(gemm, recipe if fp8 else None, found) for gemm in Gemm)
    return SitePlan(site, gemms, history, region, timing=timing)


def interaction(
    owner: str, us: float = 5.0, as_is_us: float | None = 50.0, sites: tuple[str, ...] = ()
) -> InteractionPlan:
    """A mixing layer with its own kernels."""
    return InteractionPlan(
        work=PartKind.FM_INTERACTION,
        owner=owner,
        what="a mixing layer of 4 embeddings",
        form="",
        samples=64,
        columns=32,
        calls=1,
        sites=sites,
        chosen=_step(us, TimeSource.MEASURED),
        as_is=_step(as_is_us, TimeSource.MEASURED) if as_is_us is not None else None,
    )


def plan_of_sites(*sites: SitePlan, interactions: tuple[InteractionPlan, ...] = ()) -> Plan:
    """A plan of these sites, for an H100."""
    return Plan(
        name="shop",
        target="h100",
        batch_size=64,
        policy_files=(("shop.yaml", "ab" * 32),),
        sites=sites,
        bindings=(),
        loka_version="0.1.0",
        profile=("profiles/shop.safetensors", "ef" * 32),
        measurements=("h100.jsonl of LoKA", "cd" * 32),
        interactions=interactions,
    )


def _step(us: float, source: TimeSource) -> StepTime:
    return StepTime(us / 4, 3 * us / 4, source)

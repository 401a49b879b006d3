"""Hand-made sites and settings, so that planning is tested without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.numerics.enums import Compute, Format, Fuse, Gemm, Operand
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import Plan, SitePlan
from loka.plan.resolve import resolve
from loka.policy.settings import Assignment, Budget, GemmSettings, SiteSettings
from loka.probe.profile.profile import (
    Estimate,
    Finding,
    Interval,
    OperandSummary,
    Profile,
    Quantiles,
    Shares,
    SiteProfile,
)
from loka.probe.stats.site_stats import LOWEST, MAGNITUDE_BINS, HistogramView
from tests.support.plan.plan_costs import CHAIN

MakeSite = Callable[..., Site]
MakeSettings = Callable[..., SiteSettings]
MakePlan = Callable[..., Plan]
MakeKnown = Callable[..., ProfiledSites]
MakeEstimate = Callable[..., Estimate]
WriteModule = Callable[[str, str], Path]

_SITE = Site(
    name="layers.0.fmb.0",
    kind=GemmKind.LINEAR,
    owner="layers.0",
    weight="layers.0.fmb.0.weight",
    bias="layers.0.fmb.0.bias",
    rows=RowCount(1),
    k=2048,
    n=1024,
    calls=1,
    calls_eval=1,
    share=0.25,
    input_grad=True,
    fed_by=("layer_norm",),
    followed_by=("layer_norm", "silu"),
    where="",
)


@pytest.fixture
def make_site() -> MakeSite:
    """A site with some of its fields changed."""

    def make(name: str = _SITE.name, **changes: object) -> Site:
        return replace(_SITE, name=name, **changes)

    return make


@pytest.fixture
def make_settings() -> MakeSettings:
    """Settings that ask the same compute of every GEMM, set by one rule."""

    def make(
        compute: Compute = Compute.FP8,
        line: int = 14,
        names_one_site: bool = False,
        recipe: OperandRecipe | None = None,
        **gemms: Compute,
    ) -> SiteSettings:
        operands = (recipe or OperandRecipe(),) * 2
        asked = {gemm: gemms.get(gemm.value, compute) for gemm in Gemm}
        history = {
            f"{gemm.value}.compute": (
                Assignment(f"{gemm.value}.compute", "auto", "built-in", "", 0),
                Assignment(f"{gemm.value}.compute", value.value, "rule 1: x", "p.yaml", line, names_one_site),
            )
            for gemm, value in asked.items()
        }
        return SiteSettings({gemm: GemmSettings(value, operands) for gemm, value in asked.items()}, history=history)

    return make


@pytest.fixture
def chain_settings(make_settings: MakeSettings) -> MakeSettings:
    """Settings of the transposed recipe, or of other pairs of operands."""

    def make(
        compute: Compute = Compute.FP8,
        fuse: Fuse = Fuse.ALWAYS,
        min_speedup: float = 1.05,
        pairs: Mapping[Gemm, tuple[OperandRecipe, OperandRecipe]] = CHAIN,
        **more: object,
    ) -> SiteSettings:
        settings = make_settings(compute, **more)
        gemms = {gemm: replace(each, operands=pairs[gemm]) for gemm, each in settings.gemms.items()}
        return replace(settings, gemms=gemms, fuse=fuse, budget=Budget(min_speedup=min_speedup))

    return make


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Writes a module into a current folder of the test's own, which it gives; no other test imports it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = []

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        names.append(name)
        return tmp_path

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def make_plan(make_settings: MakeSettings) -> MakePlan:
    """A plan of some sites that all have the same settings."""

    def make(
        *sites: Site, settings: SiteSettings | None = None, known: ProfiledSites | None = None, **changes: object
    ) -> Plan:
        wanted = settings or make_settings()
        situation = Situation("h100", 4096, known=known)
        decided: tuple[SitePlan, ...] = resolve(sites, [wanted] * len(sites), situation, {})
        plan = Plan(
            name="ranker",
            target="h100",
            batch_size=4096,
            policy_files=(("ranker.yaml", "0" * 64),),
            sites=decided,
            bindings=(),
            loka_version="0.1.0",
            profile=(known.name, known.sha256) if known is not None else None,
        )
        return replace(plan, **changes)

    return make


@pytest.fixture
def make_estimate() -> MakeEstimate:
    """An estimate of e4m3 rowwise whose intervals reach `mere_by` and `sqnr_by` to both sides."""

    def make(
        gemm: Gemm = Gemm.FPROP,
        mere: float = 0.02,
        sqnr: float = 30.0,
        recipe: OperandRecipe | None = None,
        mere_by: float = 0.01,
        sqnr_by: float = 0.5,
    ) -> Estimate:
        operands = (recipe or OperandRecipe(),) * 2
        return Estimate(
            gemm,
            operands,
            Interval(mere, mere - mere_by, mere + mere_by),
            Interval(sqnr, sqnr - sqnr_by, sqnr + sqnr_by),
            16,
        )

    return make


def _operand(operand: Operand, amax: float) -> OperandSummary:
    counts = [0] * MAGNITUDE_BINS
    for exponent, count in ((-6, 1), (-3, 1000), (0, 10)):  # halves of [2^-6, 2^-5), [2^-3, 2^-2) and [1, 2)
        counts[2 * (exponent - LOWEST[operand])] = count
    weight = operand is Operand.WEIGHT
    return OperandSummary(
        operand=operand,
        width=2048,
        calls=0 if weight else 40,
        rows=1024 if weight else 163840,
        sampled=1024 if weight else 20480,
        nonfinite=0,
        nonfinite_calls=0,
        zeros=0.125,
        amax=amax,
        usual_amax=amax / 2,
        rms=0.25,
        magnitudes=tuple(counts),
        shares=() if weight else (Shares(HistogramView.ROWWISE, Format.E4M3, 0.01, 0.02),),
        row_spread=Quantiles(1.0, 2.0, 3.0, 4.0, 5.0),
        block_spread=None,
        covariance_error=0.0,
    )


@pytest.fixture
def make_known() -> MakeKnown:
    """A profile of some sites, each given as its name and estimates, or with its own operands."""

    def make(
        sites: dict[str, tuple[Estimate, ...]],
        amax: float = 3.5,
        seen: tuple[Operand, ...] = tuple(Operand),
        findings: tuple[Finding, ...] = (),
        k: int = 2048,
        n: int = 1024,
    ) -> ProfiledSites:
        operands = tuple(_operand(operand, amax) for operand in seen)
        profile = Profile(
            name="ranker",
            model="pkg:build",
            loka_version="0.1.0",
            created="2026-01-01T00:00:00Z",
            steps=4000,
            every=100,
            samples=40,
            batch_size=4096,
            sites=tuple(SiteProfile(name, k, n, 4096, operands, estimates) for name, estimates in sites.items()),
            findings=findings,
        )
        return ProfiledSites.of(profile, "profiles/ranker.safetensors", "b" * 64, "ranker.yaml:9:10")

    return make

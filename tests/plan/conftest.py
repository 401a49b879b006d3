"""Hand-made sites and settings, so that planning is tested without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loka.numerics.names import Compute, Gemm
from loka.plan.plan import Plan, SitePlan, Target
from loka.plan.resolve import Situation, resolve
from loka.policy.settings import Assignment, GemmSettings, OperandRecipe, SiteSettings
from loka.sites.site import Kind, Rows, Site

MakeSite = Callable[..., Site]
MakeSettings = Callable[..., SiteSettings]
MakePlan = Callable[..., Plan]

_SITE = Site(
    name="layers.0.fmb.0",
    kind=Kind.LINEAR,
    owner="layers.0",
    weight="layers.0.fmb.0.weight",
    bias="layers.0.fmb.0.bias",
    rows=Rows(1),
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
def make_plan(make_settings: MakeSettings) -> MakePlan:
    """A plan of some sites that all have the same settings."""

    def make(*sites: Site, settings: SiteSettings | None = None, **changes: object) -> Plan:
        wanted = settings or make_settings()
        decided: tuple[SitePlan, ...] = resolve(sites, [wanted] * len(sites), Situation(Target.H100, 4096), {})
        plan = Plan(
            name="ranker",
            target=Target.H100,
            batch_size=4096,
            policy_files=(("ranker.yaml", "0" * 64),),
            sites=decided,
            bindings=(),
            loka_version="0.1.0",
        )
        return replace(plan, **changes)

    return make

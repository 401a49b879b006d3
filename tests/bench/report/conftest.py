"""Reports with every section, of names that a page has to survive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.quality.pair_file import KeptPairs, RunFacts
from loka.bench.quality.training import PairResult, TrainResult
from loka.bench.report.loss_curves import KeptRuns, run_chart
from loka.bench.report.measured_steps import MeasuredSteps, Step
from loka.bench.report.page import Report, gather
from loka.mods.adaptation import Unchanged
from loka.numerics.enums import Operand
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import Gain, ModPlan, Skipped
from loka.plan.planner import Planned
from loka.probe.profile.profile import Finding, SiteProfile
from tests.support.plan.report_plans import E4M3, E5M2, interaction, plan_of_sites, site_plan
from tests.support.plan.shop_profile import operand, profile_of

SCRIPT = "<script>alert(1)</script>"
HOSTILE = (
    SCRIPT,
    '"><img src=x onerror=alert(2)>',
    "' onmouseover='alert(3)",
    "</style><svg onload=alert(4)>",
    "]]>-->&amp;&lt;",
    "{{ 7*7 }}{% raw %}",
    "a\nb\x1b[31m\u202ertl\u2028",
    "javascript:alert(5)",
    "wide_" * 60,
)


def _runs(text: str) -> KeptRuns:
    def run(ne: float, *losses: float) -> TrainResult:
        return TrainResult(ne, 0.75, 0.5, 1.0, 10, 81920, 1.0, losses)

    pairs = tuple(
        PairResult(seed, run(0.8, 0.7, 0.65, 0.6), run(0.8 + seed / 1e4, 0.7, 0.651, 0.6 + seed / 1e3), "")
        for seed in range(4)
    )
    facts = RunFacts("", text, "model", 0.02)
    single = run_chart("train", KeptPairs(Path(f"build/train/{text}.jsonl"), facts, pairs[:1]))
    several = run_chart("compare", KeptPairs(Path("build/compare/shop.jsonl"), facts, pairs))
    assert single is not None
    assert several is not None
    return KeptRuns((single, several), (f"build/compare/{text}.jsonl",))


def _report(names: tuple[str, ...], text: str, wide: str) -> Report:
    """A report with every section; `names` are those of sites, the others are of all that has a name."""
    sites = [
        site_plan(name, fp8=bool(number % 3), mere=0.05 + number / 50, share=0.1, region=(text,) * (number % 2),
                  recipe=((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2))[number % 3])
        for number, name in enumerate(names)
    ]  # fmt: skip
    sites += [site_plan(f"layers.{number}.{name}", share=0.01) for number in range(3) for name in names]
    mod = ModPlan(text, f"mod 1: {text}", f"{text}:3", False, "", unchanged=(Unchanged(text, text),))
    plan = replace(
        plan_of_sites(*sites, interactions=(interaction(text),)),
        name=text,
        policy_files=((text, "ab" * 32),),
        mods=(replace(mod, gain=Gain(1.0, 0.1)), replace(mod, exact=True, use=wide)),
        skipped=(Skipped(text, text, 0.1),),
    )
    profile = replace(
        profile_of({}),
        model=text,
        sites=tuple(
            SiteProfile(site.site.name, 64, 32, 64, tuple(operand(each, 64) for each in Operand), ()) for site in sites
        ),
        findings=(Finding(text, text, text, wide),),
    )
    measured = (
        Step(mode="train", failure="", variant=text, launch="loop", step_ms=20.0, ratio=1.7),
        Step(mode="train", failure="", variant="bf16", launch="loop", step_ms=40.0, ratio=1.0),
        Step(mode="train", failure="", variant=wide, launch="captured", step_ms=40.0),
    )
    steps = MeasuredSteps(text, text, "2026-01-01", text, text, 64, "bf16", measured)
    known = ProfiledSites.of(profile, text, "ef" * 32)
    return gather(Planned(plan, known), text, _runs(text), steps)


@pytest.fixture(scope="session")
def hostile() -> Report:
    """A report in which every text that a model, a policy or a file can choose is hostile."""
    return _report(HOSTILE, SCRIPT, "wide_" * 60)


@pytest.fixture(scope="session")
def plain() -> Report:
    """A report of usual names."""
    return _report(("up", "down"), "shop", "loka-bf16")


@pytest.fixture(scope="session")
def bare() -> Report:
    """A report of a plan of which nothing is known."""
    plan = replace(plan_of_sites(), measurements=None)
    return gather(Planned(plan, None), "policies/shop.yaml", KeptRuns((), ()))

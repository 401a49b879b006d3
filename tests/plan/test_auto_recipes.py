"""`scaling: auto` in plans: for each chain the fastest recipe within the budget, never slower than any one of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from loka.graph.trace.tracer import Tracer
from loka.kernels.measurements.parts import Part, PartKind
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Gemm, Scaling
from loka.plan.examine import Examined, assumed_safe, examine, tracer_of
from loka.plan.plan import Plan, SitePlan
from loka.plan.plan_of import plan_of
from loka.plan.totals import total_time
from loka.probe.profile.profile import Estimate, Interval
from tests.support.plan.plan_costs import MadeUp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.LayerNorm(512),
            nn.Linear(512, 1024),
            nn.LayerNorm(1024),
            nn.SiLU(),
            nn.Linear(1024, 1024),
            nn.LayerNorm(1024),
            nn.SiLU(),
            nn.Linear(1024, 512),
        )
        self.alone = nn.Linear(512, 2048)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.alone(self.tower(x).cumsum(1))
        return made


def inputs(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 512),)


POLICY = f"""\
version: 1
name: tower
model: {{{{factory: "{__name__}:Model", inputs: "{__name__}:inputs", batch_size: 8192}}}}
defaults: {{{{compute: {{compute}}, {{recipe}}}}}}
"""
AUTO = "scaling: auto"
ROWS = "scaling: rowwise, power_of_two: true, requantize_transpose: true"
SINGLES = (ROWS, "scaling: rowwise", "scaling: tensorwise")
IN_CHAIN = [f"tower.{place}" for place in (1, 4, 7)]

PlanFor = Callable[..., Plan]


@pytest.fixture(scope="module")
def plan_for(tmp_path_factory: pytest.TempPathFactory) -> PlanFor:
    """The plan of a chain of three linears and one apart, every recipe being safe, or not safe where `unsafe` says.

    The model is examined and traced once for a policy.
    """
    policy = tmp_path_factory.mktemp("open") / "p.yaml"

    @cache
    def examined(recipe: str, compute: str) -> tuple[Examined, Tracer]:
        policy.write_text(POLICY.format(recipe=recipe, compute=compute))
        found = examine(load_policy(policy))
        return found, tracer_of(found)

    def make(
        recipe: str, costs: MadeUp | None, compute: str = "auto", unsafe: Callable[..., bool] | None = None
    ) -> Plan:
        found, tracer = examined(recipe, compute)
        known = assumed_safe(found)
        if unsafe is not None:
            bad = Interval(0.9, 0.9, 0.9)

            def judged(name: str, each: Estimate) -> Estimate:
                return replace(each, mere=bad) if unsafe(name, each.gemm, each.operands) else each

            sites = {
                name: replace(site, estimates=tuple(judged(name, each) for each in site.estimates))
                for name, site in known.sites.items()
            }
            known = replace(known, sites=sites)
        return plan_of(found, known, costs, tracer=tracer)

    return make


def recipe_of(plan: Plan, name: str) -> str:
    return site_of(plan, name).history["scaling"][-1].value


def site_of(plan: Plan, name: str) -> SitePlan:
    return next(each for each in plan.sites if each.site.name == name)


def time_of(plan: Plan) -> float:
    total = total_time(plan)
    assert total is not None
    return total.us


def drawn(seed: int) -> Callable[[Part], float]:
    """A factor for each kind of work and recipe, the same whenever it is asked for."""
    return lambda part: random.Random(f"{seed} {part.work} {part.recipe}").uniform(0.3, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["auto", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_slower_than_any_single_recipe(seed: int, compute: str, plan_for: PlanFor) -> None:
    auto = plan_for(AUTO, MadeUp(factor=drawn(seed)), compute)
    singles = [time_of(plan_for(single, MadeUp(factor=drawn(seed)), compute)) for single in SINGLES]
    assert time_of(auto) <= min(singles) * (1 + 1e-9)


def test_a_chain_and_a_site_apart_have_recipes_of_their_own(plan_for: PlanFor) -> None:
    def factor(part: Part) -> float:
        return 50.0 if "rowwise" in part.recipe and 2048 in (part.rows, part.columns, part.contraction) else 1.0

    plan = plan_for(AUTO, MadeUp(factor=factor), "fp8")
    assert {recipe_of(plan, name) for name in IN_CHAIN} == {"rowwise, powers of two, transposed copies"}
    assert recipe_of(plan, "alone") == "tensorwise"
    said = site_of(plan, "alone").history["scaling"][-1].source
    assert "by the time of its chain: rowwise, powers of two, transposed copies: " in said
    assert said.endswith(" us")


def test_a_recipe_over_budget_is_not_taken(plan_for: PlanFor) -> None:
    def unsafe(name: str, gemm: Gemm, operands: tuple) -> bool:
        return operands[0].scaling is Scaling.ROWWISE or operands[0].transposed

    costs = MadeUp(factor=lambda part: 1.0 if part.work is PartKind.GEMM else 1e-6)
    plan = plan_for(AUTO, costs, unsafe=unsafe)
    fp8 = [gemm for site in plan.sites for gemm in site.gemms if gemm.fp8]
    assert fp8
    assert {each.scaling for gemm in fp8 for each in gemm.operands} == {Scaling.TENSORWISE}
    forced = plan_for(AUTO, costs, "fp8", unsafe)
    assert all("over budget" not in gemm.reason for site in forced.sites for gemm in site.gemms)


def test_without_measurements_it_is_the_recipe_with_most_in_fp8(plan_for: PlanFor) -> None:
    plan = plan_for(AUTO, None)
    assert all(gemm.fp8 for site in plan.sites for gemm in site.gemms)
    assert all(site.history["scaling"][-1].value == "auto" for site in plan.sites)

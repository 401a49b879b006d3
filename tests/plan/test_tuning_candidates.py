"""Candidate plans: the whole model one way, single chains switched, and never more than the error budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Gemm, Scaling
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import NATIVE, Plan
from loka.plan.tuning import candidates as candidates_module
from loka.plan.tuning.candidates import NATIVE_TITLE, STANDING_TITLE, Candidate, Candidates
from loka.plan.tuning.choices import Choice, SiteChoice, SitePrecision
from loka.probe.profile.profile import Interval
from tests.support.plan.plan_costs import SCALED_MM, MadeUp
from tests.support.plan.tuned import safe_policy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 1024)
        self.norm = nn.LayerNorm(1024)
        self.down = nn.Linear(1024, 512)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(nn.functional.silu(self.norm(self.up(x)))).cumsum(1)
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(x)
        return made


def inputs(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 512),)


POLICY = f"""\
version: 1
name: blocks
model: {{factory: "{__name__}:Model", inputs: "{__name__}:inputs", batch_size: 8192}}
defaults: {{DEFAULTS}}
"""
AUTO = "compute: auto, scaling: auto"
RECIPES = ("rowwise, powers of two, transposed copies", "rowwise", "tensorwise")
FAST_FP8 = {NATIVE: 3.0, SCALED_MM: 1.0}
Make = Callable[..., Candidates]


def close_head(part: Part) -> float:
    """FP8 gains much in the blocks, and next to nothing in the head."""
    return 2.5 if part.work is PartKind.GEMM and part.recipe and 256 in (part.columns, part.contraction) else 1.0


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """The candidates of three equal blocks and a head, by made-up times."""
    folder = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patch:

        def made(
            defaults: str = AUTO,
            costs: MadeUp | None = None,
            judged: Callable[[ProfiledSites], ProfiledSites] = lambda known: known,
        ) -> Candidates:
            times = costs or MadeUp(FAST_FP8, close_head)
            patch.setattr(candidates_module, "open_measurements", lambda policy: times)
            return Candidates(safe_policy(folder / "p.yaml", POLICY.replace("DEFAULTS", defaults), judged))

        yield made


@pytest.fixture(scope="module")
def usual(make: Make) -> tuple[Candidates, tuple[Candidate, ...]]:
    """Those where FP8 gains, and all that were found of them."""
    candidates = make()
    return candidates, candidates.found()


@pytest.fixture(scope="module")
def slow(make: Make) -> tuple[Candidate, ...]:
    """Those where FP8 GEMMs take ten times as long as they could."""
    return make(costs=MadeUp(factor=slow_fp8)).found()


def titled(found: tuple[Candidate, ...], title: str) -> Candidate:
    return next(each for each in found if each.title == title)


def fp8(plan: Plan) -> set[tuple[str, Gemm]]:
    return {(site.site.name, gemm.gemm) for site in plan.sites for gemm in site.gemms if gemm.fp8}


def slow_fp8(part: Part) -> float:
    return 10.0 if part.work is PartKind.GEMM and part.recipe else 1.0


def test_the_model_one_way_and_its_groups_switched(usual) -> None:
    _, found = usual
    titles = [each.title for each in found]
    assert titles[:2] == [STANDING_TITLE, NATIVE_TITLE]
    assert len(set(titles)) == len(titles)
    assert len({each.decisions for each in found}) == len(found)
    native = titled(found, NATIVE_TITLE)
    assert (native.sites_fp8, native.plan.bindings) == (0, ())
    fused = titled(found, "BF16 in fused kernels")
    assert fused.sites_fp8 == 0
    assert fused.plan.bindings
    switched = [each for each in found if each.title.startswith("head: ")]
    standing = titled(found, STANDING_TITLE)
    assert switched
    for each in switched:
        rest = {name for name, _ in fp8(each.plan) ^ fp8(standing.plan)}
        assert rest <= {"head"}, each.title


def test_the_most_promising_come_first(usual) -> None:
    standing, _, *others = usual[1]
    assert standing.predicted_us is not None
    assert all(each.predicted_us is not None for each in others)

    def kind(candidate: Candidate) -> int:
        predicted = candidate.predicted_us or 0.0
        if candidate.choice.is_switch:
            return 1 if predicted != standing.predicted_us else 2
        near = predicted <= 1.25 * (standing.predicted_us or 0.0)
        return 0 if near or candidate.title == "BF16 in fused kernels" else 3

    kinds = [kind(each) for each in others]
    assert kinds == sorted(kinds)
    assert {0, 1, 3} <= set(kinds)
    for each in set(kinds):
        predicted = [other.predicted_us for other in others if kind(other) == each]
        assert predicted == sorted(predicted)  # type: ignore[type-var]


def test_alike_layers_are_one_group(usual) -> None:
    groups = {group.name: group.sites for group in usual[0].groups()}
    assert groups["head"] == ("head",)
    inner = [name for name in groups if name != "head"]
    assert sorted(name for each in inner for name in groups[each]) == sorted(
        f"blocks.{number}.{part}" for number in range(3) for part in ("up", "down")
    )
    assert any(len(groups[each]) > 2 for each in inner)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_wherever_it_is_safe_though_it_be_slower(recipe: str, slow) -> None:
    assert fp8(titled(slow, STANDING_TITLE).plan) == set()
    forced = titled(slow, f"FP8 wherever it is safe, {recipe}").plan
    assert {name for name, _ in fp8(forced)} == {site.site.name for site in forced.sites}
    assert {site.history["scaling"][-1].value for site in forced.sites} == {recipe}
    assert forced.sites[0].gemms[0].reason.endswith("slower than BF16 here")


def test_no_candidate_runs_what_is_over_its_budget(make: Make) -> None:
    bad = Interval(0.9, 0.9, 0.9)

    def judged(known: ProfiledSites) -> ProfiledSites:
        head = known.sites["head"]
        unsafe = tuple(
            replace(each, mere=bad)
            if each.gemm is Gemm.DGRAD or any(operand.scaling is Scaling.TENSORWISE for operand in each.operands)
            else each
            for each in head.estimates
        )
        return replace(known, sites={**known.sites, "head": replace(head, estimates=unsafe)})

    found = make(judged=judged).found()
    ran = {(gemm.gemm, gemm.operands) for each in found for site in each.plan.sites if site.site.name == "head"
           for gemm in site.gemms if gemm.fp8}  # fmt: skip
    assert ran
    assert Gemm.DGRAD not in {gemm for gemm, _ in ran}
    for each in found:
        for site in each.plan.sites:
            assert not any(gemm.over_budget for gemm in site.gemms), each.title


def test_a_switch_that_is_predicted_to_cost_much_is_left_out(slow) -> None:
    titles = [each.title for each in slow]
    assert not any(title.startswith("head: FP8") for title in titles)
    assert any(title.startswith("FP8 wherever") for title in titles)


def test_without_time_nothing_is_switched(usual) -> None:
    titles = [each.title for each in usual[0].found(end=0.0, clock=lambda: 1.0)]
    assert NATIVE_TITLE in titles
    assert not any(": " in title for title in titles)


def test_what_a_policy_forces_has_one_plan(make: Make) -> None:
    (only,) = make("compute: fp8, scaling: rowwise, fuse: always").found()
    assert (only.title, only.sites_fp8) == (STANDING_TITLE, 7)


def test_choices_are_combined(usual) -> None:
    candidates, found = usual
    native = titled(found, NATIVE_TITLE)
    only_head = Choice((SiteChoice(SitePrecision.FP8, sites=("head",)),))
    made = candidates.combined([native.choice, only_head], "both")
    assert made is not None
    assert {name for name, _ in fp8(made.plan)} == {"head"}
    assert made.title == "both"

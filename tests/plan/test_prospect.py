"""Plans without FP8 say what it would bring: with evidence, or in larger batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka.cli.tables.explain_tables import show_site
from loka.kernels.measurements.parts import TimeSource
from loka.plan.planner import Planned, planned
from loka.plan.totals import format_time_sources, total_time
from loka.plan.view.explain import explain
from loka.plan.view.table import group_sites, slowed_lines
from loka.plan.view.verdict import step_table, verdict
from tests.support.plan.report_plans import plan_of_sites, site_plan

pytestmark = pytest.mark.slow


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.SiLU(), nn.Linear(2048, 2048))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(128, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.relu(expert(x)) for expert in self.experts]).sum(0)


def experts() -> nn.Module:
    return Experts()


def experts_inputs(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 128),)


def inputs(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 2048),)


def narrow_inputs(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 32),)


ASSUMED = "if a profile finds it safe (loka probe)"

PlannedFor = Callable[..., Planned]


@pytest.fixture
def no_shipped_measurements() -> None:
    """These plans are by the measurements that ship."""


@pytest.fixture
def planned_for(tmp_path: Path) -> PlannedFor:

    def make(
        batch: int, defaults: str = "scaling: auto", model: str = "build", inputs: str = "inputs", more: str = ""
    ) -> Planned:
        policy = tmp_path / "p.yaml"
        policy.write_text(
            f'version: 1\nname: p\nmodel: {{factory: "{__name__}:{model}", inputs: "{__name__}:{inputs}", '
            f"batch_size: {batch}}}\ndefaults: {{{defaults}}}\n{more}"
        )
        return planned(policy, gains=True, prospects=True)

    return make


def test_without_a_profile_it_is_what_safe_evidence_would_bring(planned_for: PlannedFor) -> None:
    found = planned_for(16384)
    assert found.plan.share_fp8 == 0
    assert found.prospect is not None
    assert (found.prospect.batch_size, found.prospect.assumed) == (16384, True)
    assert found.prospect.speedup > 1.05
    assert found.prospect.describe(16384).startswith(
        "what FP8 would bring here, if a profile finds it safe (loka probe): "
    )
    forced = planned_for(16384, "compute: fp8, scaling: auto")
    assert forced.prospect is None  # it has FP8


def test_a_small_batch_hears_of_a_larger_one(planned_for: PlannedFor) -> None:
    found = planned_for(256).prospect
    assert found is not None
    assert found.batch_size > 256
    assert found.speedup >= 1.05
    assert found.describe(256).startswith(f"FP8 would hardly gain at batch size 256; at {found.batch_size}, ")
    larger = planned_for(found.batch_size).prospect
    assert larger is not None
    assert (larger.us, larger.share_fp8) == (found.us, found.share_fp8)  # as a plan there says itself


def test_layers_that_are_too_small_hear_so(planned_for: PlannedFor) -> None:
    found = planned_for(256, model="narrow", inputs="narrow_inputs").prospect
    assert found is not None
    assert found.describe(256) == (
        f"FP8 would hardly gain at batch sizes up to 8192, {ASSUMED}: the GEMMs are too small"
    )


def test_the_closing_words_name_what_exact_mods_gain(planned_for: PlannedFor) -> None:
    made = planned_for(256, model="experts", inputs="experts_inputs")
    left = planned_for(256, model="experts", inputs="experts_inputs", more="mods: {auto: false}\n")
    assert [len(each.plan.mods) for each in (made, left)] == [1, 0]
    alone, merged = total_time(left.plan), total_time(made.plan)
    assert alone is not None
    assert merged is not None
    gains = (
        f"{merged.us:.1f} us instead of {alone.us:.1f} us, {alone.us / merged.us:.2f}x; FP8 would hardly gain more at "
    )
    for found, words in ((made, "gains, as planned"), (left, "would gain if mods named it")):
        assert found.prospect is not None
        assert found.prospect.describe(256).startswith(f"what merge_siblings {words}: {gains}")
    beside = f"; merge_siblings gains {alone.us / merged.us:.2f}x beside it; nothing in FP8"
    assert beside in verdict(made.plan)
    assert "merge_siblings" not in verdict(left.plan)


def test_a_plan_with_fp8_comes_with_what_fusing_alone_takes(planned_for: PlannedFor) -> None:
    """What fusing gains is not credited to FP8, which makes small layers slower."""
    small, kept = planned_for(256, "compute: fp8").plan, planned_for(256, "compute: keep").plan
    total, alone = total_time(small), total_time(kept)
    assert total is not None
    assert alone is not None
    assert total.as_is_us == alone.as_is_us
    assert total.without_fp8_us <= alone.us < alone.as_is_us  # the second linear has no region of its own in BF16
    assert (alone.without_fp8_us, alone.by_fp8) == (alone.us, 1.0)
    assert f"FP8 itself makes it slower, {total.by_fp8:.2f}x; " in verdict(small)
    assert len(slowed_lines(small)) == 2
    large = planned_for(65536, "compute: fp8, scaling: auto").plan
    total = total_time(large)
    assert total is not None
    assert 1.05 < total.by_fp8 < total.speedup
    assert "FP8 itself gains" in verdict(large)
    assert slowed_lines(large) == []


def test_sites_whose_times_without_fp8_differ_have_rows_of_their_own() -> None:
    names = [f"layers.{number}" for number in range(3)]
    natives = zip(names, (8.0, 8.0, 10.0), strict=True)
    plan = plan_of_sites(*(site_plan(name, without_fp8_us=us) for name, us in natives))
    rows = group_sites(plan, True)
    assert [(row.pattern, row.count, row.without_fp8_us) for row in rows] == [
        ("layers.0, layers.1", 2, "8.0"),  # a glob would match layers.2, too
        ("layers.2", 1, "10.0"),
    ]
    assert slowed_lines(plan) == ["FP8 makes layers.0, layers.1 slower: 10.0 us, without FP8 8.0 us"]


def test_extrapolated_times_are_marked_and_a_total_that_has_more_than_a_few_per_cent_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    beyond, sure = site_plan("gate", us=5.0, source=TimeSource.EXTRAPOLATED), site_plan("expert", us=45.0)
    plan = plan_of_sites(sure, beyond)
    assert [(row.us, row.without_fp8_us, row.as_is_us) for row in group_sites(plan, True)] == [
        ("45.0", "20.0", "20.0"),
        ("~5.0", "~20.0", "~20.0"),
    ]
    total = total_time(plan)
    assert total is not None
    assert total.extrapolated == 0.5  # of the time without FP8, and as it is; 0.1 as planned
    step = step_table(plan)
    assert step is not None
    assert step[1][0] == ("us of the GPU", "~40.0", "~40.0", "~50.0")
    assert format_time_sources(total) == (
        "sites: 1 measured, 1 extrapolated; ~: extrapolated beyond measured sizes, 50.0 % of the time"
    )
    show_site(explain(plan, "gate"))
    assert re.search(r": ~5\.0 us, ~20\.0 us .* extrapolated\n~: extrapolated beyond", capsys.readouterr().out)
    show_site(explain(plan, "expert"))
    assert "~" not in capsys.readouterr().out
    many = plan_of_sites(*(site_plan(f"expert{number}", us=45.0) for number in range(40)), beyond)
    few, step = total_time(many), step_table(many)
    assert few is not None
    assert step is not None
    assert "~" not in "".join(step[1][0])
    assert "~: extrapolated beyond measured sizes, 2.4 % of the time" in format_time_sources(few)


def test_what_is_kept_on_purpose_has_no_prospect(planned_for: PlannedFor) -> None:
    assert planned_for(16384, "compute: keep, fuse: always").prospect is None


@pytest.mark.parametrize("more", ["budget: {ne_percent: 0.02}\n", ""])
def test_no_batch_size_is_blamed_for_what_evidence_keeps(more: str, planned_for: PlannedFor) -> None:
    """Without a profile nothing is known of NE, so that a budget of it keeps all GEMMs at any batch size."""
    found = planned_for(256, more=more)
    assert found.plan.share_fp8 == 0
    assert (found.prospect is None) == bool(more)

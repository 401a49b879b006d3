"""`compute: auto`, by what ships of measurements: compiled BF16, BF16 in fused kernels or FP8, whichever is fastest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka.plan import planner
from loka.plan.plan import LITTLE, Plan
from loka.plan.totals import total_time
from tests.support.plan.tuned import safe_policy

pytestmark = pytest.mark.slow

WIDTHS = (256, 512, 1024, 2048, 4096)


def block(width: int) -> tuple[nn.Module, ...]:
    return nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width)


class Towers(nn.Module):
    """A tower of each width: x (M, 256) -> (M, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Linear(256, width) for width in WIDTHS)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(w), nn.SiLU(), nn.Linear(w, w), nn.LayerNorm(w), nn.SiLU(), nn.Linear(w, w))
            for w in WIDTHS
        )
        self.out = nn.Linear(sum(WIDTHS), 1)

    def forward(self, x: Tensor) -> Tensor:
        made = [tower(enter(x)) for enter, tower in zip(self.enter, self.towers, strict=True)]
        out: Tensor = self.out(torch.cat(made, 1))
        return out


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 256),)


@pytest.fixture
def no_shipped_measurements() -> None:
    """These plans are by the measurements that ship."""


@pytest.fixture(autouse=True)
def forwards_checked_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only times are read from these plans, and all checks of a forward 4096 wide take a minute."""
    monkeypatch.setattr(planner, "tracer_of", partial(planner.tracer_of, quick=True))


def plan_for(folder: Path, target: str, batch: int, compute: str, execution: str) -> Plan:
    """Every GEMM is safe by the profile."""
    text = (
        f'version: 1\nname: towers\nmodel: {{factory: "{__name__}:Towers", inputs: "{__name__}:inputs", '
        f"batch_size: {batch}}}\ntarget: {target}\nexecution: {{mode: {execution}}}\n"
        f"defaults: {{compute: {compute}, scaling: rowwise, power_of_two: true, requantize_transpose: true}}\n"
    )
    return planner.make_plan(safe_policy(folder / "towers.yaml", text))


@pytest.mark.parametrize("execution", ["reduce-overhead", "compiled"])
@pytest.mark.parametrize("batch", [1024, 16384])
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_no_site_is_slower_than_in_bf16_fused_or_compiled(tmp_path, target: str, batch: int, execution: str) -> None:
    plan = plan_for(tmp_path, target, batch, "auto", execution)
    timings = [site.timing for site in plan.sites if site.timing is not None]
    assert len(timings) == len(plan.sites)
    assert not [site.site.name for site in plan.sites if site.slowed_by_fp8]
    assert all(timing.chosen.us <= (1 + LITTLE) * timing.without_fp8.us for timing in timings)
    assert all(timing.chosen.us <= (1 + LITTLE) * timing.as_is.us for timing in timings)
    total = total_time(plan)
    assert total is not None
    assert total.us <= total.without_fp8_us <= total.as_is_us


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_wide_towers_are_in_fp8_and_narrow_ones_in_fused_bf16(tmp_path, target: str) -> None:
    plan = plan_for(tmp_path, target, 16384, "auto", "reduce-overhead")
    forced = plan_for(tmp_path, target, 16384, "fp8", "reduce-overhead")
    fp8 = {site.site.name for site in plan.sites if site.fp8}
    assert {"towers.3.2", "towers.3.5", "towers.4.2", "towers.4.5"} <= fp8
    assert not {"towers.0.2", "towers.0.5"} & fp8
    narrow = next(site for site in plan.sites if site.site.name == "towers.0.2")
    assert narrow.region  # fused, in the model's dtype
    slowed = {site.site.name for site in forced.sites if site.slowed_by_fp8}
    assert slowed
    assert not slowed & fp8

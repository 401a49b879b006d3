"""What nearly continues a region is named with the one thing that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loka.plan.planner import make_plan
from loka.plan.report.format import format_reasons


class Clamps(nn.Module):
    """Clamps at zero behind a linear, behind a norm, and one at another number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).clamp(min=0)
        x = torch.clamp_min(self.norm(self.second(x)), 0.0)
        made: Tensor = self.out(self.third(x).clamp(min=-1))
        return made


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64),)


def test_a_clamp_at_zero_is_named_as_no_relu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(
        f'version: 1\nname: clamps\nmodel: {{factory: "{__name__}:Clamps", inputs: "{__name__}:inputs", '
        "batch_size: 64}\ndefaults: {compute: fp8, scaling: rowwise, fuse: always}\n"
    )
    sites = {site.site.name: site for site in make_plan("policy.yaml").sites}
    reason = "clamp(min=0) comes after it, whose gradient at 0 is 1, not 0 as a ReLU's"
    assert [name for name, site in sites.items() if reason in site.region_note] == ["first", "second"]
    assert sites["second"].region == ("linear", "layer_norm")
    assert f"its region ends: {reason}" in format_reasons(sites["second"])
    assert f"region not replaced: {reason}" in format_reasons(sites["first"])

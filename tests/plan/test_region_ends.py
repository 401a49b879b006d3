"""Where regions end: a clamp at zero is a ReLU, one at another number is not; a region is what kernels take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.graph.canonical.forwards import canonical_forward, is_canonical
from loka.graph.ir import ForwardIR, Shape
from loka.plan.plan import NOTHING_AROUND, SitePlan
from loka.plan.planner import make_plan
from tests.support.models import forward_mods as zoo


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(torch.zeros_like(x), x)


class Clamps(nn.Module):
    """Clamps at zero behind a linear whose products are 0, behind a norm, in a module, and one at another number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 16)
        self.own = nn.Sequential(nn.Linear(64, 64), Relu())
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).clamp(min=0)
        x = torch.clamp_min(self.norm(self.second(x)), 0.0)
        x = self.own(x)
        made: Tensor = self.out(self.third(x).clamp(min=-1))
        return made


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64),)


class Scaled(nn.Module):
    """A number that each call reads anew stands between a linear, or a sum, and what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.scale = nn.LayerNorm(64), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x) * self.scale)
        y = torch.relu((self.second(y) + x) * self.scale)
        made: Tensor = self.third(self.norm(y)).relu()
        return made


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, SitePlan]]:
    """Plans a model of this file, everything in FP8."""

    def plan(model: str) -> dict[str, SitePlan]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "policy.yaml").write_text(
            f'version: 1\nname: ends\nmodel: {{factory: "{__name__}:{model}", inputs: "{__name__}:inputs", '
            "batch_size: 64}\ndefaults: {compute: fp8, scaling: rowwise, power_of_two: true, "
            "requantize_transpose: true, fuse: always}\n"
        )
        return {site.site.name: site for site in make_plan("policy.yaml").sites}

    return plan


def test_a_region_is_what_kernels_take(plan_of: Callable[[str], dict[str, SitePlan]]) -> None:
    sites = plan_of("Scaled")
    assert (sites["first"].region, sites["first"].region_note) == ((), NOTHING_AROUND)
    assert sites["second"].region == ("linear", "add")
    assert sites["third"].region == ("layer_norm", "linear", "relu")


def test_a_clamp_at_zero_is_a_relu(plan_of: Callable[[str], dict[str, SitePlan]]) -> None:
    sites = plan_of("Clamps")
    assert sites["first"].region == ("linear", "relu")
    assert sites["second"].region == ("linear", "layer_norm", "relu")
    assert sites["own.0"].region == ("linear", "relu")
    assert sites["third"].region == ()  # a clamp at another number


class Clamp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x).clamp(min=0)
        return made


@pytest.mark.parametrize("wrong", ["relu({0} * 1.5)", "gelu({0})"])
def test_a_relu_that_gives_other_outputs_than_the_clamp_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    assert is_canonical(zoo.traced(Clamp(), inputs)[0])

    def with_wrong_relus(*args: Any, **kwargs: Any) -> tuple[ForwardIR, Mapping[str, Shape]]:
        forward, shapes = canonical_forward(*args, **kwargs)
        text = f"torch.nn.functional.{wrong}"
        steps = [replace(step, template=text) if step.op == "relu" else step for step in forward.statements]
        assert steps != list(forward.statements)
        return replace(forward, statements=tuple(steps)), shapes

    monkeypatch.setattr("loka.graph.trace.trace.canonical_forward", with_wrong_relus)
    assert not is_canonical(zoo.traced(Clamp(), inputs)[0])

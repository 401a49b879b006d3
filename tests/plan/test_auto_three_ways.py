"""`compute: auto` on a model of the zoo, by the measurements that ship: no site is predicted slower than in BF16."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.mods.policy_loader import load_policy
from loka.plan.evidence import open_measurements
from loka.plan.examine import assumed_safe, examine, tracer_of
from loka.plan.plan import LITTLE
from loka.plan.plan_of import kernels_for, plan_of
from loka.plan.totals import total_time

pytestmark = pytest.mark.slow


@pytest.fixture
def no_shipped_measurements() -> None:
    """These plans are by the measurements that ship."""


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_auto_takes_the_fastest_of_compiled_bf16_fused_bf16_and_fp8(target: str, tmp_path: Path) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(
        f'version: 1\nname: zoo\nmodel: {{factory: "loka.zoo:ranker", inputs: "loka.zoo:ranker_inputs"}}\n'
        f"target: {target}\ndefaults: {{scaling: auto}}\n"
    )
    policy = load_policy(path)
    examined = examine(policy)
    known, measured, tracer = assumed_safe(examined), open_measurements(policy), tracer_of(examined)
    plan = plan_of(examined, known, measured, kernels_for(policy), tracer)
    timed = [site.timing for site in plan.sites if site.timing is not None]
    assert timed
    assert all(each.chosen.us <= (1 + LITTLE) * min(each.without_fp8.us, each.as_is.us) for each in timed)
    assert not any(site.slowed_by_fp8 for site in plan.sites)
    assert any(site.region and not site.fp8 for site in plan.sites)  # norms of narrow layers, in BF16
    total = total_time(plan)
    assert total is not None
    assert total.us < total.as_is_us

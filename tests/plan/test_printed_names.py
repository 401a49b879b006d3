"""Names that `loka plan` prints are names that a rule takes, and `loka explain`, also those of merged sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.plan.planner import make_plan
from loka.plan.view.explain import find_site
from loka.plan.view.table import group_sites, rule_names, site_groups
from loka.policy.checks import compile_pattern

pytestmark = pytest.mark.slow

MMOE = Path("policies/mmoe.yaml").resolve()


@pytest.fixture
def no_shipped_measurements() -> None:
    """These plans are by the measurements that ship: siblings are merged where that wins."""


def test_every_row_is_named_as_a_rule_takes_it(tmp_path: Path) -> None:
    plan = make_plan(MMOE)
    merged = [site.site.name for site in plan.sites if site.site.members]
    assert merged  # the experts, which read one input
    rows = group_sites(plan, True)
    names = [row.pattern.split(", ") for row in rows]
    for patterns, group in zip(names, site_groups(plan), strict=True):
        found = {name for name in rule_names(plan) for each in patterns if compile_pattern(each).fullmatch(name)}
        assert found == {name for site in group for name in site.site.rule_names}
        assert find_site(plan, patterns[0]).site.name in {site.site.name for site in group}
    rules = "".join(f"- {{match: {patterns!r}, compute: keep}}\n" for patterns in names)
    (tmp_path / "mmoe.yaml").write_text(MMOE.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "p.yaml").write_text(f"extends: mmoe.yaml\nname: p\nrules:\n{rules}", encoding="utf-8")
    kept = make_plan(tmp_path / "p.yaml")
    assert [site.fp8 for site in kept.sites] == [False] * len(kept.sites)
    assert any(site.fp8 for site in plan.sites)

"""`loka report`: the page, and what it says that falls short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.plan_report import shortfalls, to_markdown
from loka.plan.planner import Planned, planned
from loka.plan.report.plan_rows import group_sites

POLICIES = Path(__file__).parents[2] / "policies"


@pytest.fixture(autouse=True)
def no_shipped_measurements() -> None:
    """What ships is planned by what ships, measurements too."""


@pytest.fixture(scope="module")
def shipped() -> Planned:
    """A policy with a profile, mods, and the measurements that ship."""
    return planned(POLICIES / "movietweetings_mods.yaml", gains=True)


def sections(page: str) -> dict[str, str]:
    """The text below each heading."""
    parts = page.split("\n## ")
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts[1:]}


@pytest.mark.slow
def test_a_page_has_decisions_mods_evidence_and_times(shipped: Planned) -> None:
    page = to_markdown(shipped, "policies/movietweetings_mods.yaml")
    assert page.startswith("# movietweetings_mods: what was measured and decided\n")
    assert page.endswith("\n")
    assert "20 samples in 80 steps of 256" in page
    found = sections(page)
    assert list(found) == ["Decisions", "Coverage", "Mods", "Evidence", "Times", "What falls short"]
    decisions = found["Decisions"].strip().splitlines()
    assert len(decisions) == 2 + len(group_sites(shipped.plan, alike=True))
    assert any(line.startswith("| layers.*.fmb.0 | 2 | 256 | 96 | 128 |") for line in decisions)
    assert "block_norm (movietweetings_mods.yaml:16), a new model to train" in found["Mods"]
    assert "; gains " in found["Mods"]  # the profile is of all three, and is no obstacle to planning with two of them
    assert "  - left head.out: a final prediction layer" in found["Mods"]
    assert "Budget of MERE 0.25" in found["Evidence"]
    assert "20/80" in found["Evidence"]
    short = found["What falls short"].strip().splitlines()
    assert any(
        line.startswith("- not in FP8: layers.*.rank, 3.0 % of the FLOPs: keep by ranker.yaml:") for line in short
    )
    assert "- not in FP8: embed.dense.3, 1.0 % of the FLOPs: keep by movietweetings_mods.yaml:11" in short
    assert not any("embed.dense.0" in line or "head.out" in line or "evidence" in line for line in short)
    assert any(line.startswith("- in FP8 though BF16 is faster: head.mlp.*, 0.") for line in short)
    assert found["Times"].startswith("\nGEMMs with their norms")
    assert "| layers.*.fmb.6 | 2 | " in found["Times"]
    assert "| a mixing layer of 12 embeddings of 32, rank 8, 6 weighted sums | layers.* | 2 | 256 | " in found["Times"]
    assert to_markdown(shipped, "policies/movietweetings_mods.yaml") == page


@pytest.mark.slow
def test_gemms_without_evidence_fall_short(shipped: Planned) -> None:
    plan = shipped.plan
    rows = group_sites(plan, alike=True)
    bare = replace(plan, sites=tuple(
        replace(site, gemms=tuple(replace(gemm, evidence=None) for gemm in site.gemms)) for site in plan.sites
    ))  # fmt: skip
    gemms = sum(gemm.fp8 for site in plan.sites for gemm in site.gemms)
    assert f"in FP8 without evidence: {gemms} of {gemms} GEMMs; run loka probe, and name the profile" in shortfalls(
        bare, rows
    )
    assert not any("without evidence" in line for line in shortfalls(plan, rows))


@pytest.mark.slow
def test_the_page_is_printed_or_written(shop, loka) -> None:
    printed = loka("report", shop.policy)
    assert printed.status == 0
    assert printed.out.startswith("# shop: what was measured and decided\n")
    assert "No evidence: the policy names no profile." in printed.out
    assert "in FP8 without evidence: " in printed.out
    written = loka("report", shop.policy, "-o", "pages/shop.md")
    assert written.status == 0
    assert written.out == ""
    assert written.err.splitlines()[-1] == "wrote pages/shop.md"
    assert (shop.folder / "pages/shop.md").read_text(encoding="utf-8") == printed.out

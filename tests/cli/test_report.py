"""`loka report`: the page, and what it says that falls short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.report.markdown_page import shortfalls, to_markdown
from loka.plan.planner import Planned, planned
from loka.plan.view.table import group_sites

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


@pytest.mark.slow
def test_a_name_in_html_gets_a_page_of_html(shop, loka) -> None:
    (shop.folder / "shop.html").write_text("# shop: what was measured and decided\n", encoding="utf-8")  # of before
    for _ in range(2):  # the second replaces the first
        written = loka("report", shop.policy, "-o", "shop.html")
        assert (written.status, written.out) == (0, ""), written.err
    page = (shop.folder / "shop.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n")
    assert '<code title="layers.0.up">up</code>' in page
    assert "No evidence: no profile says what FP8 costs this model." in page
    assert "No run of this plan was kept" in page


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.html.txt", ".html"])
def test_another_suffix_is_refused(name: str, shop, loka) -> None:
    before = shop.files()
    ran = loka("report", shop.policy, "-o", name)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        f"-o: {name}: the name of its file says what a report is, and this one ends in neither .html nor .md; name one "
        "that does\n"
    )
    assert shop.files() == before


@pytest.mark.slow
def test_runs_that_train_and_compare_kept_are_shown(shop, loka) -> None:
    assert loka("generate", shop.policy).status == 0
    assert loka("train", shop.policy, "--steps", "4").status == 0
    assert loka("train", shop.policy, "--steps", "4", "--seed", "1").status == 0
    loka("compare", shop.policy, "--seeds", "2", "--draws", "1", "--steps", "4", "--budget", "0.5")
    (train,) = (shop.folder / "build" / "train").glob("shop-*.jsonl")
    assert loka("report", shop.policy, "-o", "shop.html").status == 0
    page = (shop.folder / "shop.html").read_text(encoding="utf-8")
    assert "loka train: 2 pairs of runs on cpu" in page
    assert "loka compare: 2 pairs of runs on cpu" in page
    assert f"2 pairs of runs over 2 seeds on cpu, kept in build/train/{train.name}" in page
    head = json.loads(train.read_text(encoding="utf-8").splitlines()[0])
    assert (head["about"]["device"], head["about"]["budget_percent"]) == ("cpu", None)
    shop.write_policy((shop.folder / shop.policy).read_text(encoding="utf-8").replace("max_n: 1}", "max_n: 24}"))
    assert loka("report", shop.policy, "-o", "shop.html").status == 0
    page = (shop.folder / "shop.html").read_text(encoding="utf-8")
    assert "No run of this plan was kept" in page
    assert f"<code>build/train/{train.name}</code>" in page


@pytest.mark.slow
def test_measured_steps_are_shown_by_html_alone(shop, loka) -> None:
    steps = {
        "format": "loka.bench", "what": "model", "baseline": "bf16", "command": "loka bench model", "date": "2026-01",
        "environment": {"device": "NVIDIA H200", "torch": "2.11.0"},
        "models": [{"name": "shop", "batch_size": 4096, "lines": [
            {"mode": "train", "failure": "", "variant": name, "launch": "loop", "step_ms": time, "ratio": 20 / time}
            for name, time in (("bf16", 20.0), ("loka-fp8", 16.0))
        ]}],
    }  # fmt: skip
    (shop.folder / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    assert loka("report", shop.policy, "-o", "shop.html", "--measured", "steps.json").status == 0
    page = (shop.folder / "shop.html").read_text(encoding="utf-8")
    assert "1.25x" in page
    assert "a step takes 16.0 ms (loop, batch size 4096), on one NVIDIA H200" in page
    assert "with loss and optimiser, at batch size 4096, in a plain loop" in page
    for arguments in (["-o", "shop.md"], []):
        ran = loka("report", shop.policy, "--measured", "steps.json", *arguments)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("--measured: measured steps are shown by an HTML page only")
    ran = loka("report", shop.policy, "-o", "shop.html", "--measured", "policies/shop.yaml")
    assert (ran.status, ran.out) == (2, "")
    assert "not a file of `loka bench model`" in ran.err

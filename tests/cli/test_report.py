"""`loka report`: where its page goes, and what else it shows. The page itself is in tests/bench/report."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_a_name_in_html_gets_a_page_of_html(shop, loka) -> None:
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
    assert ran.err.splitlines()[-1] == f"-o: {name}: a report is a page of HTML; name a file that ends in .html"
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
def test_measured_steps_are_shown(shop, loka) -> None:
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
    ran = loka("report", shop.policy, "-o", "shop.html", "--measured", "policies/shop.yaml")
    assert (ran.status, ran.out) == (2, "")
    assert "not a file of `loka bench model`" in ran.err

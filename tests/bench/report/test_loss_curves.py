"""Curves of kept runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from loka.bench.quality.pair_file import KeptPairs, PairFile, RunFacts, read_pairs
from loka.bench.quality.training import PairResult, TrainResult
from loka.bench.report.loss_curves import kept_runs, run_chart
from loka.plan.plan import Gain, ModPlan
from loka.plan.serialize import plan_sha256
from tests.support.plan.report_plans import plan_of_sites, site_plan

PLAN = plan_of_sites(site_plan("a"))
FACTS = RunFacts(plan_sha256(PLAN), "NVIDIA H200", "model", 0.02)


def run(ne: float, *losses: float) -> TrainResult:
    return TrainResult(ne, 0.75, 0.5, 1.0, 10, 1000, 1.0, losses)


def pair(seed: int, ne_percent: float = 0.0, draw: int = 0, first: float = 0.7) -> PairResult:
    return PairResult(seed, run(0.8, first, 0.6), run(0.8 * (1 + ne_percent / 100), first, 0.606), "", draw)


def kept(*pairs: PairResult) -> KeptPairs:
    return KeptPairs(Path("build/compare/shop-12345678.jsonl"), FACTS, pairs)


def test_draws_of_a_seed_are_one_seed() -> None:
    chart = run_chart("compare", kept(pair(0, 0.01), pair(0, 0.03, draw=1)))
    assert chart is not None
    assert (chart.pairs, chart.seeds, len(chart.ne[0].differences)) == (2, 1, 1)


def test_pairs_that_cannot_be_put_together_are_left_out() -> None:
    shorter = PairResult(8, run(0.8, 0.7), run(0.8, 0.7), "")
    lost = PairResult(9, run(0.8, 0.7, math.inf), run(0.8, 0.7, 0.6), "")
    chart = run_chart("compare", kept(pair(0), pair(1), shorter, lost))
    assert chart is not None
    assert chart.pairs == 2
    assert run_chart("compare", kept(lost)) is None
    assert run_chart("compare", kept(PairResult(0, run(0.8), run(0.8), ""))) is None
    assert run_chart("compare", kept()) is None


def test_against_the_original_both_are_without_fp8() -> None:
    chart = run_chart("compare", replace(kept(pair(0)), facts=replace(FACTS, against="original", budget_percent=None)))
    assert chart is not None
    assert (chart.first, chart.second, chart.ne[0].budget) == ("original", "with mods", None)


def test_runs_of_the_plan_are_found_and_those_of_others_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    PairFile(folder / "shop-1.jsonl", "one", FACTS).add(pair(0))
    PairFile(folder / "shop-2.jsonl", "two", replace(FACTS, plan="another")).add(pair(0))
    (folder / "shop-3.jsonl").write_text('{"loka_compare": 1, "comparison": "three"}\n', encoding="utf-8")
    (folder / "shop-4.jsonl").write_text("mine\n", encoding="utf-8")
    (folder / "shop-5.jsonl").write_bytes(b"\xff\xfe")
    (folder / "shop-6.jsonl").write_text(
        '{"loka_compare": 2, "comparison": "x", "about": {"odd": 1}}\n', encoding="utf-8"
    )
    PairFile(folder / "other-1.jsonl", "one", FACTS).add(pair(0))
    found = kept_runs(PLAN, [folder, tmp_path / "compare"])
    assert [(chart.verb, chart.file) for chart in found.charts] == [("train", (folder / "shop-1.jsonl").as_posix())]
    assert found.others == tuple((folder / f"shop-{i}.jsonl").as_posix() for i in (2,))


def test_a_plan_is_known_whether_or_not_gains_were_looked_up() -> None:
    mod = ModPlan("no_bias", "mod 1: no_bias", "shop.yaml:3", False, "")
    bare, gains = (replace(PLAN, mods=(replace(mod, gain=gain),)) for gain in (None, Gain(1.0, 0.1)))
    assert plan_sha256(bare) == plan_sha256(gains) != plan_sha256(PLAN)


def test_figures_that_are_no_numbers_are_no_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    file = PairFile(path, "one", FACTS)
    file.add(pair(0))
    file.add(pair(1))
    path.write_text(path.read_text(encoding="utf-8").replace('"ne": 0.8', '"ne": "0.8"', 1), encoding="utf-8")
    found = read_pairs(path)
    assert found is not None
    assert [each.seed for each in found.pairs] == [1]


def test_a_file_goes_on_though_its_facts_changed(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    PairFile(path, "one", replace(FACTS, budget_percent=0.5)).add(pair(0))
    file = PairFile(path, "one", FACTS)
    assert len(file) == 1
    file.add(pair(1))
    found = read_pairs(path)
    assert found is not None
    assert (found.facts, [each.seed for each in found.pairs]) == (FACTS, [0, 1])
    assert read_pairs(tmp_path / "missing.jsonl") is None

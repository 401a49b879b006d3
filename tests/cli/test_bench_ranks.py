"""`loka bench model --gpus`: how the command prints what ranks measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from loka.bench.machine import environment
from loka.bench.ranks import ranks_run
from loka.bench.ranks.collectives import CollectiveFigures
from loka.bench.ranks.rank_step import RankFigures
from loka.bench.ranks.rank_variants import chosen_rank_variants
from loka.bench.ranks.ranks_report import MeasuredRanks, RankOutcome, RanksReport
from tests.support import markdown

SLOW, FAST, FAILED, ALONE = chosen_rank_variants("fsdp2-loka-fp8,ddp-bf16,alone-bf16")


def figures(step_ms: float, gathering: str = "") -> RankFigures:
    moved = (CollectiveFigures("all-gather", 14, 806_000_000, 1.89),)
    return RankFigures(step_ms, 7.5, 1600.0, moved, 9.25, 3.5, (0.7,), gathering)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> RanksReport:
    """What the next command measures."""
    outcomes = (
        RankOutcome(SLOW, figures(30.0)),
        RankOutcome(FAST, figures(20.0, "FP8 all-gather: 4 of 4")),
        RankOutcome(FAILED, None, "rank 1: ValueError: no"),
        RankOutcome(ALONE, RankFigures(25.0, 7.5, 1600.0, (), 0.0, 0.0, (0.7,), "")),
    )
    model = MeasuredRanks("clicks", "m:build", 16, "layers.0 (the policy's units)", "the policy's loss, adam", outcomes)
    made = RanksReport("loka", "2026-11-29T08:12Z", environment(), 2, 40.0, {"NCCL_MAX_NCHANNELS": "1"}, (model,))
    monkeypatch.setattr(ranks_run, "run", lambda request, out, progress: made)
    return made


def test_steps_collectives_and_failures_are_tables(loka: Callable[..., Any], report: RanksReport) -> None:
    ran = loka("bench", "model", "clicks.yaml", "--gpus", "2")
    assert ran.status == 0, ran.err
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "variant step ms ratio host ms NCCL ms exposed ms peak MiB" in lines
    assert "fsdp2-loka-fp8 20.00 1.500 7.50 9.25 3.50 1600" in lines
    assert "fsdp2-loka-fp8 all-gather 14 806.00 1.89" in lines
    assert "ddp-bf16 rank 1: ValueError: no" in lines
    assert "variant 2 ranks 8 ranks 64 ranks 512 ranks measured" in lines
    assert "fsdp2-bf16 25.00 to 26.89 25.00 to 42.63 25.00 to 44.84 25.00 to 45.11 30.00" in lines
    assert "at 40 GB/s for each GPU" in ran.out
    assert (
        "clicks: m:build on 2 ranks, each at batch size 16; a step has the policy's loss, adam; FSDP2's units are "
        "layers.0 (the policy's units); NCCL_MAX_NCHANNELS=1. FP8 all-gather: 4 of 4."
    ) in ran.out
    assert f"wrote build/bench/{report.stem}.json and .md" in ran.err


def test_json_has_every_figure(loka: Callable[..., Any], report: RanksReport) -> None:
    plain = json.loads(loka("bench", "model", "clicks.yaml", "--gpus", "2", "--json").out)
    assert set(plain) == {*markdown.json_keys("bench"), "models", "gpus", "link", "variables"}
    assert plain["what"] == "ranks", "loka report takes steps of one GPU alone"
    slow, fast, failed, alone = plain["models"][0]["lines"]
    assert (slow["ratio"], fast["ratio"]) == (1.0, 1.5)
    assert fast["collectives"] == [{"kind": "all-gather", "calls": 14, "nbytes": 806_000_000, "bare_ms": 1.89}]
    assert (fast["nccl_ms"], fast["exposed_ms"], fast["peak_mib"]) == (9.25, 3.5, 1600.0)
    assert (failed["variant"], failed["failure"]) == ("ddp-bf16", "rank 1: ValueError: no")
    assert "step_ms" not in failed
    assert slow["estimates"]["8"] == {"low": 25.0, "high": pytest.approx(25.0 + 7 / 8 * 806 / 40)}
    assert "estimates" not in fast, "its step without communication was not measured"
    assert "estimates" not in alone

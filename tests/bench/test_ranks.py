"""`loka bench model --gpus`: two processes on the CPU, with gloo; what is refused; a rank that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from loka.bench.machine import Environment
from loka.bench.model.model_request import ModelRequest
from loka.bench.ranks import ranks_run
from loka.bench.ranks.collectives import CollectiveFigures, total_and_exposed
from loka.bench.ranks.estimates import Bracket, estimate
from loka.bench.ranks.rank_step import RankFigures
from loka.bench.ranks.rank_variants import RANK_VARIANTS, Numbers, RankVariant, Sharing, chosen_rank_variants
from loka.bench.ranks.ranks_report import MeasuredRanks, RankOutcome, RanksReport, chapters, notes, to_plain
from loka.bench.ranks.ranks_run import check, largest_list, run
from loka.errors import InputError
from tests.support.bench_device import CLICKS, FP8, MODELS, TRAINED, CpuBench

BLOCKS = 'rules:\n  - {match: "head", compute: keep}\n'


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_turns: None) -> Callable[[str], str]:
    """Writes a policy, for a machine whose two GPUs are CPUs."""
    monkeypatch.setattr(ranks_run, "require_gpu", lambda: None)
    monkeypatch.setattr(ranks_run, "BenchDevice", CpuBench)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a device")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(text: str) -> str:
        path = tmp_path / "clicks.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_two_ranks_have_their_bytes_and_the_same_losses(written: Callable[[str], str], tmp_path: Path) -> None:
    lines: list[str] = []
    names = "fsdp2-loka-fp8-eager,fsdp2-loka-fp8-gather-eager,ddp-loka-fp8-eager"
    given = ModelRequest((written(TRAINED + FP8 + BLOCKS),), names, rounds=1, gpus=2)
    (model,) = run(given, tmp_path, lines.append).models
    assert model.failure == ""
    assert model.units == "layers.0, layers.1 (the largest ModuleList)"
    assert model.step == "the policy's loss, adam"
    assert {each.failure for each in model.outcomes} == {""}
    (data,) = tmp_path.glob("ranks-*.json")
    plain = json.loads(data.read_text())
    rows: dict[str, Any] = {line["variant"]: line for line in plain["models"][0]["lines"]}
    moved = {name: {each["kind"]: each["nbytes"] for each in row["collectives"]} for name, row in rows.items()}
    assert list(rows) == [each.name for each in RANK_VARIANTS if each.name in {*names.split(","), *moved}]
    assert len(rows) == 5, "and the two baselines"
    gathered, bound = rows["fsdp2-loka-fp8-gather-eager"], rows["fsdp2-loka-fp8-eager"]
    assert gathered["losses"] == bound["losses"] != rows["fsdp2-bf16-eager"]["losses"]
    assert gathered["gathering"].startswith("FP8 all-gather: 4 of 4 FP8 weights")
    assert moved["fsdp2-bf16-eager"] == moved["fsdp2-loka-fp8-eager"]
    assert moved["fsdp2-loka-fp8-gather-eager"]["all-gather"] < 0.8 * moved["fsdp2-bf16-eager"]["all-gather"]
    assert set(moved["fsdp2-bf16-eager"]) == {"all-gather", "reduce-scatter"}
    assert set(moved["ddp-loka-fp8-eager"]) == {"all-reduce"}
    assert bound["ratio"] == pytest.approx(rows["fsdp2-bf16-eager"]["step_ms"] / bound["step_ms"])
    assert all(each["bare_ms"] > 0 for row in rows.values() for each in row["collectives"])
    (page,) = tmp_path.glob("ranks-*.md")
    assert "| ddp-loka-fp8-eager | all-reduce |" in page.read_text()


@pytest.mark.parametrize(
    ("loss", "failure"),
    [
        ("raising_once", "rank 1: ValueError: not on this rank"),
        ("dying_once", "rank 1: its process ended with status 3 (see above)"),
    ],
)
def test_a_rank_that_fails_is_named_once_and_new_ranks_go_on(
    written: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    loss: str,
    failure: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    policy = written((TRAINED + FP8).replace(f"{MODELS}:loss", f"{MODELS}:{loss}"))
    given = ModelRequest((policy,), "ddp-bf16-eager,alone-bf16-eager", rounds=1, gpus=2)
    (model,) = run(given, tmp_path, lines.append).models
    first, second = model.outcomes
    assert (first.figures, first.failure) == (None, failure)
    assert lines.count(f"ddp-bf16-eager: failed: {failure}") == 1
    assert "Traceback" not in capfd.readouterr().err
    assert (second.variant.name, second.failure) == ("alone-bf16-eager", "")
    assert second.figures is not None
    assert second.figures.collectives == ()


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (CLICKS, {}, r"clicks.yaml:\d.*the policy has no train section; add train"),
        (TRAINED, {"gpus": 1}, "--gpus: 1 is too few; write 2 or more"),
        (TRAINED, {"gpus": 3}, "--gpus: 3 are asked for, and this machine has 2"),
        (TRAINED, {"variants": "bf16"}, "--variants: there is no 'bf16'; there are fsdp2-bf16,"),
        (TRAINED, {"link": 0.0}, "--link: 0 is no bandwidth; write GB/s of a GPU, above 0"),
        (TRAINED, {"batch": 0}, "--batch: 0 is too few"),
    ],
)
def test_mistakes_are_told_before_a_rank_starts(
    written: Callable[[str], str], tmp_path: Path, text: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(ModelRequest(**{"policies": (written(text),), "gpus": 2, **change}), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_a_policy_that_replaces_nothing_fails_with_its_reason(written: Callable[[str], str], tmp_path: Path) -> None:
    policy = written(TRAINED + "defaults: {compute: keep}\n")
    (model,) = run(ModelRequest((policy,), gpus=2), tmp_path, lambda line: None).models
    assert "the policy replaces nothing" in model.failure


def test_variants_bring_their_baselines(written: Callable[[str], str]) -> None:
    found = [each.name for each in chosen_rank_variants("fsdp2-loka-fp8-gather,ddp-bf16-eager")]
    assert found == ["fsdp2-bf16", "fsdp2-loka-fp8-gather", "ddp-bf16-eager"]
    assert check(ModelRequest((written(TRAINED),), gpus=2))[1] == RANK_VARIANTS


def test_the_largest_list_of_modules_with_forwards_is_what_is_sharded() -> None:
    model = nn.Module()
    model.small = nn.ModuleList([nn.Linear(2, 2)])
    model.towers = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.ModuleList([nn.Linear(4, 4)])])
    assert largest_list(model) == ("towers.0.*",)
    assert largest_list(nn.Linear(2, 2)) == ()


def test_estimates_move_what_a_ring_does_and_hide_all_or_nothing_of_it() -> None:
    gathers = CollectiveFigures("all-gather", 2, 2_000_000_000, 0.0)
    reduced = CollectiveFigures("all-reduce", 1, 1_000_000_000, 0.0)
    assert estimate(30.0, (gathers, reduced), 4, 100.0) == Bracket(30.0, 60.0)
    assert estimate(30.0, (gathers, reduced), 2, 10.0) == Bracket(200.0, 230.0)


@pytest.mark.parametrize("with_alone", [True, False])
def test_estimates_are_in_the_table_and_the_json_where_a_step_alone_was_measured(with_alone: bool) -> None:
    moved = (CollectiveFigures("all-reduce", 1, 200_000_000, 1.0),)
    kinds = [Sharing.DDP] + [Sharing.ALONE] * with_alone
    outcomes = tuple(
        RankOutcome(
            RankVariant(sharing, Numbers.BF16, False),
            RankFigures(30.0, 9.0, None, moved if sharing is Sharing.DDP else (), None, None, (), ""),
        )
        for sharing in kinds
    )
    environment = Environment("GPU", *[""] * 3, *[None] * 4)
    report = RanksReport("", "", environment, 2, 10.0, {}, (MeasuredRanks("m", "f", 8, outcomes=outcomes),))
    (chapter,) = chapters(report)
    headings = [heading for heading, _ in chapter.tables]
    lines: Any = to_plain(report)
    line = lines["models"][0]["lines"][0]
    assert any("8 ranks" in heading for heading in headings) is with_alone
    assert any("Estimates" in note for note in notes(report)) is with_alone
    assert line.get("estimates", {}).get(8) == ({"low": 35.0, "high": 65.0} if with_alone else None)


def test_exposed_is_what_no_other_kernel_covers() -> None:
    spans = [(True, 0.0, 10.0), (False, 2.0, 4.0), (False, 3.0, 6.0), (True, 8.0, 12.0), (False, 20.0, 30.0)]
    assert total_and_exposed(spans) == (12.0, 8.0)

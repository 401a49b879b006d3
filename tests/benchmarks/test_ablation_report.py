"""What an ablation's tables, page and JSON say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ablation.ablation_report import (
    Ablation,
    details,
    loss_table,
    notes,
    side_by_side,
    to_markdown,
    to_plain,
    write_files,
)
from benchmarks.ablation.ablation_targets import FACTORY
from benchmarks.ablation.ablation_unit import Loss, Mode, UnitOutcome
from benchmarks.ablation.rows_columns import Column, rows_of
from benchmarks.replays import Timing
from loka.bench.machine import Environment

MODS = ("no_bias", "block_norm", "hard_swish", "fuse_interaction")
EXACT = frozenset({"fuse_interaction"})
HERE = Environment("a device", "0.1.0", "3.12", "2.11", "13.0", "3.6", None, None)


def mode(us: float, db: float | None = None) -> Mode:
    return Mode(Timing(us, us - 1, us + 1, 9), 512.4, 17, db)


def outcome(train: float, infer: float, loss: Loss | None = None) -> UnitOutcome:
    return UnitOutcome({"train": mode(train), "infer": mode(infer, 30.0)}, loss, {}, 5.0)


ROWS = rows_of(MODS, EXACT)[:3]
CELLS = tuple((row.name, column) for row in ROWS for column in Column)
FAILED = UnitOutcome(
    {"infer": mode(800.0, 20.0)}, None, {"train": "LokaError: a | bar", "loss": "LokaError: a | bar"}, 5.0
)


@pytest.fixture
def ablation() -> Ablation:
    """None, all and exact; one failure, and one cell that was not measured."""
    return Ablation(
        name="clicks",
        factory=FACTORY,
        batch=64,
        command="python -m benchmarks.ablation clicks.yaml --loss-steps 7",
        date="2026-11-21T14:00Z",
        environment=HERE,
        on_gpu=True,
        exact=EXACT,
        rows=ROWS,
        columns=tuple(Column),
        cells=CELLS,
        modes=("train", "infer"),
        loss_steps=7,
        outcomes={
            ("none", Column.COMPILED): outcome(3000.0, 900.0, Loss(0.6, 0.5, 0.9, 7)),
            ("none", Column.OURS): outcome(2500.0, 910.0),
            ("none", Column.FP8): FAILED,
            ("all", Column.COMPILED): outcome(2400.0, 850.0),
            ("all", Column.OURS): outcome(2000.0, 750.0),
            ("all", Column.FP8): outcome(1500.0, 500.0, Loss(0.61, 0.51, 0.91, 7)),
            ("exact", Column.COMPILED): outcome(3000.0, 900.0),
            ("exact", Column.OURS): outcome(2600.0, 905.0),
        },
    )


def test_times_stand_side_by_side_with_ratios_to_the_baseline(ablation: Ablation) -> None:
    assert side_by_side(ablation, "train") == (
        ("mods", "compile-bf16", "loka-bf16", "loka-fp8"),
        [
            ("none", "3000 (1.000)", "2500 (1.200)", "failed"),
            ("all", "2400 (1.250)", "2000 (1.500)", "1500 (2.000)"),
            ("exact", "3000 (1.000)", "2600 (1.154)", "-"),
        ],
    )
    assert side_by_side(ablation, "infer")[1][0] == ("none", "900.0 (1.000)", "910.0 (0.989)", "800.0 (1.125)")


def test_each_cell_has_its_memory_and_launches(ablation: Ablation) -> None:
    columns, rows = details(ablation, "infer")
    assert columns == ("mods", "column", "median us", "p10", "p90", "ratio", "peak MiB", "launches", "output dB")
    assert rows[0] == ("none", "compile-bf16", "900.0", "899.0", "901.0", "1.000", "512", "17", "30.0")
    assert len(rows) == 8
    columns, rows = details(ablation, "train")
    assert "output dB" not in columns
    assert len(rows) == 7


def test_the_loss_is_of_the_cells_that_were_trained(ablation: Ablation) -> None:
    assert loss_table(ablation)[1] == [
        ("none", "compile-bf16", "0.60000", "0.50000", "0.90000"),
        ("all", "loka-fp8", "0.61000", "0.51000", "0.91000"),
    ]
    assert "## Loss" in to_markdown(ablation)
    assert "Loss after 7 steps" in to_markdown(ablation)
    assert "## Loss" not in to_markdown(replace(ablation, loss_steps=0))


def test_a_failure_is_told_once_with_what_it_took_and_what_is_missing_is_named(ablation: Ablation) -> None:
    said = notes(ablation)
    assert "Failed: none in loka-fp8 (train, loss): LokaError: a | bar" in said
    assert said[-1] == "Not measured: exact in loka-fp8."
    assert "Not measured" not in "".join(notes(replace(ablation, cells=CELLS[:-1])))


def test_on_a_cpu_there_are_no_ratios_and_no_targets(ablation: Ablation) -> None:
    on_cpu = replace(ablation, on_gpu=False)
    assert on_cpu.targets == ()
    assert side_by_side(on_cpu, "train")[1][0] == ("none", "3000", "2500", "failed")
    assert "ratio" not in details(on_cpu, "train")[0]
    assert "nothing of speed" in notes(on_cpu)[0]
    assert "## Targets" not in to_markdown(on_cpu)


def test_files_have_everything(ablation: Ablation, tmp_path: Path) -> None:
    data, page = write_files(ablation, tmp_path)
    assert (data.name, page.suffix) == ("ablation-clicks-2026-11-21T1400.json", ".md")
    assert page.read_text() == to_markdown(ablation)
    assert "| all | 2400 (1.250) | 2000 (1.500) | 1500 (2.000) |" in page.read_text()
    plain = json.loads(data.read_text())
    assert plain == json.loads(json.dumps(to_plain(ablation)))
    assert len(plain["cells"]) == 8
    (found,) = [cell for cell in plain["cells"] if (cell["row"], cell["column"]) == ("all", "loka-fp8")]
    assert found["modes"]["train"]["ratio"] == 2.0
    assert found["modes"]["train"]["launches"] == 17
    assert found["loss"] == {"train": 0.61, "test": 0.51, "ne": 0.91, "steps": 7}
    assert plain["rows"][1]["mods"] == list(MODS)
    assert [target["verdict"] for target in plain["targets"]] == ["reached"] * 4 + ["missed"]
    assert to_plain(replace(ablation, factory="other:model"))["targets"] == []

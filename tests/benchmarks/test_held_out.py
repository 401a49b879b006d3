"""The comparison of samplers from end to end on a tiny model, and which rows are held out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.held_out import __main__ as study
from benchmarks.held_out import held_out
from benchmarks.held_out.held_out import NOTES, RECIPES, gemm_errors, judge, write_table
from benchmarks.held_out.held_out_capture import CapturedOperands
from benchmarks.held_out.held_out_cases import CASES, StudyCase, StudySizes, held_out_batches, training_batches
from benchmarks.held_out.held_out_pool import RowPool
from benchmarks.held_out.held_out_rows import COPULA, GAUSSIAN, NORMAL, POOLED_ROWS, TRAINING_ROWS, WHOLE_RUN
from loka import zoo
from loka.errors import InputError
from loka.numerics.enums import Gemm
from loka.probe.estimate import errors
from loka.probe.samplers import Drawn

FEATURES = 8

TINY = StudyCase(
    model="tiny",
    data="numbered",
    factory="tests.support.models.held_out_models:Tiny",
    inputs="tests.support.models.held_out_models:inputs",
    batches="tests.support.models.held_out_models:batches",
    test_batches="tests.support.models.held_out_models:test_batches",
    batch_size=16,
    learning_rate=1e-2,
    steps=40,
)
SIZES = StudySizes(watched=16, every=2, batches=6, draws=4, seed=3)


def numbers(batches: list[tuple[tuple[Tensor, ...], Tensor]]) -> list[int]:
    return [round(float(value) * 1024) for (x,), _ in batches for value in x[:, 0]]


def test_held_out_rows_are_test_rows_each_once_and_in_another_order_for_another_seed() -> None:
    job = TINY.job()
    held, trained = numbers(held_out_batches(job, 6, seed=3)), numbers(training_batches(job, 40, seed=3))
    assert sorted(held) == list(range(640, 736))
    assert sorted(trained) == list(range(640))
    assert numbers(held_out_batches(job, 6, seed=3)) == held != sorted(held)
    assert numbers(held_out_batches(job, 6, seed=4)) != held
    for (x,), click in held_out_batches(job, 6, seed=3):
        assert torch.equal((x[:, 1] > 0).float(), click)


def test_more_batches_than_there_are_rows_are_refused() -> None:
    with pytest.raises(InputError, match="7 batches of 16 need 112 test rows, and there are 96"):
        held_out_batches(TINY.job(), 7, seed=0)


@pytest.mark.parametrize("name", ["ranker", "dlrm"])
def test_no_held_out_row_of_the_click_data_is_a_training_row(name: str) -> None:
    case = CASES[name]
    job = replace(case, batches="loka.zoo:ranker_batches", steps=8).job()
    trained = torch.cat([x for (x, _), _ in training_batches(job, 8, 0)])
    held = torch.cat([x for (x, _), _ in held_out_batches(job, 8, 0)])
    assert trained.shape == held.shape == (8 * case.batch_size, trained.shape[1])
    assert not set(map(tuple, trained.tolist())) & set(map(tuple, held.tolist()))


def test_every_case_names_callables_of_the_zoo_and_fits_its_data() -> None:
    for case in CASES.values():
        job = case.job()
        model = job.factory()
        assert job.steps == case.steps
        assert model(*getattr(zoo, case.inputs.partition(":")[2])(4)).shape == (4,)


def test_real_errors_are_those_that_the_estimate_makes_of_whole_operands() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(24, 40).exp(), torch.randn(10, 40) ** 3
    for recipe, actual in zip(RECIPES, gemm_errors(a, b, RECIPES), strict=True):
        assert errors(Drawn(a, b, None, None), (recipe, recipe)) == pytest.approx(actual, rel=1e-4)
    assert len(set(gemm_errors(a, b, RECIPES))) == 4


@pytest.mark.slow
def test_from_end_to_end_on_a_tiny_model_twice_with_the_same_numbers() -> None:
    judged = judge(TINY, SIZES, whole_run=True, say=lambda line: None)
    assert {row.sampler for row in judged.rows} == {
        NORMAL, GAUSSIAN, COPULA, GAUSSIAN + WHOLE_RUN, COPULA + WHOLE_RUN, POOLED_ROWS, TRAINING_ROWS,
    }  # fmt: skip
    gemms = {(row.site, row.gemm) for row in judged.rows}
    inside = {(site, gemm) for site in ("mix", "last") for gemm in Gemm}
    assert gemms == inside | {("first", Gemm.FPROP), ("first", Gemm.WGRAD)}
    assert len(judged.rows) == len(gemms) * len(RECIPES) * 7
    for row in judged.rows:
        assert row.actual_sqnr.low <= row.actual_sqnr.mean <= row.actual_sqnr.high
        assert row.actual_sqnr.mean > 0
        assert 0 <= row.actual_mere.mean < 1
    ours = [row for row in judged.rows if row.sampler == COPULA and row.gemm is Gemm.FPROP and not row.exact]
    assert all(abs(row.gap_db) < 6 for row in ours)
    again = judge(TINY, SIZES, whole_run=True, say=lambda line: None)
    assert again.rows == judged.rows


def test_pooled_rows_are_real_rows_with_their_own_gradients() -> None:
    def step(start: int) -> dict[str, tuple[CapturedOperands, ...]]:
        x = torch.arange(start, start + 16.0)[:, None].expand(16, FEATURES)
        return {"first": (CapturedOperands(x, torch.zeros(12, FEATURES), -x[:, :1].expand(16, 12)),)}

    (site,) = (site for site in held_out._sites(TINY) if site.name == "first")
    pool = RowPool((site,), batch_size=16, seed=0)
    pool.add(step(0))
    pool.add(step(100))
    weight = torch.ones(12, FEATURES)
    drawn = [one["first"] for one in pool.draws({"first": weight}, 20)]
    assert {one.input.shape for one in drawn} == {(16, FEATURES)}
    assert all(torch.equal(one.input[:, 0], -one.grad_output[:, 0]) for one in drawn)
    assert all(one.weight is weight for one in drawn)
    assert {float(value) for one in drawn for value in one.input[:, 0]} == {*range(16), *range(100, 116)}


@pytest.mark.parametrize("name", ["every", "watched", "batches", "draws", "pooled"])
def test_sizes_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least"):
        replace(SIZES, **{name: 0})


def test_training_that_ends_early_is_told() -> None:
    with pytest.raises(InputError, match="held_out_models:batches ended before step 41 of 60"):
        judge(replace(TINY, steps=60), SIZES, say=lambda line: None)


@pytest.mark.slow
def test_the_command_writes_json_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "CASES", {"tiny": TINY})
    out, table = tmp_path / "deep" / "rows.json", tmp_path / "deep" / "samplers.md"
    sizes = ["--batches", "2", "--draws", "2"]
    threads = torch.get_num_threads()
    try:
        assert study.main(["--model", "tiny", "--out", str(out), "--table", str(table), *sizes]) == 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["sizes"]["draws"] == 2
    assert written["cases"][0]["factory"] == "tests.support.models.held_out_models:Tiny"
    assert {row["gemm"] for row in written["rows"]} == {"fprop", "dgrad", "wgrad"}
    assert "| tiny | numbered | 16 | 40 | 0.01 | 3 |" in table.read_text(encoding="utf-8")


def test_missing_data_leaves_with_status_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOKA_DATA", str(tmp_path))
    threads = torch.get_num_threads()
    try:
        assert study.main(["--model", "movietweetings_dlrm"]) == 2
    finally:
        torch.set_num_threads(threads)
    assert "LOKA_DATA" in capsys.readouterr().err


def test_notes_by_hand_outlive_new_tables(tmp_path: Path) -> None:
    path = tmp_path / "samplers.md"
    write_table("# one\n", path)
    path.write_text(path.read_text(encoding="utf-8") + "\nby hand\n", encoding="utf-8")
    write_table("# two\n", path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# two\n")
    assert "# one" not in text
    assert text.endswith(f"{NOTES}\n\nby hand\n")

"""Units of an ablation, measured for real on the CPU: in this process, and each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ablation import ablation_run
from benchmarks.ablation.ablation_run import run_units, words
from benchmarks.ablation.ablation_unit import RunSettings, UnitOutcome
from benchmarks.ablation.rows_columns import Column, Unit

POLICY = """\
version: 1
name: {name}
model:
  factory: {factory}
  inputs: tests.support.models.ablation_model:inputs
  batch_size: 16
train:
  batches: tests.support.models.ablation_model:batches
  test: tests.support.models.ablation_model:held_out
  loss: tests.support.models.ablation_model:loss
defaults: {{compute: {compute}, fuse: {fuse}, scaling: rowwise, power_of_two: true, requantize_transpose: true}}
rules:
  - {{match: "head", compute: keep}}
"""
FOREVER = float("inf")


def unit(
    column: Column,
    factory: str = "tests.support.models.ablation_model:build",
    compute: str = "keep",
    fuse: str = "always",
    name: str = "",
) -> Unit:
    package = f"ablated_{name or column.value.replace('-', '_')}"
    return Unit(column, (), package, POLICY.format(name=package, factory=factory, compute=compute, fuse=fuse))


COMPILED, OURS, FP8 = unit(Column.COMPILED), unit(Column.OURS), unit(Column.FP8, compute="fp8")


@pytest.fixture(autouse=True)
def models_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are found from the current directory, in other processes too."""
    monkeypatch.chdir(Path(__file__).parents[2])


def measured(units: Sequence[Unit], wanted: RunSettings, jobs: int = 1, seconds: float = FOREVER) -> list[UnitOutcome]:
    found = list(run_units(units, wanted, jobs, seconds, lambda line: None))
    assert [each for each, _ in found] == list(units)
    return [outcome for _, outcome in found]


@pytest.mark.slow
def test_what_fails_is_told_and_loses_nothing_else() -> None:
    missing = unit(Column.OURS, "tests.support.models.ablation_model:nothing")
    fused_away = unit(Column.OURS, fuse="never", name="nothing_replaced")
    kept = unit(Column.FP8, name="kept")
    outcomes = measured((missing, fused_away, kept, COMPILED), RunSettings(("infer",), 0, "cpu"))
    assert "has no 'nothing'" in outcomes[0].failures[""]
    assert "nothing is replaced" in outcomes[1].failures[""]
    assert "no GEMM can run in FP8: keep by" in outcomes[2].failures[""]
    assert all(not outcome.modes for outcome in outcomes[:3])
    assert outcomes[3].failures == {}


def test_a_mode_that_fails_leaves_the_other() -> None:
    outcome = measured(
        (unit(Column.COMPILED, "tests.support.models.ablation_model:untrainable"),),
        RunSettings(("train", "infer"), 2, "cpu"),
    )[0]
    assert list(outcome.modes) == ["infer"]
    assert set(outcome.failures) == {"train", "loss"}
    assert "untrainable" in outcome.failures["train"]
    assert "untrainable" in words(outcome)


def test_results_that_are_not_finite_are_no_measurement() -> None:
    outcome = measured(
        (unit(Column.COMPILED, "tests.support.models.ablation_model:broken"),), RunSettings(("infer",), 0, "cpu")
    )[0]
    assert "not finite" in outcome.failures["infer"]


@pytest.mark.slow
def test_side_by_side_a_process_that_dies_takes_its_unit_alone(capfd: pytest.CaptureFixture[str]) -> None:
    dying = unit(Column.COMPILED, "tests.support.models.ablation_model:dying", name="dying")
    outcomes = measured((COMPILED, dying), RunSettings(("infer",), 0, "cpu"), jobs=2)
    assert outcomes[0].failures == {}
    assert outcomes[0].modes["infer"].timing.median_us > 0
    assert "its process ended with status 3" in outcomes[1].failures[""]
    captured = capfd.readouterr()
    assert captured.out == ""  # stdout is for results
    assert "a compiler's chatter" in captured.err


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended() -> None:
    slow = unit(Column.COMPILED, "tests.support.models.ablation_model:sleeping", name="slow")
    (outcome,) = measured((slow,), RunSettings(("infer",), 0, "cpu"), jobs=2, seconds=1.0)
    assert "--seconds" in outcome.failures[""]


def test_what_time_does_not_suffice_for_is_told() -> None:
    told: list[str] = []
    assert list(run_units((COMPILED, OURS), RunSettings(("infer",), 0, "cpu"), 1, 1e-9, told.append)) == []
    assert told == ["no time is left for compile-bf16 with no mods, loka-bf16 with no mods"]


def test_a_unit_without_room_beside_others_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    @contextmanager
    def started() -> Iterator[Callable[..., object]]:
        children: list[Unit] = []

        def start(target: object, unit: Unit, *arguments: object) -> SimpleNamespace:
            children.append(unit)
            channel = SimpleNamespace(send=lambda message: None)
            return SimpleNamespace(failure="", channel=channel, received=lambda end: outcome_of(unit))

        def outcome_of(unit: Unit) -> UnitOutcome:
            crowded = len(children) > 1 and unit is not COMPILED
            return UnitOutcome({}, None, {"train": "OutOfMemoryError: CUDA out of memory"} if crowded else {}, 1.0)

        yield start
        groups.append(len(children))

    monkeypatch.setattr(ablation_run, "child_processes", started)
    found = list(run_units((OURS, COMPILED), RunSettings(("train",), 0, "cuda"), 2, FOREVER, lambda line: None))
    assert groups == [2, 1]
    assert [(each, outcome.failures) for each, outcome in found] == [(COMPILED, {}), (OURS, {})]

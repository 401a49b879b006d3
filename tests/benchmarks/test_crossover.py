"""The crossover map from made-up times whose answer is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.crossover.crossover import (
    CrossoverView,
    Ratio,
    crossover,
    least_rows,
    ratio_at,
    ratios,
    summary,
    to_markdown,
)
from benchmarks.crossover.crossover_plot import plot, values
from loka.kernels.measurements.parts import Part, PartKind, PartTime, TimeSource

SIZES = (64, 128, 256)


@dataclass(frozen=True)
class FakeCosts:
    """A GEMM takes 2 us and its FLOPs, half of them in FP8; a producer 1 us; nothing is known above `largest`."""

    largest: int = 10**6
    spread: float = 0.0
    source: TimeSource = TimeSource.MEASURED

    def time(self, part: Part) -> PartTime | None:
        if max(part.rows, part.columns, part.contraction) > self.largest:
            return None
        if part.work is not PartKind.GEMM:
            return PartTime(1.0, self.spread, self.source)
        us = part.rows * part.columns * part.contraction / 2**20
        fast = 0.5 if "fast" in part.recipe else 1.0
        slow = 2.0 if "tensorwise" in part.recipe else 1.0
        return PartTime(2.0 + (us * fast * slow / 2 if part.recipe else us), self.spread, self.source)


def test_each_view_adds_up_its_parts() -> None:
    shape = (256, 256, 128)  # 8 us in FLOPs
    found = {view: ratio_at(FakeCosts(), view, shape) for view in CrossoverView}
    assert found[CrossoverView.GEMM] == Ratio(10 / 6, 0.0)
    assert found[CrossoverView.FAST] == Ratio(10 / 4, 0.0)
    assert found[CrossoverView.QUANTIZED] == Ratio(10 / 8, 0.0)
    assert found[CrossoverView.TRAINED] == Ratio(30 / 24, 0.0)


def test_transposing_and_quantizing_are_of_the_matrices_that_the_gemms_take() -> None:
    seen: list[Part] = []

    class Seen(FakeCosts):
        def time(self, part: Part) -> PartTime | None:
            seen.append(part)
            return super().time(part)

    ratio_at(Seen(), CrossoverView.TRAINED, (512, 128, 256))
    gemms = {(part.rows, part.columns, part.contraction) for part in seen if part.work is PartKind.GEMM}
    assert gemms == {(512, 256, 128), (512, 128, 256), (256, 128, 512)}
    for work in (PartKind.QUANTIZE, PartKind.REQUANTIZE_TRANSPOSE):
        assert {(part.rows, part.columns) for part in seen if part.work is work} == {(512, 128), (256, 128), (512, 256)}
    one_scale = {(part.rows, part.columns, part.contraction) for part in seen if part.recipe.count("tensorwise") == 2}
    assert one_scale == {(256, 128, 512)}


def test_ties_are_told_from_gains() -> None:
    found = ratio_at(FakeCosts(spread=0.2), CrossoverView.QUANTIZED, (256, 256, 128))
    assert found is not None
    assert found.value == pytest.approx(1.25)
    assert found.noise == pytest.approx(0.5)
    assert found.tie
    assert not found.gains
    assert ratio_at(FakeCosts(spread=0.01), CrossoverView.QUANTIZED, (256, 256, 128)).gains  # type: ignore[union-attr]


def test_what_was_not_measured_is_not_shown() -> None:
    assert ratio_at(FakeCosts(source=TimeSource.INTERPOLATED), CrossoverView.GEMM, (64, 64, 64)) is None
    found = crossover(FakeCosts(largest=128), SIZES)
    assert set(found[CrossoverView.GEMM]) == {(m, k, n) for m in (64, 128) for k in (64, 128) for n in (64, 128)}
    _, lines = ratios(found[CrossoverView.GEMM], SIZES)
    assert lines[-1] == ("256", "256", "-", "-", "-")


def test_the_least_rows_have_no_gap_above_them() -> None:
    view = {
        (64, 64, 64): Ratio(1.5, 0.0), (128, 64, 64): Ratio(0.9, 0.0), (256, 64, 64): Ratio(1.1, 0.0),
        (64, 64, 128): Ratio(1.5, 0.0), (128, 64, 128): Ratio(1.2, 0.0), (256, 64, 128): Ratio(1.1, 0.3),
        (64, 64, 256): Ratio(1.5, 0.0), (128, 64, 256): Ratio(1.2, 0.0), (256, 64, 256): Ratio(1.1, 0.0),
    }  # fmt: skip
    columns, lines = least_rows(view, SIZES)
    assert columns == ("", "N = 64", "N = 128", "N = 256")
    assert lines[0] == ("K = 64", "256", "never", "64")
    assert lines[1] == ("K = 128", "-", "-", "-")
    assert summary(view) == "9 shapes: FP8 wins 7, loses 1, ties 1; from 0.90 to 1.50."


def test_the_page_has_every_view_and_is_the_same_twice() -> None:
    page = to_markdown(crossover(FakeCosts(), SIZES), "A device", "made up", SIZES)
    assert page == to_markdown(crossover(FakeCosts(), SIZES), "A device", "made up", SIZES)
    assert page.count("## ") == len(CrossoverView)
    assert "| 256 | 256 | 1.20 | 1.33 | 1.50 |" not in page.split("## ")[1]
    assert "| 256 | 128 | 1.33 | 1.50 | 1.67 |" in page.split("## ")[1]


def test_squares_of_the_plot_are_logarithms() -> None:
    view = {(64, 64, 64): Ratio(2.0, 0.0), (128, 64, 64): Ratio(0.5, 0.0)}
    first, second = values(view, 64, (64, 128))
    assert first == [1.0, -1.0]
    assert all(math.isnan(value) for value in second)


def test_the_plot_is_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = crossover(FakeCosts(), SIZES)
    for name in ("a.svg", "b.svg"):
        plot(found, "A device", tmp_path / name, SIZES)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()

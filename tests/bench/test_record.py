"""Measuring parts one after another: resuming, failures, wrong numbers, and the order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import MOST_SETS, Span, counts, span_of
from loka.bench.record.gemm_parts import Gemms, PreparedCall
from loka.bench.record.record import in_order, measure, record
from loka.errors import InputError, LokaError
from loka.kernels.measurements.measurement import Measurement
from loka.kernels.measurements.parts import Part, PartKind

SMALL = Part(PartKind.GEMM, "as-is", 64, 64, 64)
LARGE = Part(PartKind.GEMM, "as-is", 128, 64, 64)
PLAIN = Part(PartKind.FORWARD, "rendered", 64, 64, recipe="bfloat16", around="silu")


@dataclass
class FakeStore:
    """Measurements in a dictionary."""

    kept: dict[Part, Measurement | None] = field(default_factory=dict)

    def has(self, part: Part) -> bool:
        return part in self.kept

    def add(self, measurement: Measurement) -> None:
        self.kept[measurement.part] = measurement


@dataclass
class FakeBench:
    """Parts that do nothing, but where something is to go wrong."""

    failures: dict[Part, str] = field(default_factory=dict)
    wrong: dict[Part, str] = field(default_factory=dict)
    prepared: list[Part] = field(default_factory=list)

    def prepare(self, part: Part) -> PreparedCall:
        self.prepared.append(part)
        if part in self.failures:
            raise RuntimeError(self.failures[part])
        return PreparedCall(lambda: part.rows, (), lambda found: Check(wrong=self.wrong.get(part, "")))


def timer(call: Any, arguments: Any) -> Span:
    """As many microseconds as what is called gives back."""
    return Span(float(call(*arguments)), 0.01, 5)


def run(parts: list[Part], store: FakeStore, bench: FakeBench, seconds: float = 60.0) -> tuple[str, list[str]]:
    lines: list[str] = []
    return str(record(parts, store, bench.prepare, timer, lines.append, seconds)), lines


def test_each_part_is_measured_once_with_a_line_of_progress() -> None:
    store = FakeStore()
    tally, lines = run([LARGE, SMALL, PLAIN, SMALL], store, FakeBench())
    assert {part: kept.us for part, kept in store.kept.items()} == {SMALL: 64.0, LARGE: 128.0, PLAIN: 64.0}
    assert tally == "3 measured (0 with wrong numbers), 0 known before, 0 could not run"
    assert lines[0] == "1/3 gemm as-is 64 x 64 x 64 bfloat16: 64.00 us (spread 1.0%, 5)"
    assert len(lines) == 3


def test_what_is_known_is_left_out() -> None:
    store, bench = FakeStore({SMALL: None}), FakeBench()
    tally, _ = run([SMALL, LARGE], store, bench)
    assert bench.prepared == [LARGE]
    assert tally == "1 measured (0 with wrong numbers), 1 known before, 0 could not run"


def test_a_part_that_fails_stops_nothing_and_is_not_written_down() -> None:
    store = FakeStore()
    tally, lines = run([SMALL, LARGE], store, FakeBench(failures={SMALL: "no algorithm"}))
    assert list(store.kept) == [LARGE]
    assert "RuntimeError: no algorithm" in lines[0]
    assert tally.endswith("1 could not run")


def test_wrong_numbers_are_written_down_with_the_reason() -> None:
    store = FakeStore()
    tally, lines = run([SMALL], store, FakeBench(wrong={SMALL: "3.0 dB"}))
    assert store.kept[SMALL].wrong == "3.0 dB"
    assert "WRONG: 3.0 dB" in lines[0]
    assert tally.startswith("1 measured (1 with wrong numbers)")


def test_a_broken_device_ends_the_run() -> None:
    store = FakeStore()
    bench = FakeBench(failures={LARGE: "CUDA error: an illegal memory access was encountered"})
    with pytest.raises(LokaError, match=r"has broken the device .* what was measured is kept"):
        run([SMALL, LARGE, PLAIN], store, bench)
    assert list(store.kept) == [SMALL]


def test_when_the_time_is_over_the_rest_is_left_for_another_run() -> None:
    store = FakeStore({SMALL: None})
    _, lines = run([SMALL, LARGE, PLAIN], store, FakeBench(), seconds=-1.0)
    assert lines == ["-1 s are over; 2 parts are left for the next run"]
    assert list(store.kept) == [SMALL]


def test_gemms_of_one_size_follow_each_other() -> None:
    fast = Part(PartKind.GEMM, "torch.scaled_mm", 64, 64, 64, recipe="e4m3 rowwise, e4m3 rowwise, fast")
    order = in_order([PLAIN, fast, LARGE, SMALL])
    assert order == [SMALL, fast, LARGE, PLAIN]
    assert in_order(list(reversed(order))) == order


def test_the_numbers_are_looked_at_before_the_clock_runs() -> None:
    seen: list[str] = []

    def timed(call: Any, arguments: Any) -> Span:
        seen.append("timed")
        return Span(1.0, 0.0, 5)

    call = PreparedCall(lambda: seen.append("called"), (), lambda found: seen.append("checked") or Check())
    measure(SMALL, lambda part: call, timed)
    assert seen == ["called", "checked", "timed"]


@pytest.mark.parametrize(
    ("recipe", "decibels"),
    [("e4m3 rowwise, e4m3 rowwise, precise", 28.5), ("e4m3 tensorwise, e4m3 tensorwise, fast", 28.5)],
)
def test_a_product_is_compared_with_float64(recipe: str, decibels: float) -> None:
    part = Part(PartKind.GEMM, "torch.scaled_mm", 128, 96, 256, recipe=recipe)
    prepared = Gemms("cpu").prepare(part)
    check = prepared.check(prepared.call(*prepared.arguments))
    assert check.wrong == ""
    assert check.sqnr_db == pytest.approx(decibels, abs=1.0)
    assert check.mere is not None
    assert 0.1 < check.mere < 0.25


def test_a_plain_product_errs_by_its_rounding_alone() -> None:
    prepared = Gemms("cpu").prepare(SMALL)
    check = prepared.check(prepared.call(*prepared.arguments))
    assert check.wrong == ""
    assert check.sqnr_db is not None
    assert check.sqnr_db > 50


def test_float32_is_multiplied_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(torch.get_float32_matmul_precision()) or a @ b)
    before = torch.get_float32_matmul_precision()
    prepared = Gemms("cpu").prepare(Part(PartKind.GEMM, "as-is", 64, 64, 64, dtype="float32"))
    prepared.call(*prepared.arguments)
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("recipe", ["", "e4m3 rowwise, e4m3 rowwise, precise", "e4m3 rowwise, e4m3 rowwise, fast"])
def test_a_wrong_tile_is_found(recipe: str) -> None:
    """One tile of 128 x 128 in a product of 64 of them, far from its beginning, and a single element."""
    kernel = "torch.scaled_mm" if recipe else "as-is"
    prepared = Gemms("cpu").prepare(Part(PartKind.GEMM, kernel, 1024, 1024, 64, recipe=recipe))
    found: Tensor = prepared.call(*prepared.arguments).clone()
    assert prepared.check(found).wrong == ""
    found[640:768, 384:512] *= 4.0
    assert "dB against a float64 product of its operands" in prepared.check(found).wrong
    found[640:768, 384:512] /= 4.0
    found[1023, 1023] += 20.0
    assert "times as far off as half of them are" in prepared.check(found).wrong


def test_products_of_one_term_err_by_their_rounding_alone() -> None:
    """As in the gradient of a linear to one output: the largest is rounded by 80 times the median error."""
    prepared = Gemms("cpu").prepare(Part(PartKind.GEMM, "as-is", 4096, 2048, 1))
    assert prepared.check(prepared.call(*prepared.arguments)).wrong == ""


def test_a_product_that_is_not_finite_is_wrong() -> None:
    prepared = Gemms("cpu").prepare(SMALL)
    found = prepared.call(*prepared.arguments)
    found[3, 5] = torch.inf
    assert prepared.check(found) == Check(wrong="its product is not finite where its operands are")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            Part(PartKind.GEMM, "cutlass", 64, 64, 64, recipe="e4m3 rowwise, e4m3 rowwise, fast"),
            "there is no kernel 'cutlass'",
        ),
        (Part(PartKind.GEMM, "torch.scaled_mm", 64, 64, 64, recipe="e4m3"), "a GEMM has no recipe 'e4m3'"),
        (Part(PartKind.GEMM, "as-is", 64, 64, 64, dtype="int8"), "no GEMM writes 'int8'"),
        (
            Part(PartKind.GEMM, "torch.scaled_mm", 64, 64, 64, recipe="e5m2 rowwise, e5m2 rowwise, fast"),
            "multiplies no e5m2 x e5m2",
        ),
    ],
)
def test_gemms_that_cannot_be_measured_say_why(part: Part, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Gemms("cpu").prepare(part)


def test_small_calls_have_many_sets_and_large_ones_few_launches() -> None:
    assert counts(64 * 2**10) == (MOST_SETS, MOST_SETS)
    assert counts(60 * 2**20) == (2, 8)
    assert counts(2**30) == (2, 2)


def test_the_spread_is_half_of_the_distance_of_the_quartiles() -> None:
    assert span_of([10.0, 11.0, 12.0, 13.0, 14.0]) == Span(12.0, 1.0 / 12.0, 5)
    with pytest.raises(InputError, match="two are needed"):
        span_of([1.0])


def test_a_restless_time_is_taken_twice_and_the_calmer_one_counts() -> None:
    spans = [Span(5.0, 0.2, 9), Span(4.0, 0.01, 9), Span(1.0, 0.001, 9)]

    assert measure(SMALL, FakeBench().prepare, lambda call, arguments: spans.pop(0))[0] == Span(4.0, 0.01, 9)
    assert len(spans) == 1


def test_a_call_that_does_several_parts_is_shared_by_them() -> None:
    call = PreparedCall(lambda: 9.0, (), lambda found: Check(), parts=3)
    assert measure(SMALL, lambda part: call, timer)[0].us == 3.0

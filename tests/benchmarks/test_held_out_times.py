"""Look-ups of parts that were left out, against what was measured of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.held_out_times import held_out, main
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import PartKind
from tests.support.plan.measured_cases import HOPPER, gemm, grid, measurement, passes, quantize, record

FINE = (64, 128, 256, 512)


def test_times_that_go_by_bytes_are_met_between_neighbours():
    (found,) = held_out(Measurements.of(passes(FINE), HOPPER))
    assert (found.kind.work, found.asked, found.between) == (PartKind.QUANTIZE, 12, 8)
    assert found.worst < 1.01


def test_one_that_is_off_is_found():
    odd = replace(measurement(gemm(128, 128, 128)), us=50.0)
    rest = [each for each in grid(FINE) if each.part != odd.part]
    fair, off = (next(held_out(Measurements.of([*rest, each], HOPPER))) for each in (measurement(odd.part), odd))
    assert fair.worst < 1.05
    assert off.worst == pytest.approx(50.0 / measurement(odd.part).us, rel=0.05)
    assert off.asked == fair.asked == 64


def test_wrong_kernels_and_lone_parts_are_passed_over():
    wrong = [measurement(gemm(size, 64, 64), wrong="corrupt") for size in FINE]
    assert list(held_out(Measurements.of([*wrong, measurement(quantize(64, 64))], HOPPER))) == []
    (far,) = held_out(Measurements.of([measurement(quantize(64, 64)), measurement(quantize(4096, 64))], HOPPER))
    assert far.between == 0
    assert math.isnan(far.worst)


def test_only_some_of_many_are_asked_for():
    (found,) = held_out(Measurements.of(grid(FINE), HOPPER), most=10)
    assert found.asked == 10


def test_it_prints_a_table(tmp_path, capsys):
    assert main([str(record(tmp_path / "m.jsonl", [*grid(FINE), *passes(FINE)])), "--kind", "quantize"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| quantize | rendered | bfloat16 | e4m3 rowwise |  | 12 | 8 | 1.000 |")

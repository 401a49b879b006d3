"""Times of replays: their statistics, and a captured step without a device."""

from __future__ import annotations

import pytest

from benchmarks.replays import Timing, summarise, time_step
from loka.errors import InputError
from tests.support.bench_device import CpuBench


def test_median_and_percentiles() -> None:
    assert summarise([float(value) for value in range(101)]) == Timing(50.0, 10.0, 90.0, 101)
    assert summarise([4.0, 1.0, 2.0, 3.0]) == Timing(2.5, pytest.approx(1.3), pytest.approx(3.7), 4)
    assert summarise([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(InputError, match="no samples"):
        summarise([])


def test_a_step_is_timed_in_microseconds() -> None:
    ran: list[int] = []
    bench = CpuBench(replay_ms=[0.1, 0.3, 0.2])
    timing = time_step(lambda: ran.append(1), 800, bench)
    assert timing.median_us == pytest.approx(200.0)
    assert timing.samples == 3
    assert len(ran) == 3
    assert bench.measured == [800]

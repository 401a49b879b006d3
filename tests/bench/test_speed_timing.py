"""Statistics and rotation, with a timer that has no device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loka.bench.speed.timing import LAUNCHES, MEASURED_MS, Timing, rotations, size_of, summarise, time_call, time_step
from loka.errors import InputError


class Counted:
    """A timer whose replays run the step, and take as long as they are told."""

    def __init__(self, milliseconds: list[float]) -> None:
        self.told = milliseconds
        self.measured: list[int] = []

    def capture(self, step: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            step()

        return replay

    def milliseconds(self, replay: Callable[[], None], measured: int) -> list[float]:
        self.measured.append(measured)
        for _ in self.told:
            replay()
        return self.told


def test_median_and_percentiles() -> None:
    assert summarise([float(value) for value in range(101)]) == Timing(50.0, 10.0, 90.0, 101)
    assert summarise([4.0, 1.0, 2.0, 3.0]) == Timing(2.5, pytest.approx(1.3), pytest.approx(3.7), 4)
    assert summarise([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(InputError, match="no samples"):
        summarise([])


def test_a_step_is_timed_in_microseconds() -> None:
    ran: list[int] = []
    timer = Counted([0.1, 0.3, 0.2])
    timing = time_step(lambda: ran.append(1), 800, timer)
    assert timing.median_us == pytest.approx(200.0)
    assert timing.samples == 3
    assert len(ran) == 3
    assert timer.measured == [800]


def test_calls_rotate_over_all_sets_and_share_the_time() -> None:
    seen: list[int] = []
    timer = Counted([1.0])
    timing = time_call(lambda index: seen.append(index), [(index,) for index in range(3)], timer)
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]
    assert timing.median_us == pytest.approx(1000.0 / LAUNCHES)
    assert timer.measured == [MEASURED_MS]


def test_every_set_is_used_where_there_are_many() -> None:
    seen: list[int] = []
    time_call(lambda index: seen.append(index), [(index,) for index in range(20)], Counted([1.0]))
    assert seen == list(range(20))


@pytest.mark.parametrize("size", [1, 1000, 30 * 2**20, 99 * 2**20, 10**10])
def test_rotation_reads_more_than_twice_the_cache(size: int) -> None:
    count = rotations(size)
    assert count >= 2
    assert count * size > 2 * 50 * 2**20
    assert count == 2 or (count - 1) * size <= 2 * 50 * 2**20


def test_only_tensors_have_a_size() -> None:
    assert size_of((torch.empty(3, 4), torch.bfloat16, torch.empty(5, dtype=torch.uint8), 7)) == 53

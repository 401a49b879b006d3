"""The counters by which a planned GEMM proves that it ran."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from loka.errors import InputError
from loka.kernels import ticks


def test_numbers_are_neighbours_and_nobody_elses() -> None:
    first, second, third = ticks.new(3), ticks.new(1), ticks.new(3)
    assert second >= first + 3
    assert third >= second + 1


def test_counting_and_resetting() -> None:
    first = ticks.new(3)
    for _ in range(2):
        ticks.tick(first, "one")
    ticks.tick(first + 2, "one")
    assert [ticks.count(first + i) for i in range(3)] == [2, 0, 1]
    ticks.reset([first])
    assert [ticks.count(first + i) for i in range(3)] == [0, 0, 1]
    ticks.tick(first, "one")
    assert ticks.count(first) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_taking_no_number_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="at least one number"):
        ticks.new(count)


def test_threads_lose_no_count_and_share_no_number() -> None:
    number = ticks.new(1)

    def work(_: int) -> list[int]:
        taken = []
        for _ in range(2000):
            ticks.tick(number, "one")
            taken.append(ticks.new(3))
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = [first for block in pool.map(work, range(8)) for first in block]
    assert ticks.count(number) == 16_000
    taken.sort()
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(taken))


def test_kernels_are_counted_apart() -> None:
    number = ticks.new(1)
    for kernel in ("one", "other", "one"):
        ticks.tick(number, kernel)
    assert ticks.count(number) == 3
    found = ticks.counts(number)
    assert found == {"one": 2, "other": 1}
    found.clear()
    assert ticks.counts(number) == {"one": 2, "other": 1}
    ticks.reset([number])
    assert ticks.counts(number) == {}

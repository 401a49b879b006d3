"""The counters by which a planned GEMM proves that it ran."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from loka.errors import InputError
from loka.kernels import call_counters


def test_numbers_are_neighbours_and_nobody_elses() -> None:
    first, second, third = call_counters.new_counters(3), call_counters.new_counters(1), call_counters.new_counters(3)
    assert second >= first + 3
    assert third >= second + 1


def test_counting_and_resetting() -> None:
    first = call_counters.new_counters(3)
    for _ in range(2):
        call_counters.increment(first, "one")
    call_counters.increment(first + 2, "one")
    assert [call_counters.count(first + i) for i in range(3)] == [2, 0, 1]
    call_counters.reset([first])
    assert [call_counters.count(first + i) for i in range(3)] == [0, 0, 1]
    call_counters.increment(first, "one")
    assert call_counters.count(first) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_taking_no_number_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="at least one number"):
        call_counters.new_counters(count)


def test_threads_lose_no_count_and_share_no_number() -> None:
    number = call_counters.new_counters(1)

    def work(_: int) -> list[int]:
        taken = []
        for _ in range(2000):
            call_counters.increment(number, "one")
            taken.append(call_counters.new_counters(3))
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = [first for block in pool.map(work, range(8)) for first in block]
    assert call_counters.count(number) == 16_000
    taken.sort()
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(taken))


def test_kernels_are_counted_apart() -> None:
    number = call_counters.new_counters(1)
    for kernel in ("one", "other", "one"):
        call_counters.increment(number, kernel)
    assert call_counters.count(number) == 3
    found = call_counters.counts(number)
    assert found == {"one": 2, "other": 1}
    found.clear()
    assert call_counters.counts(number) == {"one": 2, "other": 1}
    call_counters.reset([number])
    assert call_counters.counts(number) == {}

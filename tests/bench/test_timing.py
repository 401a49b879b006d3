"""Timing without a device: rotation, and turns by a clock that is told the time."""

from __future__ import annotations

import pytest
import torch

from loka.bench import device
from loka.bench.device import KernelSum
from loka.bench.timing import STEPS, TURN_WARM_UPS, rotations, size_of, timed_turn


@pytest.mark.parametrize("size", [1, 1000, 30 * 2**20, 99 * 2**20, 10**10])
def test_rotation_reads_more_than_twice_the_cache(size: int) -> None:
    count = rotations(size)
    assert count >= 2
    assert count * size > 2 * 50 * 2**20
    assert count == 2 or (count - 1) * size <= 2 * 50 * 2**20


def test_only_tensors_have_a_size() -> None:
    assert size_of((torch.empty(3, 4), torch.bfloat16, torch.empty(5, dtype=torch.uint8), 7)) == 53


class Machine:
    """A host that takes `host` seconds to enqueue a step, and a device that takes `device` seconds to run it."""

    def __init__(self, host: float, device: float) -> None:
        self.host, self.device = host, device
        self.now = self.done = 0.0
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.now += self.host
        self.done = max(self.done, self.now) + self.device

    def wait(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now


def test_a_step_takes_what_the_device_takes_and_the_host_is_seen_apart() -> None:
    machine = Machine(host=0.001, device=0.004)
    timing = timed_turn(machine.step, machine.wait, machine.clock)
    assert timing.host_ms == pytest.approx(1.0)
    assert timing.step_ms == pytest.approx((1.0 + STEPS * 4.0) / STEPS)
    assert machine.steps == TURN_WARM_UPS + 2 * STEPS


def test_a_host_that_is_slower_than_the_device_makes_the_step() -> None:
    machine = Machine(host=0.005, device=0.001)
    timing = timed_turn(machine.step, machine.wait, machine.clock)
    assert timing.host_ms == pytest.approx(5.0)
    assert timing.step_ms == pytest.approx((STEPS * 5.0 + 1.0) / STEPS)


def test_kernels_are_counted_at_the_second_look_and_a_profiler_that_cannot_be_used_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([["Memset (Device)"], ["one", "two", "Memcpy HtoD"], [], ["Memset (Device)"]])
    monkeypatch.setattr(device, "activities", lambda step: [(name, 500.0) for name in next(looks)])
    assert device.BenchDevice().kernels(lambda: None) == KernelSum(2, 1.5)
    assert device.BenchDevice().kernels(lambda: None) is None

    def forbidden(step: object) -> list[tuple[str, float]]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(device, "activities", forbidden)
    assert device.BenchDevice().kernels(lambda: None) is None

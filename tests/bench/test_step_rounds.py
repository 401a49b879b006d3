"""Turns and ratios, by a clock that is told the time."""

from __future__ import annotations

import pytest

from loka.bench.model.step_rounds import STEPS, WARM_UPS, RoundTiming, speedup, timed_turn


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
    assert machine.steps == WARM_UPS + 2 * STEPS


def test_a_host_that_is_slower_than_the_device_makes_the_step() -> None:
    machine = Machine(host=0.005, device=0.001)
    timing = timed_turn(machine.step, machine.wait, machine.clock)
    assert timing.host_ms == pytest.approx(5.0)
    assert timing.step_ms == pytest.approx((STEPS * 5.0 + 1.0) / STEPS)


def test_ratios_are_of_the_same_round() -> None:
    base = [RoundTiming(10.0, 1.0), RoundTiming(30.0, 1.0), RoundTiming(10.0, 1.0)]
    own = [RoundTiming(5.0, 1.0), RoundTiming(15.0, 1.0), RoundTiming(1.0, 1.0)]
    assert speedup(base, own) == 2.0
    assert speedup(base[:1], own) == 2.0
    assert speedup([], own) is None

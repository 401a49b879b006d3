"""Cells of a comparison: what becomes of figures and of failures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cells import Cell, Errors, MeasuredStep, cell_of, decibels
from benchmarks.replays import Timing
from loka.bench.device import LONGEST_FAILURE


def test_decibels_are_bounded_and_of_finite_signals() -> None:
    one = torch.ones(3)
    assert decibels(one, one) == pytest.approx(300.0)
    assert decibels(one, torch.zeros(3)) is None
    assert decibels(one * torch.nan, one) is None
    assert decibels(torch.zeros(3), one) == pytest.approx(0.0)


def test_a_cell_tells_what_failed_and_the_next_goes_on() -> None:
    said: list[str] = []

    def failing() -> tuple[MeasuredStep, float | None]:
        raise RuntimeError("no\n  kernel " + "x" * 1000)

    bad = cell_of("work train", "work", "peer", failing, said.append)
    good = cell_of(
        "work train", "work", "ours", lambda: (MeasuredStep(Timing(5.0, 4.0, 6.0, 9), 1.0, None), 2.5), said.append
    )
    assert bad.timing is None
    assert bad.failure.startswith("RuntimeError: no kernel xxx")
    assert len(bad.failure) == LONGEST_FAILURE
    assert good == Cell("work", "ours", Timing(5.0, 4.0, 6.0, 9), 2.5, 1.0)
    assert said[0].startswith("work train peer: failed: RuntimeError")
    assert said[1] == "work train ours: 5.0 us (4.0 to 6.0), peak 1 MiB, in 0 s"


def test_progress_tells_the_errors() -> None:
    said: list[str] = []
    found = MeasuredStep(Timing(5.0, 4.0, 6.0, 9), None, Errors(36.54, 27.1, "x"))
    cell_of("work infer", "work", "ours", lambda: (found, None), said.append)
    assert said == ["work infer ours: 5.0 us (4.0 to 6.0), 36.5 and 27.1 dB, in 0 s"]


def test_ctrl_c_is_no_failure_of_a_variant() -> None:
    def interrupted() -> tuple[MeasuredStep, float | None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell_of("work", "work", "peer", interrupted, print)

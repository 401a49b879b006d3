"""Matching a pattern is bounded in time."""

from __future__ import annotations

import re
import signal
import time

import pytest

from loka.policy import policy
from loka.policy.policy import Pattern
from loka.policy.problems import Place, PolicyError

HERE = Place("policies/x.yaml", 7, 12)
BACKTRACKING = "re:(a+)+b"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MATCHING_SECONDS", 0.05)


def test_a_pattern_that_backtracks_is_told_with_its_place() -> None:
    started = time.monotonic()
    with pytest.raises(PolicyError, match=re.escape("policies/x.yaml:7:12: matching '(a+)+b' takes over 0.05 s")):
        Pattern.of(BACKTRACKING, HERE).matches("a" * 60)
    assert time.monotonic() - started < 5


def test_the_same_pattern_matches_what_it_can_in_time() -> None:
    pattern = Pattern.of(BACKTRACKING, HERE)
    assert pattern.matches("aaab")
    assert not pattern.matches("aac")


def test_a_glob_of_many_stars_needs_no_bound() -> None:
    assert not Pattern.of("*a*" * 20 + "b", HERE).matches("a" * 2000)


def test_a_timer_of_the_caller_goes_on() -> None:
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert Pattern.of(r"re:layers\.\d+", HERE).matches("layers.3")
        with pytest.raises(PolicyError):
            Pattern.of(BACKTRACKING, HERE).matches("a" * 60)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left < 0.16
        assert not heard
        time.sleep(0.3)
        assert heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

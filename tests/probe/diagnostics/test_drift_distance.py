"""Distances between profiles: closed forms, what is compared, and in which words."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.numerics.enums import Operand
from loka.probe import drift
from loka.probe.profile.profile import OperandSummary, Profile, SiteProfile
from loka.probe.stats.site_stats import MAGNITUDE_BINS, OCTAVES

NOTHING = (0,) * MAGNITUDE_BINS
HISTOGRAMS = st.lists(st.tuples(st.integers(0, MAGNITUDE_BINS - 1), st.integers(1, 10**9)), min_size=1, max_size=8)


def histogram(places: list[tuple[int, int]]) -> tuple[int, ...]:
    counts = [0] * MAGNITUDE_BINS
    for place, count in places:
        counts[place] += count
    return tuple(counts)


def bell(middle: int, total: int = 100_000) -> tuple[int, ...]:
    weights = [math.exp(-(((i - middle) / 4) ** 2)) for i in range(MAGNITUDE_BINS)]
    return tuple(round(total * weight / sum(weights)) for weight in weights)


def make_operand(
    operand: Operand = Operand.INPUT,
    magnitudes: tuple[int, ...] = bell(80),
    amax: float = 4.0,
    zeros: float = 0.0,
    sampled: int = 10_000,
    bad: int = 0,
) -> OperandSummary:
    return OperandSummary(
        operand, 64, 20, 10**6, sampled, bad, bad, zeros, 2 * amax, amax, amax / 4, magnitudes, (), None, None, 0.0
    )


def make_site(*operands: OperandSummary, name: str = "a", k: int = 64, n: int = 32) -> SiteProfile:
    return SiteProfile(name, k, n, 4096, operands, ())


def make_profile(*sites: SiteProfile, created: str = "2026-11-21T12:00:00Z") -> Profile:
    return Profile("p", "m:f", "0.1.0", created, 6000, 100, 60, 4096, sites, ())


def compared(before: OperandSummary, after: OperandSummary) -> drift.SiteDrift:
    (found,) = drift.compare(make_profile(make_site(before)), make_profile(make_site(after)))
    return found


class TestMagnitudeDistance:
    @given(HISTOGRAMS, st.integers(0, 20), st.integers(1, 1000))
    def test_a_shift_is_its_length(self, places: list[tuple[int, int]], shift: int, times: int) -> None:
        """Moving everything by so many half octaves costs just that, whatever the counts."""
        moved = [(place + shift, times * count) for place, count in places if place + shift < MAGNITUDE_BINS]
        kept = [(place, count) for place, count in places if place + shift < MAGNITUDE_BINS]
        if kept:
            assert drift.magnitude_distance(histogram(kept), histogram(moved)) == pytest.approx(shift / 2, abs=1e-9)

    @pytest.mark.slow
    @given(HISTOGRAMS, HISTOGRAMS, HISTOGRAMS)
    def test_it_is_a_distance(
        self, a: list[tuple[int, int]], b: list[tuple[int, int]], c: list[tuple[int, int]]
    ) -> None:
        x, y, z = histogram(a), histogram(b), histogram(c)
        assert drift.magnitude_distance(x, x) == 0.0
        assert drift.magnitude_distance(x, y) == drift.magnitude_distance(y, x)
        through = drift.magnitude_distance(x, y) + drift.magnitude_distance(y, z)
        assert drift.magnitude_distance(x, z) <= through + 1e-9

    def test_part_of_the_mass(self) -> None:
        a, b = histogram([(80, 4)]), histogram([(80, 3), (100, 1)])
        assert drift.magnitude_distance(a, b) == pytest.approx(10 / 4)  # a quarter moves ten octaves


class TestCompare:
    def test_the_same(self) -> None:
        found = compared(make_operand(), make_operand())
        assert found.distance == 0.0
        assert not found.exceeded
        assert (found.site, found.operand) == ("a", Operand.INPUT)

    def test_eight_times_as_large(self) -> None:
        found = compared(make_operand(amax=4.0), make_operand(magnitudes=bell(86), amax=32.0))
        assert found.distance == pytest.approx(3.0, abs=0.01)
        assert found.exceeded
        assert found.words == "magnitudes moved; rms 1 -> 8 (+3.0 octaves)"

    def test_outliers_alone(self) -> None:
        found = compared(make_operand(amax=4.0), make_operand(amax=4.0 * 2**6))
        assert found.distance == pytest.approx(3.0)
        assert found.words == "usual amax 4 -> 256 (+6.0 octaves)"

    def test_zeros(self) -> None:
        found = compared(make_operand(zeros=0.25), make_operand(zeros=0.75))
        assert found.distance == pytest.approx(2.0)
        assert found.exceeded
        assert found.words == "zeros 25.0% -> 75.0% of the elements"

    def test_a_dead_layer_and_one_that_came_alive(self) -> None:
        dead = make_operand(magnitudes=NOTHING, amax=0.0, zeros=1.0)
        for pair, words in (((make_operand(), dead), "all zeros now"), ((dead, make_operand()), "all zeros in the")):
            found = compared(*pair)
            assert found.distance == OCTAVES
            assert found.exceeded
            assert found.words.startswith(words)
        assert compared(dead, dead).distance == 0.0

    def test_non_finite_elements_that_the_profile_has_not(self) -> None:
        found = compared(make_operand(), make_operand(bad=3))
        assert found.exceeded
        assert found.words == "NaN or infinity in 3 of 20 calls, the profile saw none"
        assert not compared(make_operand(bad=1), make_operand(bad=3)).exceeded

    def test_few_rows_say_little(self) -> None:
        moved = make_operand(magnitudes=bell(85), sampled=4)
        assert compared(make_operand(), moved).distance == pytest.approx(2.5, abs=0.01)
        assert not compared(make_operand(), moved).exceeded
        assert compared(make_operand(), replace(moved, sampled=400)).exceeded
        none = make_operand(magnitudes=NOTHING, amax=0.0, sampled=0)
        assert not compared(make_operand(), none).exceeded

    @pytest.mark.parametrize(("bins", "beyond"), [(2, 0), (4, 1), (7, 1), (9, 2)])  # of half an octave each
    def test_thresholds(self, bins: int, beyond: int) -> None:
        before, after = (
            make_profile(make_site(make_operand(Operand.INPUT, bell(i)), make_operand(Operand.GRAD_OUTPUT, bell(i))))
            for i in (80, 80 + bins)
        )
        found = {row.operand for row in drift.exceeded(drift.compare(before, after))}
        assert found == {*(Operand.INPUT, Operand.GRAD_OUTPUT)[:beyond]}

    def test_weights_are_not_compared(self) -> None:
        assert drift.compare(*[make_profile(make_site(make_operand(Operand.WEIGHT)))] * 2) == ()

    @pytest.mark.parametrize(
        ("before", "after", "words"),
        [
            ((make_site(make_operand()),), (), "the model no longer has this site"),
            ((), (make_site(make_operand()),), "the profile does not know this site"),
            ((make_site(make_operand()),), (make_site(),), "it ran when the profile was made, and not now"),
            ((make_site(),), (make_site(make_operand()),), "the profile never saw it, and now it runs"),
        ],
    )
    def test_a_site_on_one_side(
        self, before: tuple[SiteProfile, ...], after: tuple[SiteProfile, ...], words: str
    ) -> None:
        (found,) = drift.compare(make_profile(*before), make_profile(*after))
        assert (found.site, found.words, found.distance) == ("a", words, OCTAVES)
        assert found.exceeded

    def test_a_site_that_never_ran_on_either_side(self) -> None:
        assert drift.compare(make_profile(make_site()), make_profile(make_site())) == ()
        assert drift.compare(make_profile(make_site()), make_profile()) == ()


class TestOrder:
    def test_rows_keep_their_order(self) -> None:
        before = make_profile(*(make_site(make_operand(), name=name) for name in "abc"))
        after = make_profile(
            *(make_site(make_operand(magnitudes=bell(m)), name=n) for n, m in (("a", 81), ("b", 90), ("c", 86)))
        )
        rows = drift.compare(before, after)
        assert [row.site for row in rows] == ["a", "b", "c"]
        assert [row.site for row in drift.exceeded(rows)] == ["b", "c"]
        assert drift.exceeded(()) == ()


class TestAge:
    @pytest.mark.parametrize(
        ("now", "words"),
        [
            (datetime(2026, 11, 21, 23, tzinfo=UTC), "today"),
            (datetime(2026, 11, 22, 13, tzinfo=UTC), "1 day ago"),
            (datetime(2026, 12, 21, 13, tzinfo=UTC), "30 days ago"),
            (datetime(2026, 11, 20, 13, tzinfo=UTC), "which lies ahead: a clock was wrong"),
        ],
    )
    def test_words(self, now: datetime, words: str) -> None:
        expected = f"60 samples over 6000 training steps, made on 2026-11-21, {words}"
        assert drift.age(make_profile(), now) == expected

    def test_unreadable_dates(self) -> None:
        now = datetime(2026, 11, 22, 13, tzinfo=UTC)
        assert drift.age(make_profile(created="soon"), now).endswith("at an unknown time")
        assert drift.age(make_profile(created="2026-11-21T12:00:00"), now).endswith("1 day ago")
        assert "days ago" in drift.age(make_profile(created="2020-01-01T00:00:00Z"))


@pytest.mark.parametrize(
    ("sites", "call"),
    [
        (["a"], "patch.keep('a')"),
        (["a", "b.0", "a"], "patch.keep('a', 'b.0')"),
        (["a", "b", "c", "d", "e"], "patch.keep('a', 'b', 'c', 'd', ...)"),
    ],
)
def test_the_way_back_names_each_site_once(sites: list[str], call: str) -> None:
    drifts = [drift.SiteDrift(site, Operand.INPUT, 9.0, 1.5, "far") for site in sites]
    assert drift.way_back(drifts) == call

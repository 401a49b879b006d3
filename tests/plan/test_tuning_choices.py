"""Choices among what a policy leaves open: what they decide, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loka.numerics.enums import Compute, Fuse, Gemm
from loka.plan.tuning.choices import AS_IT_STANDS, Choice, SiteChoice, SitePrecision, chosen_settings, is_open
from loka.policy.settings import Assignment, SiteSettings

FILE = "profiles/p.tuned.json"
NATIVE = SiteChoice(SitePrecision.BF16, fuse=Fuse.NEVER)
MakeSite, MakeSettings = Callable[..., object], Callable[..., SiteSettings]


@pytest.fixture
def opened(make_settings: MakeSettings) -> SiteSettings:
    """Settings of `scaling: auto` with two recipes."""
    base = make_settings(Compute.AUTO)
    history = {**base.history, "scaling": (Assignment("scaling", "auto", "defaults", "p.yaml", 4),)}
    first, second = (replace(base, recipe=name, history=history) for name in ("first", "second"))
    return replace(first, alternatives=(second,))


def chosen(make_site: MakeSite, wanted: SiteSettings, *ways: SiteChoice) -> SiteSettings:
    (found,) = chosen_settings([make_site()], [wanted], Choice(ways), FILE)  # type: ignore[list-item]
    return found


def test_bf16_keeps_what_is_open_and_names_the_record(make_site: MakeSite, make_settings: MakeSettings) -> None:
    wanted = make_settings(Compute.AUTO, wgrad=Compute.FP8)
    found = chosen(make_site, wanted, NATIVE)
    assert [found.gemms[gemm].compute for gemm in Gemm] == [Compute.KEEP, Compute.KEEP, Compute.FP8]
    assert found.fuse is Fuse.NEVER
    last = found.history["fprop.compute"][-1]
    assert (last.value, last.source, last.file) == ("keep", "a measured step", FILE)
    assert found.history["wgrad.compute"] == wanted.history["wgrad.compute"]


def test_fp8_is_no_longer_a_matter_of_time_and_stays_one_of_evidence(
    make_site: MakeSite, make_settings: MakeSettings
) -> None:
    wanted = make_settings(Compute.AUTO, dgrad=Compute.KEEP)
    found = chosen(make_site, wanted, SiteChoice(SitePrecision.FP8))
    assert [found.gemms[gemm].compute for gemm in Gemm] == [Compute.AUTO, Compute.KEEP, Compute.AUTO]
    assert [found.gemms[gemm].by_time for gemm in Gemm] == [False, True, False]
    assert found.budget == wanted.budget


@pytest.mark.parametrize(
    ("way", "recipes"),
    [(SiteChoice(SitePrecision.OPEN, "second"), ["second"]), (SiteChoice(SitePrecision.FP8), ["first", "second"])],
)
def test_a_recipe_is_taken_where_it_is_left_open(way, recipes, make_site, make_settings, opened) -> None:
    found = chosen(make_site, opened, way)
    assert [each.recipe for each in (found, *found.alternatives)] == recipes
    assert [each.value for each in found.history["scaling"]] == ["auto", *(["second"] if len(recipes) == 1 else [])]
    by_time = {asked.by_time for each in (found, *found.alternatives) for asked in each.gemms.values()}
    assert by_time == {way.precision is not SitePrecision.FP8}
    closed = replace(make_settings(Compute.AUTO), fuse=Fuse.ALWAYS)
    assert chosen(make_site, closed, SiteChoice(SitePrecision.OPEN, "second")) == closed
    assert chosen(make_site, closed, NATIVE).fuse is Fuse.ALWAYS  # what a rule says of fusing stays


def test_the_last_way_that_names_a_site_wins(make_site: MakeSite, make_settings: MakeSettings) -> None:
    sites = [make_site("a"), make_site("b")]
    switch = Choice((SiteChoice(SitePrecision.FP8, sites=("b",)),))
    both = Choice((NATIVE,), interactions=False).then(switch)
    assert both.interactions is False
    one, other = chosen_settings(sites, [make_settings(Compute.AUTO)] * 2, both, FILE)  # type: ignore[arg-type]
    assert one.gemms[Gemm.FPROP].compute is Compute.KEEP
    assert other.gemms[Gemm.FPROP].compute is Compute.AUTO
    assert switch.then(Choice((NATIVE,))).of("b") == NATIVE
    assert switch.of("a") is None


def test_sites_that_shared_their_settings_share_them_again(make_site: MakeSite, make_settings: MakeSettings) -> None:
    sites, wanted = [make_site("a"), make_site("b"), make_site("c")], make_settings(Compute.AUTO)
    choice = Choice((SiteChoice(SitePrecision.BF16, sites=("a", "b")),))
    one, other, third = chosen_settings(sites, [wanted] * 3, choice, FILE)  # type: ignore[arg-type]
    assert one is other
    assert third is wanted


def test_open_is_what_times_decide(make_settings: MakeSettings, opened: SiteSettings) -> None:
    assert is_open(opened)
    assert is_open(make_settings(Compute.FP8, dgrad=Compute.AUTO))
    assert is_open(replace(make_settings(Compute.FP8), alternatives=(make_settings(Compute.FP8),)))
    assert not is_open(make_settings(Compute.FP8, dgrad=Compute.KEEP))
    assert AS_IT_STANDS.as_it_stands
    assert not Choice(interactions=False).as_it_stands

"""What is said of one site, and of two plans."""

from __future__ import annotations

import pytest

from loka.errors import InputError
from loka.numerics.enums import Accumulation, Compute, Format, Gemm, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.format import common_pattern, format_gemm, pattern_of, rule_patterns
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from loka.plan.view.table import group_sites
from loka.policy.settings import GemmSettings, SiteSettings


@pytest.mark.parametrize(
    ("wrong", "hint"), [("layers.0.fbm.0", "layers.0.fmb.0"), ("fmb.0", "layers.0.fmb.0"), ("layers", "layers.0.fmb.0")]
)
def test_an_unknown_site_is_an_error_with_the_nearest_name(wrong, hint, make_plan, make_site):
    with pytest.raises(InputError, match=r"did you mean") as caught:
        explain(make_plan(make_site("layers.0.fmb.0"), make_site("head.out")), wrong)
    assert repr(hint) in str(caught.value)


def test_an_unknown_site_far_from_all_is_an_error_with_names_there_are(make_plan, make_site):
    few = make_plan(*(make_site(f"layers.{number}.up") for number in range(3)))
    with pytest.raises(InputError, match=r"'zzz'.*; they are 'layers\.0\.up', 'layers\.1\.up', 'layers\.2\.up' \("):
        explain(few, "zzz")
    many = make_plan(*(make_site(f"layers.{number}.up") for number in range(30)))
    with pytest.raises(
        InputError, match=r"there are, for example, 'layers\.0\.up', .*'layers\.7\.up' \(.* lists all 30"
    ):
        explain(many, "zzz")
    with pytest.raises(InputError, match="its model has no GEMM"):
        explain(make_plan(), "zzz")


def test_diff_finds_sites_that_came_went_changed_and_how_many_flops_moved(make_plan, make_site, make_settings):
    before = make_plan(make_site("gone", share=0.5), make_site("same", share=0.5))
    after = make_plan(
        make_site("same", share=0.5, k=512),
        make_site("new", share=0.5),
        settings=make_settings(Compute.FP8, wgrad=Compute.KEEP),
    )
    change = diff(before, after)
    assert (change.added, change.removed, change.resized) == (("new",), ("gone",), ("same",))
    (gemm,) = change.gemms
    assert (gemm.site, gemm.gemm, gemm.before, gemm.after) == ("same", Gemm.WGRAD, "e4m3 rowwise", "as-is")
    assert change.share_fp8 == (1.0, pytest.approx(2 / 3))
    assert not change.same


def test_diff_sees_accumulation_although_the_short_words_leave_it_out(make_plan, make_site, make_settings):
    settings = make_settings()
    fast = SiteSettings(
        {gemm: GemmSettings(Compute.FP8, each.operands, Accumulation.FAST) for gemm, each in settings.gemms.items()},
        history=settings.history,
    )
    change = diff(make_plan(make_site()), make_plan(make_site(), settings=fast))
    assert len(change.gemms) == 3
    assert "precise" in change.gemms[0].before
    assert "fast" in change.gemms[0].after


def test_words_name_both_operands_only_where_they_differ(make_plan, make_site, make_settings):
    recipe = OperandRecipe(Format.E5M2, Scaling.TENSORWISE, Range.STATIC, 3.5, power_of_two=True)
    settings = make_settings()
    gemms = dict(settings.gemms)
    gemms[Gemm.WGRAD] = GemmSettings(Compute.FP8, (recipe, OperandRecipe(scaling=Scaling.TENSORWISE)))
    plan = make_plan(make_site(), settings=SiteSettings(gemms, history=settings.history))
    words = [format_gemm(gemm) for gemm in plan.sites[0].gemms]
    assert words[0] == "e4m3 rowwise"
    assert words[2] == "grad_output e5m2 tensorwise static(3.5) pow2, input e4m3 tensorwise"


def test_sites_that_are_alike_share_a_row_only_when_asked(make_plan, make_site):
    sites = [make_site(f"layers.{i}.mlp.{j}", share=0.01) for i in range(10) for j in (0, 3)]
    plan = make_plan(*sites, make_site("head", n=1))
    assert len(group_sites(plan, alike=False)) == 21
    rows = group_sites(plan, alike=True)
    assert [(row.pattern, row.count) for row in rows] == [("layers.*.mlp.*", 20), ("head", 1)]
    assert rows[0].share == pytest.approx(0.2)


def test_a_group_names_what_its_members_share(make_plan, make_site):
    plan = make_plan(make_site("layers.0.mlp.3"), make_site("layers.1.mlp.3"), make_site("layers.1.mlp.0", k=8))
    assert [row.pattern for row in group_sites(plan, alike=True)] == ["layers.*.mlp.3", "layers.1.mlp.0"]


def test_a_few_sites_are_listed_where_their_pattern_would_match_others() -> None:
    names = [f"mlp.{number}" for number in (0, 3, 6)]
    assert rule_patterns(names[1:], names) == ["mlp.3", "mlp.6"]
    assert rule_patterns(names, names) == ["mlp.*"]
    assert rule_patterns([f"mlp.{number}" for number in range(1, 9)], ["mlp.0"]) == ["mlp.*"]  # too many
    parts = [f"layers.{layer}.{part}" for layer in range(4) for part in "qk"]
    assert rule_patterns(parts, [*parts, "layers.0.o"]) == ["layers.*.q", "layers.*.k"]
    assert rule_patterns(parts, [*parts, "head"]) == ["layers.*.*"]
    assert rule_patterns(parts[:2], [*parts[:2], "layers.0.o"]) == parts[:2]
    assert rule_patterns(["a.0", "b"], ["a.0", "b"]) == ["a.0", "b"]


def test_only_whole_parts_of_a_name_count_as_numbers():
    assert pattern_of("layers.12.fc1.0") == "layers.*.fc1.*"


def test_names_of_one_pattern() -> None:
    assert common_pattern(["layers.0.up", "layers.3.up"]) == "layers.*.up"
    assert common_pattern(["block1.a", "block1.a#3", "block2.b"]) == "block*"

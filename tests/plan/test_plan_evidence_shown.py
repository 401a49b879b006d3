"""Evidence in plan.json, in the rows of a plan, in what changed between two, and in what is explained of a site."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from loka.numerics.enums import Compute, Gemm, Operand, Range
from loka.numerics.recipe import OperandRecipe
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from loka.plan.view.histogram import histogram
from loka.plan.view.table import group_sites
from loka.policy.settings import Assignment
from loka.probe.profile.profile import Verdict
from loka.probe.stats.site_stats import LOWEST, MAGNITUDE_BINS

NAME = "layers.0.fmb.0"


@pytest.fixture
def evident_plan(make_plan, make_site, make_settings, make_known, make_estimate):
    """A plan of one site: fprop safe, dgrad undecided, wgrad infinitely wrong."""
    estimates = (
        make_estimate(mere=1 / 30),
        make_estimate(Gemm.DGRAD, sqnr=24.1),
        make_estimate(Gemm.WGRAD, mere=inf, mere_by=0.0, sqnr=-inf, sqnr_by=0.0),
    )
    return make_plan(make_site(), settings=make_settings(Compute.AUTO), known=make_known({NAME: estimates}))


def test_a_row_shows_the_worst_of_its_gemms_and_the_steps(evident_plan, make_plan, make_site):
    (row,) = group_sites(evident_plan, alike=False)
    assert (row.mere, row.sqnr_db, row.steps) == ("inf [inf, inf] wgrad", "-inf [-inf, -inf] wgrad", "40/4000")
    (bare,) = group_sites(make_plan(make_site()), alike=False)
    assert (bare.mere, bare.sqnr_db, bare.steps) == ("-", "-", "-")


def test_groups_are_by_decision_and_show_the_worst_of_the_group(
    make_plan, make_site, make_settings, make_known, make_estimate
):
    sites = [make_site(f"a.{i}", share=0.01) for i in range(30)]
    known = make_known({site.name: (make_estimate(mere=0.01 * (i + 1)),) for i, site in enumerate(sites[:29])})
    plan = make_plan(*sites, settings=make_settings(Compute.AUTO), known=known)
    rows = {row.reason.partition("; ")[0]: row for row in group_sites(plan, alike=True)}
    assert [row.count for row in rows.values()] == [19, 2, 8, 1]  # safe, undecided, unsafe, not in the profile
    first, undecided, unsafe, lacking = rows.values()
    assert first.mere == "0.19 [0.18, 0.2] fprop"
    assert undecided.reason.startswith("fprop: undecided: MERE 0.2")
    assert unsafe.reason.startswith("fprop: unsafe: MERE 0.29 [0.28, 0.3] over the budget 0.2")
    assert lacking.mere == "-"
    assert len(group_sites(plan, alike=False)) == 30


def test_static_ranges_of_a_profile_do_not_split_a_group(make_plan, make_site, make_settings, make_known):
    static = make_settings(Compute.FP8, recipe=OperandRecipe(range=Range.STATIC))
    one, two = make_known({"a.0": ()}, amax=2.0), make_known({"a.1": ()}, amax=3.0)
    known = replace(one, sites={**one.sites, **two.sites})
    (row,) = group_sites(make_plan(make_site("a.0"), make_site("a.1"), settings=static, known=known), alike=True)
    assert row.count == 2
    assert row.runs_in[0] == "e4m3 rowwise static"


def test_diff_says_which_evidence_changed_a_decision(make_plan, make_site, make_settings, make_known, make_estimate):
    auto = make_settings(Compute.AUTO)

    def planned(**figures):
        return make_plan(make_site(), settings=auto, known=make_known({NAME: (make_estimate(**figures),)}))

    before = make_plan(make_site(), settings=auto)
    (change,) = diff(before, planned()).gemms
    assert (change.gemm, change.before, change.after) == (Gemm.FPROP, "as-is", "e4m3 rowwise")
    assert change.evidence == "no evidence -> safe, MERE 0.02 [0.01, 0.03], SQNR 30.0 dB [29.5, 30.5]"
    (change,) = diff(planned(sqnr=24.1), planned()).gemms
    assert change.evidence.startswith("undecided, MERE 0.02 [0.01, 0.03], SQNR 24.1 dB [23.6, 24.6] -> safe, ")
    assert diff(planned(), planned(mere=0.03)).same  # evidence that decides the same is no change
    forced = make_plan(make_site(), settings=make_settings(Compute.FP8))
    assert {change.evidence for change in diff(before, forced).gemms} == {""}


def test_explain_judges_by_the_budget_of_the_site(make_plan, make_site, make_settings, make_known, make_estimate):
    settings = make_settings(Compute.KEEP)
    settings = replace(
        settings, history={**settings.history, "budget.mere": (Assignment("budget.mere", "0.01", "rule", "p.yaml", 3),)}
    )
    known = make_known({NAME: (make_estimate(),)})
    seen = explain(make_plan(make_site(), settings=settings, known=known), NAME, known).evidence
    assert (seen.budget.mere, seen.budget.sqnr_db) == (0.01, 24.0)
    assert seen.recipes[0].verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("sites", "seen", "note"),
    [
        ({"other": ()}, tuple(Operand), "the profile does not have this site: run loka probe"),
        ({NAME: ()}, (Operand.WEIGHT,), "never ran while probing"),
    ],
)
def test_explain_says_what_is_not_there(sites, seen, note, make_plan, make_site, make_known):
    known = make_known(sites, seen=seen)
    found = explain(make_plan(make_site(), known=known), NAME, known).evidence
    assert (found.note, found.recipes) == (note, ())


def test_explain_shows_a_merged_site_the_evidence_of_its_members(make_plan, make_site, make_known, make_estimate):
    merged = replace(make_site(), members=("a", "b"))
    known = make_known({"a": (make_estimate(),), "b": (make_estimate(),)})
    found = explain(make_plan(merged, known=known), NAME, known).evidence
    assert found.note == ""
    assert [each.gemm for each in found.recipes] == [make_estimate().gemm]


def test_explain_says_that_a_range_came_from_the_profile(make_plan, make_site, make_settings, make_known):
    static = make_settings(Compute.FP8, recipe=OperandRecipe(range=Range.STATIC))
    known = make_known({NAME: ()}, amax=2.5)
    fields = {field.path: field for field in explain(make_plan(make_site(), settings=static, known=known), NAME).fields}
    holds = fields["fprop.input.amax"].holds
    assert (holds.value, str(holds)) == ("2.5", "the largest |x| seen in profiles/ranker.safetensors")
    given = make_settings(Compute.FP8, recipe=OperandRecipe(range=Range.STATIC, amax=2.0))
    path = "fprop.input.amax"
    given = replace(given, history={path: (Assignment(path, "2.0", "defaults", "p.yaml", 4),)})
    (field,) = (
        each for each in explain(make_plan(make_site(), settings=given, known=known), NAME).fields if each.path == path
    )
    assert (field.holds.value, field.holds.place) == ("2.0", "p.yaml:4")


def counts(operand: Operand, octaves: dict[int, int]) -> list[int]:
    made = [0] * MAGNITUDE_BINS
    for exponent, count in octaves.items():
        made[2 * (exponent - LOWEST[operand])] = count - count // 2
        made[2 * (exponent - LOWEST[operand]) + 1] = count // 2
    return made


@pytest.mark.parametrize("operand", list(Operand))
def test_a_histogram_has_a_column_for_each_octave_under_its_exponent(operand):
    bars, axis = histogram(operand, counts(operand, {-9: 1, -8: 1000, -1: 1, 0: 30}))
    assert axis == "2^-16   2^-8    2^0     2^8"
    assert len(bars) == 17  # 2^-16 to 2^0, the last column with values
    assert bars[7] == "▁"  # 2^-9, one place before the label of 2^-8
    assert bars[8] == "█"
    assert bars[9:15] == " " * 6
    assert (bars[15], bars[16]) == ("▁", "▄")  # log(31) / log(1001) is 0.497 of the height


def test_a_histogram_reaches_the_outermost_octaves_and_of_zeros_alone_is_empty():
    first = LOWEST[Operand.INPUT]
    bars, axis = histogram(Operand.INPUT, counts(Operand.INPUT, {first: 5, first + 63: 5}))
    assert (len(bars), bars[0], bars[-1]) == (64, "█", "█")
    assert axis.startswith("2^-40 ")
    assert axis.endswith("2^24")
    assert histogram(Operand.INPUT, [0] * MAGNITUDE_BINS) == ("", "")

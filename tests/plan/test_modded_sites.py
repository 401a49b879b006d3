"""What a profile says of sites that a mod has merged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.mods.rewriting.batch_small import batched_site
from loka.mods.rewriting.merge_siblings import merged_site
from loka.mods.rewriting.pad_alignment import Pad, padded_site
from loka.numerics.enums import Gemm, Operand, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.evidence import MERGED, JudgedGemm, ProfiledSites, judge, with_merged_sites
from loka.policy.settings import Budget
from loka.probe.profile.profile import Estimate, Interval, OperandSummary, Profile, SiteProfile

ROWS, TENSOR = OperandRecipe(), OperandRecipe(scaling=Scaling.TENSORWISE)
TRANSPOSED = OperandRecipe(power_of_two=True, transposed=True)


def site(name: str, n: int = 32, **others: object) -> Site:
    parameters = (f"{name}.weight", f"{name}.bias")
    plain = Site(
        name, GemmKind.LINEAR, "", *parameters, RowCount(1), 48, n, 1, 1, 0.25, False, ("tanh",), ("relu",), ""
    )
    return replace(plain, **others)  # type: ignore[arg-type]


def estimate(gemm: Gemm, mere: float, sqnr: float, *operands: OperandRecipe) -> Estimate:
    pair = operands or (ROWS, ROWS)
    return Estimate(gemm, (pair[0], pair[-1]), Interval(mere, mere, mere), Interval(sqnr, sqnr, sqnr), 100)


def summary(operand: Operand, amax: float) -> OperandSummary:
    return OperandSummary(operand, 48, 1, 8, 8, 0, 0, 0.0, amax, amax, 1.0, (), (), None, None, 0.0)


def known(*estimates: tuple[Estimate, ...]) -> ProfiledSites:
    sites = tuple(
        SiteProfile(name, 48, 32, 8, (summary(Operand.INPUT, 1.0 + place),), found)
        for place, (name, found) in enumerate(zip("abc", estimates, strict=False))
    )
    return ProfiledSites.of(Profile("p", "m", "0", "now", 10, 1, 10, 8, sites, ()))


def test_a_merged_site_adds_up_its_members() -> None:
    merged = merged_site("a+b", "", [site("a"), site("b", 16, input_grad=True, followed_by=("silu",))])
    assert (merged.kind, merged.k, merged.n, merged.share) == (GemmKind.FUNCTIONAL_LINEAR, 48, 48, 0.5)
    assert (merged.weight, merged.input_grad, merged.followed_by) == (None, True, ())
    assert merged.members == ("a", "b")


def test_a_batched_site_cannot_be_in_fp8_and_a_padded_one_has_its_new_sizes() -> None:
    batched = batched_site("a+b", "", [site("a"), site("b")])
    assert (batched.kind, batched.calls, batched.n) == (GemmKind.BMM, 2, 32)
    assert batched.blocked is not None
    padded = padded_site(site("a", 30), Pad("a", ("a",), 48, 30, 16))
    assert (padded.k, padded.n, padded.kind, padded.name) == (48, 32, GemmKind.FUNCTIONAL_LINEAR, "a")


@pytest.mark.parametrize("gemm", [Gemm.FPROP, Gemm.WGRAD])
def test_products_side_by_side_err_as_the_worst_of_them(gemm: Gemm) -> None:
    evidence = known((estimate(gemm, 0.1, 30.0),), (estimate(gemm, 0.2, 28.0),))
    merged = merged_site("a+b", "", [site("a"), site("b")])
    found = with_merged_sites(evidence, [merged])
    assert found is not None
    (carried,) = found.sites["a+b"].estimates
    assert (carried.mere.high, carried.sqnr_db.low) == (0.2, 28.0)
    assert found.sites["a+b"].operands[0].amax == 2.0
    assert set(found.sites) == {"a", "b", "a+b"}


@pytest.mark.parametrize(
    "estimates",
    [
        (estimate(Gemm.DGRAD, 0.1, 30.0),),  # a sum of the members' products
        (estimate(Gemm.FPROP, 0.1, 30.0, ROWS, TENSOR),),  # one scale for the weights of all
        (estimate(Gemm.WGRAD, 0.1, 30.0, TRANSPOSED, TRANSPOSED),),  # one scale for all rows of both
    ],
)
def test_what_members_say_nothing_of_is_no_evidence(estimates: tuple[Estimate, ...]) -> None:
    found = with_merged_sites(known(estimates, estimates), [merged_site("a+b", "", [site("a"), site("b")])])
    assert found is not None
    assert found.sites["a+b"].estimates == ()
    (asked,) = estimates
    told = judge(found, "a+b", asked.gemm, asked.operands, Budget())
    assert told == JudgedGemm(None, MERGED), "to probe again would not help"


def test_a_member_without_evidence_leaves_the_merged_site_without() -> None:
    evidence = known((estimate(Gemm.FPROP, 0.1, 30.0),))
    found = with_merged_sites(evidence, [merged_site("a+b", "", [site("a"), site("b")])])
    assert found is not None
    assert "a+b" not in found.sites
    lacking = known((estimate(Gemm.FPROP, 0.1, 30.0),), ())
    again = with_merged_sites(lacking, [merged_site("a+b", "", [site("a"), site("b")])])
    assert again is not None
    assert again.sites["a+b"].estimates == ()
    told = judge(again, "a+b", Gemm.FPROP, (ROWS, ROWS), Budget())
    assert told.unsupported_reason == "no evidence: weight was never seen while probing"


def test_without_merged_sites_a_profile_stays_what_it_is() -> None:
    evidence = known((estimate(Gemm.FPROP, 0.1, 30.0),))
    assert with_merged_sites(evidence, [site("a")]) == evidence

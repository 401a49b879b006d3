"""Findings about transposed operands: their remedies untie them first, and no remedy ties one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.numerics.enums import Compute, Gemm, Operand, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe
from loka.policy.settings import Budget, GemmSettings, SiteSettings
from loka.probe.estimate import candidates
from loka.probe.finding_evidence import FindingEvidence
from loka.probe.findings import find, gradient_underflows, underflow
from loka.probe.profile.profile import Estimate, Interval
from loka.probe.profile.summarise import summarise
from loka.probe.stats.site_stats import SiteStats
from tests.support.learned_stats import operand_of, seeded

K, N, ROWS = 64, 32, 512

SITE = Site("tower.0", GemmKind.LINEAR, "tower", "tower.0.weight", None, RowCount(1), K, N, 1, 1, 1.0, True, (), (), "")
TRANSPOSED = {gemm: candidates(gemm)[-1] for gemm in Gemm}
SETTINGS = SiteSettings({gemm: GemmSettings(Compute.FP8, TRANSPOSED[gemm]) for gemm in Gemm}, Budget())


def seen(grad: torch.Tensor, estimates: tuple[Estimate, ...] = ()) -> FindingEvidence:
    x = torch.randn(ROWS, K, generator=seeded(1))
    parts = (operand_of(Operand.INPUT, x), operand_of(Operand.GRAD_OUTPUT, grad))
    stats = SiteStats("tower.0", K, N, *parts, None, None)
    return FindingEvidence(SITE, stats, summarise(stats, estimates, ROWS), SETTINGS, None)


def estimate(gemm: Gemm, pair: OperandPair, mere: float) -> Estimate:
    return Estimate(gemm, pair, Interval(mere, mere, mere), Interval(30.0, 29.0, 31.0), 64)


@pytest.mark.parametrize("far", [24, 60])
def test_an_underflow_beside_the_largest_row_is_that_of_a_transposed_gradient(far: int) -> None:
    """Half of the features lie far below the others; each of them alone has a scale that it can be written with."""
    grad = torch.ones(ROWS, N)
    grad[:, : N // 2] = 2.0**-far
    evidence = seen(grad)
    found = [each for each in gradient_underflows(evidence) if each.evidence.startswith("wgrad")]
    assert len(found) == 1
    assert "rounded to zero in e4m3 transposed" in found[0].evidence
    assert yaml.safe_load(found[0].remedy)["rules"][0]["wgrad"] == {"requantize_transpose": False, "scaling": "rowwise"}


def test_nothing_of_a_transposed_gradient_is_lost_where_nothing_is_far_below() -> None:
    evidence = seen(torch.randn(ROWS, N, generator=seeded(0)))
    assert [each for each in gradient_underflows(evidence) if each.evidence.startswith("wgrad")] == []
    summary = evidence.summary.operand(Operand.GRAD_OUTPUT)
    assert summary is not None
    beside_rows = replace(TRANSPOSED[Gemm.WGRAD][0], scaling=Scaling.ROWWISE)
    lost = {underflow(summary, Gemm.WGRAD, recipe) for recipe in (TRANSPOSED[Gemm.WGRAD][0], beside_rows)}
    assert lost == {underflow(summary, Gemm.WGRAD, OperandRecipe(scaling=Scaling.TENSORWISE))}


def test_a_remedy_for_an_error_over_budget_is_one_that_two_words_can_say() -> None:
    grad = torch.randn(ROWS, N, generator=seeded(0))
    rowwise = (OperandRecipe(), OperandRecipe())
    for others, remedy in (
        ((), {"compute": "keep"}),
        ((estimate(Gemm.WGRAD, (OperandRecipe(power_of_two=True),) * 2, 0.1),), {"compute": "keep"}),
        (
            (estimate(Gemm.WGRAD, rowwise, 0.1),),
            {"requantize_transpose": False, "power_of_two": False, "format": "e4m3", "scaling": "rowwise"},
        ),
    ):
        evidence = seen(grad, (estimate(Gemm.WGRAD, TRANSPOSED[Gemm.WGRAD], 0.5), *others))
        found = find(SITE, evidence.stats, evidence.summary, SETTINGS, None)
        rules = [yaml.safe_load(each.remedy)["rules"][0] for each in found if each.kind == "over_budget"]
        assert [rule["wgrad"] for rule in rules] == [remedy]

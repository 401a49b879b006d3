"""The precision of GEMMs and sites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.bench.report.precision import (
    LABELS,
    MEANINGS,
    Precision,
    fused_sites,
    precision_of,
    site_precision,
)
from loka.numerics.enums import Gemm
from tests.support.plan.report_plans import E4M3, E5M2, gemm_plan, interaction, plan_of_sites, site_plan


@pytest.mark.parametrize(
    ("operands", "fused", "precision"),
    [
        (None, False, Precision.NATIVE),
        (None, True, Precision.FUSED),
        ((E4M3, E4M3), True, Precision.E4M3),
        ((E5M2, E5M2), False, Precision.E5M2),
        ((E5M2, E4M3), False, Precision.MIXED),
    ],
)
def test_a_gemm_has_the_precision_of_its_operands(operands, fused, precision) -> None:
    assert precision_of(gemm_plan(Gemm.DGRAD, operands), fused) is precision


def test_a_site_has_that_of_most_of_its_gemms() -> None:
    site = site_plan("a")
    kept = gemm_plan(Gemm.WGRAD, None)
    assert site_precision(replace(site, gemms=(*site.gemms[:2], kept)), False) is Precision.E4M3
    assert site_precision(replace(site, gemms=(site.gemms[0], kept, kept)), True) is Precision.FUSED
    assert site_precision(replace(site, gemms=()), False) is Precision.NATIVE


def test_sites_in_regions_and_interactions_are_fused() -> None:
    plan = plan_of_sites(
        site_plan("a", fp8=False, region=("linear", "relu")),
        site_plan("b", fp8=False),
        site_plan("c", fp8=False),
        interactions=(interaction("", takes=("c",)),),
    )
    assert fused_sites(plan) == {"a", "c"}


def test_every_precision_has_words() -> None:
    assert set(LABELS) == set(MEANINGS) == set(Precision)

"""The precision that a GEMM of a plan runs in, as the page shows and colours it."""

from __future__ import annotations

from enum import StrEnum

from loka.numerics.enums import Format
from loka.plan.plan import GemmPlan, Plan, SitePlan
from loka.plan.select.interaction_times import interaction_by_site


class Precision(StrEnum):
    """A colour of the page. The values are the names of its CSS classes."""

    NATIVE = "native"
    FUSED = "fused"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    MIXED = "mixed"


LABELS = {
    Precision.NATIVE: "native",
    Precision.FUSED: "BF16 fused",
    Precision.E4M3: "FP8 e4m3",
    Precision.E5M2: "FP8 e5m2",
    Precision.MIXED: "FP8 mixed",
}
MEANINGS = {
    Precision.NATIVE: "in the model's own dtype, by the kernels that it always had",
    Precision.FUSED: "in the model's own dtype, with a generated kernel for what stands around it",
    Precision.E4M3: "both operands in e4m3",
    Precision.E5M2: "both operands in e5m2",
    Precision.MIXED: "one operand in e4m3, the other in e5m2",
}


def precision_of(gemm: GemmPlan, fused: bool) -> Precision:
    """The precision of a GEMM; `fused` says whether a generated kernel takes what stands around its site along."""
    if gemm.operands is None:
        return Precision.FUSED if fused else Precision.NATIVE
    formats = {recipe.format for recipe in gemm.operands}
    if len(formats) > 1:
        return Precision.MIXED
    return Precision.E4M3 if formats == {Format.E4M3} else Precision.E5M2


def fused_sites(plan: Plan) -> frozenset[str]:
    """The sites around or within which a generated kernel computes more than the GEMM."""
    return frozenset(interaction_by_site(plan)) | {each.site.name for each in plan.sites if each.region}


def site_precision(site: SitePlan, fused: bool) -> Precision:
    """The precision of most of a site's GEMMs, the first of them where several are as many."""
    found = [precision_of(gemm, fused) for gemm in site.gemms]
    return max(dict.fromkeys(found), key=found.count) if found else Precision.NATIVE

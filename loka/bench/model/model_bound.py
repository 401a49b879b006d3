"""The bound of a whole step of a model: its GEMM sites, one pass before each that is fed by one, and the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from loka.bench.model.model_variants import ModelVariant
from loka.bench.speed.roofline import Peaks, SiteWork, bytes_us, model_us
from loka.bench.subjects.peers import takes_fp8
from loka.bench.subjects.variants import Precision
from loka.plan.plan import Plan
from loka.sites.site import GemmKind, Site

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # as Site.fed_by names them
LINEARS = (GemmKind.LINEAR, GemmKind.FUNCTIONAL_LINEAR)

# Passes over the parameters' bytes: gradient and value read, value written, and each state read and written.
OPTIMIZER_PASSES: Mapping[str, int] = {"sgd": 3, "adagrad": 5, "adam": 7}


@dataclass(frozen=True, slots=True)
class ModelBound:
    """What the bounds of all variants have in common."""

    batch: int
    training: bool
    peaks: Peaks
    optimizer: str
    parameter_bytes: int  # of those that are trained

    def of_plan(self, plan: Plan) -> float | None:
        """Milliseconds of a generated package."""
        fp8 = frozenset(each.site.name for each in plan.sites if each.fp8)
        fast = {gemm.accumulation == "fast" for each in plan.sites for gemm in each.gemms if gemm.fp8}
        precision = Precision.BF16 if not fp8 else Precision.FP8_FAST if fast == {True} else Precision.FP8
        return self._milliseconds([each.site for each in plan.sites], fp8, precision)

    def of_variant(self, variant: ModelVariant, sites: Sequence[Site]) -> float | None:
        """Milliseconds of a variant without a package."""
        if variant.float32:
            return self._milliseconds(sites, frozenset(), Precision.TF32)
        if not variant.torchao:
            return self._milliseconds(sites, frozenset(), Precision.BF16)
        return self._milliseconds(sites, torchao_sites(sites), Precision.FP8_FAST)

    def _milliseconds(self, sites: Iterable[Site], fp8: frozenset[str], precision: Precision) -> float | None:
        found = model_us(site_works(sites, self.batch, fp8), precision, self.training, self.peaks)
        if found is None:
            return None
        moved = OPTIMIZER_PASSES[self.optimizer] * self.parameter_bytes if self.training else 0
        return (found + bytes_us(moved, self.peaks)) / 1e3


def torchao_sites(sites: Iterable[Site]) -> frozenset[str]:
    """Names of the sites that torchao's filter runs in FP8."""
    return frozenset(site.name for site in sites if site.kind is GemmKind.LINEAR and takes_fp8(site.k, site.n))


def site_works(sites: Iterable[Site], batch: int, fp8: frozenset[str]) -> tuple[SiteWork, ...]:
    """The work that the bound counts for each site.

    A linear fed by an elementwise operation has a pass before it. The other products of one module are assumed to read
    one tensor: only the largest fed one has a pass, so that a shared tensor counts once. A product that runs once for
    each sample counts as one with all rows.
    """
    passed: dict[str, Site] = {}
    for site in sites:
        if site.kind not in LINEARS and _is_fed(site):
            largest = passed.get(site.owner)
            if largest is None or site.rows.at(batch) * site.k > largest.rows.at(batch) * largest.k:
                passed[site.owner] = site
    works = []
    for site in sites:
        rows = site.rows.at(batch)
        fed = _is_fed(site) if site.kind in LINEARS else passed.get(site.owner) is site
        works.append(SiteWork(rows, site.k, site.n, site.calls, site.name in fp8, rows * site.k if fed else 0))
    return tuple(works)


def _is_fed(site: Site) -> bool:
    """True if an elementwise operation stands between this GEMM and the one before."""
    return any(True for _ in takewhile(lambda operation: operation not in PRODUCTS, site.fed_by))

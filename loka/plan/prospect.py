"""What FP8 would bring where a plan has none of it: with evidence that it is safe, or in larger batches.

A policy without a profile keeps every GEMM that `compute: auto` leaves open, and small batches are faster in BF16.
Either way a first plan says nothing about what there is to win. So such a policy is planned again: as if FP8 were safe
everywhere, and then for larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loka.mods.adaptation import Adaptation, mod_fingerprints
from loka.numerics.enums import Compute
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_share, format_speedup, format_us
from loka.plan.plan import Plan
from loka.plan.totals import total_time
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Estimate, Interval, Profile, SiteProfile
from loka.sites.site import Site
from loka.version import __version__

FACTORS = (1, 2, 4, 8, 16, 32)  # of the policy's batch size
WORTH = 1.05  # the speed-up from which a batch size is named
MANY = 1000  # sites beyond which planning several times takes too long


@dataclass(frozen=True, slots=True)
class Prospect:
    """What FP8 would bring at a batch size. Times are of a training step's sites, in microseconds."""

    batch_size: int
    share_fp8: float  # of the training GEMM FLOPs
    us: float
    as_is_us: float
    assumed: bool  # that FP8 is safe, for want of a profile

    @property
    def speedup(self) -> float:
        """Speed-up over the model as it is, in BF16."""
        return self.as_is_us / self.us

    def describe(self, batch_size: int) -> str:
        """A sentence; `batch_size` is the policy's."""
        given = "if a profile finds it safe (loka probe)" if self.assumed else "by this profile"
        gain = (
            f"{format_share(self.share_fp8)} of the training GEMM FLOPs in FP8, {format_us(self.us)} instead of "
            f"{format_us(self.as_is_us)}, {format_speedup(self.speedup)}"
        )
        if self.speedup < WORTH:
            return f"FP8 would hardly gain at batch sizes up to {self.batch_size}, {given}: the GEMMs are too small"
        if self.batch_size == batch_size:
            return f"what FP8 would bring here, {given}: {gain}"
        return f"FP8 would hardly gain at batch size {batch_size}; at {self.batch_size}, {given}: {gain}"


def prospect_of(plan_at: Callable[[int, bool], Plan], plan: Plan, settings: Sequence[SiteSettings]) -> Prospect | None:
    """What FP8 would bring where a plan has none though `compute: auto` leaves it open; None otherwise, without times,
    where something else than time keeps every GEMM (evidence, a forward), and for models of more than MANY sites.

    `plan_at(batch_size, assumed)` plans the policy at another batch size, with its profile or, if `assumed`, as if FP8
    were safe. The first batch size is taken where it gains, or the largest that was tried.
    """
    left_open = any(asked.compute is Compute.AUTO for wanted in settings for asked in wanted.gemms.values())
    if plan.share_fp8 > 0 or plan.measurements is None or not left_open or not 0 < len(plan.called) <= MANY:
        return None
    assumed, found = plan.profile is None, None
    for factor in FACTORS:
        planned = plan_at(factor * plan.batch_size, assumed)
        total = total_time(planned)
        if total is None:
            return None
        found = Prospect(planned.batch_size, planned.share_fp8, total.us, total.as_is_us, assumed)
        if planned.share_fp8 > 0 and found.speedup >= WORTH:
            return found
        if not any(site.timing is not None and site.timing.kept for site in planned.sites):
            return None
    return found


def safe_profile(
    sites: Sequence[Site], settings: Sequence[SiteSettings], factory: str, adaptations: Sequence[Adaptation]
) -> ProfiledSites:
    """Made-up evidence that every GEMM of a model is safe in each recipe of its settings."""
    mere, sqnr = Interval(0.0, 0.0, 0.0), Interval(99.0, 99.0, 99.0)
    profiles = []
    for site, wanted in zip(sites, settings, strict=True):
        estimates = tuple(
            Estimate(gemm, asked.operands, mere, sqnr, draws=1)
            for each in (wanted, *wanted.alternatives)
            for gemm, asked in each.gemms.items()
        )
        profiles.append(SiteProfile(site.name, site.k, site.n, 0, (), estimates))
    profile = Profile("assumed", factory, __version__, "", 1, 1, 1, 1, tuple(profiles), ())
    return ProfiledSites.of(replace(profile, mods=mod_fingerprints(adaptations)), "assumed safe")

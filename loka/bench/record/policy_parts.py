"""The parts that a policy's sites need: all that planning would look up if every GEMM were safe in FP8."""

from __future__ import annotations

import os
from dataclasses import replace

from loka.kernels.measurements.parts import Part, PartTime, TimeSource
from loka.mods.fingerprint import mod_fingerprints
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import ProfiledSites
from loka.plan.planner import Examined, examine, plan_of
from loka.probe.profile.profile import Estimate, Interval, Profile, SiteProfile
from loka.version import __version__


class RequestedParts:
    """Part costs that record each requested part and answer one microsecond."""

    def __init__(self) -> None:
        """Start without requests."""
        self.name, self.sha256 = "requested", ""
        self._parts: dict[Part, None] = {}

    def time(self, part: Part) -> PartTime | None:
        """Record the part; always one microsecond."""
        self._parts[part] = None
        return PartTime(1.0, 0.0, TimeSource.MEASURED)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The requested parts, in the order of the first requests."""
        return tuple(self._parts)


def parts_of_policy(path: str | os.PathLike[str]) -> tuple[Part, ...]:
    """The parts of every execution option of a policy's sites, at its batch size; any profile is ignored.

    Raises the InputErrors of planning.
    """
    examined = examine(load_policy(os.fspath(path)))
    requested = RequestedParts()
    plan_of(examined, assumed_safe(examined), requested)
    return requested.parts


def assumed_safe(examined: Examined) -> ProfiledSites:
    """Made-up evidence that every GEMM of every site is safe in the recipes of its policy."""
    mere, sqnr = Interval(0.0, 0.0, 0.0), Interval(99.0, 99.0, 99.0)
    sites = []
    for site, settings in zip(examined.sites, examined.settings, strict=True):
        estimates = tuple(
            Estimate(gemm, wanted.operands, mere, sqnr, draws=1)
            for each in (settings, *settings.alternatives)
            for gemm, wanted in each.gemms.items()
        )
        sites.append(SiteProfile(site.name, site.k, site.n, 0, (), estimates))
    model = examined.policy.model.factory
    profile = Profile("assumed", model, __version__, "", 1, 1, 1, examined.policy.model.batch_size, tuple(sites), ())
    profile = replace(profile, mods=mod_fingerprints(examined.adapted.adaptations))
    return ProfiledSites.of(profile, "assumed safe")

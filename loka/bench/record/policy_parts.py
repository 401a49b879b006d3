"""The parts that the sites of a policy's model need: every one that planning would ask for if all of it were safe."""

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
    """Costs that note what they are asked for, and say that all of it takes a microsecond."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.name, self.sha256 = "requested", ""
        self._parts: dict[Part, None] = {}

    def time(self, part: Part) -> PartTime | None:
        """One microsecond."""
        self._parts[part] = None
        return PartTime(1.0, 0.0, TimeSource.MEASURED)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What was asked for, in that order."""
        return tuple(self._parts)


def parts_of_policy(path: str | os.PathLike[str]) -> tuple[Part, ...]:
    """The parts of every execution option of the sites of a policy, at its batch size, whatever a profile says of them.

    Raises InputError as planning does.
    """
    examined = examine(load_policy(os.fspath(path)))
    requested = RequestedParts()
    plan_of(examined, assumed_safe(examined), requested)
    return requested.parts


def assumed_safe(examined: Examined) -> ProfiledSites:
    """Evidence that every GEMM of every site is safe in the recipe that its policy asks for."""
    mere, sqnr = Interval(0.0, 0.0, 0.0), Interval(99.0, 99.0, 99.0)
    sites = []
    for site, settings in zip(examined.sites, examined.settings, strict=True):
        estimates = tuple(
            Estimate(gemm, wanted.operands, mere, sqnr, draws=1) for gemm, wanted in settings.gemms.items()
        )
        sites.append(SiteProfile(site.name, site.k, site.n, 0, (), estimates))
    model = examined.policy.model.factory
    profile = Profile("assumed", model, __version__, "", 1, 1, 1, examined.policy.model.batch_size, tuple(sites), ())
    profile = replace(profile, mods=mod_fingerprints(examined.adapted.adaptations))
    return ProfiledSites.of(profile, "assumed safe")

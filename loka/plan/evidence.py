"""Evidence of a profile for each GEMM: a verdict on its recipe and budget, with figures, and its static ranges.

A profile is opened, and its code imported, only if the policy names one. So are measurements; without a file in the
policy, those that ship for its target are.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from loka.devices.targets import spec_of
from loka.errors import Code, InputError
from loka.graph.sites.site import Site
from loka.kernels.measurements.lookup import Measurements
from loka.mods.adaptation import Adaptation, mismatch_reason, mod_fingerprints
from loka.numerics.enums import OPERANDS, Gemm, Operand, Scaling
from loka.numerics.recipe import OperandPair
from loka.paths import open_plain, shown
from loka.plan.format import format_near_budget, format_operands, format_over_budget
from loka.plan.ne import over_ne_budget
from loka.plan.plan import Evidence, GemmPlan, Plan
from loka.policy.policy import Policy
from loka.policy.settings import Budget
from loka.probe.profile.profile import (
    Estimate,
    NeEstimate,
    OperandSummary,
    Profile,
    SiteProfile,
    Verdict,
    sum_of_changes,
)

NO_EVIDENCE = "no evidence: run loka probe"
MERGED = "no evidence: its error does not follow from those of the products that are merged; compute: fp8 takes it"
NEVER_RAN = "never ran while probing"
_LISTED = 20  # GEMMs over budget, or sites of another shape, listed in a message


class OutdatedProfileError(InputError):
    """A profile of the model as it was: with other mods, or with sites of other shapes."""


@dataclass(frozen=True, slots=True)
class ProfiledSites:
    """A profile with its sites by name."""

    profile: Profile
    sites: Mapping[str, SiteProfile]
    name: str  # relative to the policy's directory: the same on every machine
    sha256: str
    place: str = ""  # position of the field in the policy, file:line:column
    merged: frozenset[str] = frozenset()  # names of sites that were not probed, but several in the place of each

    @classmethod
    def of(cls, profile: Profile, name: str = "the profile", sha256: str = "", place: str = "") -> ProfiledSites:
        """A profile with its sites by name."""
        return cls(profile, {site.name: site for site in profile.sites}, name, sha256, place)


@dataclass(frozen=True, slots=True)
class JudgedGemm:
    """Judgement of one GEMM: `evidence` if there is an estimate, and why FP8 is not safe, or ""."""

    evidence: Evidence | None
    unsupported_reason: str


def open_profile(policy: Policy) -> ProfiledSites | None:
    """Opens the profile that a policy names, or the one at its default place; None where there is neither.

    Raises InputError, with the position of the field, where the file is missing, is no profile, or is of another model.
    """
    path = policy.profile_file
    if path is None:
        return None
    place = policy.where("profile")
    from loka.probe.profile.profile_file import load_profile  # loading it imports torch

    try:
        with open_plain(path, largest=None) as file:
            profile = load_profile(path)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise InputError(
            f"{place}: profile: {path} is not there: run loka probe {policy.path}, or leave the field out until then",
            Code.PROFILE,
        ) from error
    except InputError as error:
        raise InputError(f"{place}: profile: {error}", Code.PROFILE) from error
    except OSError as error:
        raise InputError(
            f"{place}: profile: {shown(path)}: cannot be read: {error.strerror or error}; check the path",
            Code.PROFILE,
        ) from error
    if profile.model != policy.model.factory:
        raise InputError(
            f"{place}: profile: {path} was learned of {profile.model}, and this policy is for {policy.model.factory}: "
            f"name the profile of that model, or run loka probe {policy.path}",
            Code.OTHER_PROFILE,
        )
    return ProfiledSites.of(profile, portable_name(policy, policy.profile_name or "", path), digest, place)


def check_sites(known: ProfiledSites, sites: Sequence[Site], adaptations: Sequence[Adaptation] = ()) -> None:
    """Raises OutdatedProfileError if the profile is of another model; `adaptations` are those of this one's mods.

    Either the profiled model had other mods, or a site has another shape; the message has both shapes.
    """
    other = mismatch_reason(known.profile.mods, mod_fingerprints(adaptations))
    if other is not None:
        raise OutdatedProfileError(
            f"{known.place}: profile: {known.name} was learned of the model {other}: it is not evidence for what this "
            "policy's mods make; run loka probe",
            Code.OTHER_PROFILE,
        )
    changed = []
    for site in sites:
        seen = known.sites.get(site.name)
        if seen is not None and (seen.k, seen.n) != (site.k, site.n):
            changed.append(
                f"{known.place}: profile: site {site.name!r} has K = {seen.k}, N = {seen.n} in {known.name} and "
                f"K = {site.k}, N = {site.n} in the model: the model changed, run loka probe again"
            )
    if changed:
        rest = [f"and {len(changed) - _LISTED} more sites"] if len(changed) > _LISTED else []
        raise OutdatedProfileError("\n".join([*changed[:_LISTED], *rest]), Code.OTHER_PROFILE)


def judge(known: ProfiledSites | None, site: str, gemm: Gemm, requested: OperandPair, budget: Budget) -> JudgedGemm:
    """Judges a GEMM of a site by the evidence for exactly the recipes that the policy requests.

    An estimate for the same recipes with static ranges filled in from the profile is used too.
    """
    if known is None:
        return JudgedGemm(None, NO_EVIDENCE)
    seen = known.sites.get(site)
    if seen is None:
        return JudgedGemm(None, f"no evidence for this site in {known.name}: run loka probe")
    estimate = seen.estimate(gemm, requested)
    if estimate is None:
        never = site in known.merged and not _follows(gemm, requested)
        return JudgedGemm(None, MERGED if never and ran(seen) else _lacking(seen, gemm, requested))
    evidence = evidence_of(estimate, budget, known.profile, seen)
    unsupported_reason = "" if evidence.verdict is Verdict.SAFE else f"{evidence.verdict.value}: {evidence.figures}"
    return JudgedGemm(evidence, unsupported_reason)


def waits_for_evidence(gemms: Sequence[GemmPlan]) -> bool:
    """True if any of a site's GEMMs is kept for want of a profile."""
    return any(gemm.reason == NO_EVIDENCE for gemm in gemms)


def evidence_of(estimate: Estimate, budget: Budget, profile: Profile, site: SiteProfile) -> Evidence:
    """An estimate of a site of the profile, judged against a budget, with the change of NE by the same recipe."""
    verdict = estimate.verdict(budget)
    figures = ""
    if verdict is not Verdict.SAFE:
        describe = format_over_budget if verdict is Verdict.UNSAFE else format_near_budget
        figures = describe(estimate.mere, estimate.sqnr_db, budget)
    ne = site.ne_estimate(estimate.gemm, estimate.operands)
    return Evidence(
        mere=estimate.mere,
        sqnr_db=estimate.sqnr_db,
        draws=estimate.draws,
        steps=profile.steps,
        samples=profile.samples,
        verdict=verdict,
        figures=figures,
        ne_percent=ne.ne_percent if ne is not None else None,
    )


def ran(seen: SiteProfile) -> bool:
    """True if a site was called while probing; the weight is recorded in any case."""
    return any(operand.operand is not Operand.WEIGHT for operand in seen.operands)


def over_budget(plan: Plan) -> tuple[str, ...]:
    """The GEMMs that run in FP8 although the evidence says that they exceed their budget: a line for each."""
    return tuple(
        f"{site.site.name} {gemm.gemm.value}: {gemm.evidence.figures}"
        for site in plan.sites
        for gemm in site.gemms
        if gemm.over_budget and gemm.evidence is not None
    )


def over_budget_message(plan: Plan) -> str:
    """The same as one message with advice, and the whole plan's change of NE; "" where nothing is over budget."""
    source = plan.profile[0] if plan.profile is not None else "the profile"
    return "\n".join(filter(None, (_gemms_over_budget(over_budget(plan), source), over_ne_budget(plan, source))))


def _gemms_over_budget(lines: Sequence[str], source: str) -> str:
    if not lines:
        return ""
    listed = [f"  {line}" for line in lines[:_LISTED]]
    if len(lines) > _LISTED:
        listed.append(f"  and {len(lines) - _LISTED} more")
    gemms = "1 GEMM is" if len(lines) == 1 else f"{len(lines)} GEMMs are"
    head = f"{gemms} over budget by {source}, and forced into FP8 by `compute: fp8`:"
    advice = "Write `compute: auto` or `compute: keep` there, choose another recipe, or widen their budget."
    return "\n".join([head, *listed, advice])


def _lacking(seen: SiteProfile, gemm: Gemm, requested: OperandPair) -> str:
    """Reason why there is no estimate."""
    if not ran(seen):
        return NEVER_RAN
    for operand in OPERANDS[gemm]:
        if seen.operand(operand) is None:
            return f"no evidence: {operand.value} was never seen while probing"
    return f"no evidence for {format_operands(gemm, requested)}: run loka probe"


def with_merged_sites(known: ProfiledSites, sites: Sequence[Site]) -> ProfiledSites:
    """The profile extended by merged sites, as far as the evidence for their members carries over."""
    merged = [site for site in sites if site.members and site.blocked is None]
    found = _merged(known.sites, merged)
    return replace(known, sites={**known.sites, **found}, merged=frozenset(found))


def _merged(seen: Mapping[str, SiteProfile], sites: Sequence[Site]) -> dict[str, SiteProfile]:
    found = {}
    for site in sites:
        members = [seen[name] for name in site.members if name in seen]
        if len(members) == len(site.members):
            worst = (_worst(each, members) for each in members[0].estimates)
            estimates = [each for each in worst if each is not None]
            operands = tuple(_largest(each, members) for each in members[0].operands)
            ne = tuple(each for each in (_summed(first, members) for first in members[0].ne) if each is not None)
            found[site.name] = SiteProfile(site.name, site.k, site.n, members[0].rows, operands, tuple(estimates), ne)
    return found


def _follows(gemm: Gemm, operands: OperandPair) -> bool:
    """True if the errors of several GEMMs with a recipe bound that of the one that they are merged into.

    fprop's product is a concatenation of theirs along N, wgrad's along rows, so that no error is larger than the
    largest of theirs, as long as the operand that differs between them has a scale per row. dgrad sums their products:
    estimates of the terms do not determine the error of the sum.
    """
    differing = {Gemm.FPROP: 1, Gemm.WGRAD: 0}.get(gemm)  # the weight; the output gradient
    if differing is None or any(each.transposed for each in operands):
        return False
    return operands[differing].scaling is Scaling.ROWWISE


def _worst(estimate: Estimate, members: Sequence[SiteProfile]) -> Estimate | None:
    """The worst estimate of the members with one recipe, if these bound that of the merged GEMM; otherwise None."""
    if not _follows(estimate.gemm, estimate.operands):
        return None
    same = [
        each
        for member in members
        for each in member.estimates
        if (each.gemm, each.operands) == (estimate.gemm, estimate.operands)
    ]
    if len(same) != len(members):
        return None
    mere = max((each.mere for each in same), key=lambda interval: interval.high)
    sqnr = min((each.sqnr_db for each in same), key=lambda interval: interval.low)
    return replace(estimate, mere=mere, sqnr_db=sqnr, draws=min(each.draws for each in same))


def _summed(estimate: NeEstimate, members: Sequence[SiteProfile]) -> NeEstimate | None:
    """The change of NE by all members with one recipe; None where the merged GEMM would round otherwise.

    As in `_worst`, each row of the weight needs a scale of its own.
    """
    weight = estimate.operands[1]
    if estimate.gemm is not Gemm.FPROP or weight.scaling is not Scaling.ROWWISE or weight.transposed:
        return None
    same = [member.ne_estimate(estimate.gemm, estimate.operands) for member in members]
    known = [each for each in same if each is not None]
    if len(known) != len(members):
        return None
    return replace(
        estimate,
        ne_percent=sum_of_changes([each.ne_percent for each in known]),
        run_percent=math.hypot(*(each.run_percent for each in known)),
        varying_error=max(each.varying_error or 0.0 for each in known),
    )


def _largest(operand: OperandSummary, members: Sequence[SiteProfile]) -> OperandSummary:
    """The summary of an operand from the member in which it was largest, which determines static ranges."""
    same = [each for member in members for each in member.operands if each.operand is operand.operand]
    return max(same, key=lambda each: each.amax)


def open_measurements(policy: Policy) -> Measurements | None:
    """The measurements in the file that a policy names; without one, the set that ships for its target, or None.

    Raises InputError, with the position of the field, where the file is missing, damaged, something else, of a newer
    LoKA, or was not measured on the policy's target, and where the target is the reference path.
    """
    path = policy.measurements_file
    if path is None:
        return Measurements.shipped(policy.target)
    if spec_of(policy.target).is_reference:
        raise InputError(
            f"{policy.where('measurements')}: measurements: the reference path has no kernels to choose from, and "
            "nothing is measured for it; leave `measurements` out, or name the target that was measured",
            Code.MEASUREMENTS,
        )
    try:
        return Measurements.open(path, policy.target, portable_name(policy, policy.measurements or "", path))
    except InputError as error:
        raise InputError(f"{policy.where('measurements')}: measurements: {error}", Code.MEASUREMENTS) from error


def portable_name(policy: Policy, named: str, path: Path) -> str:
    """A file's name in a plan: relative to the policy's directory; for an absolute path, its last component."""
    if PurePath(named).is_absolute():
        return path.name
    return PurePath(os.path.relpath(path, policy.path.parent)).as_posix()

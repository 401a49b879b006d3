"""From what a policy asks to what runs: one decision for every GEMM of every site, each with its reason.

Pure: settings, sites and what tracing found go in, decisions come out. Nothing here looks at a model or a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from loka.errors import InputError
from loka.kernels.catalogue import PREFERRED, Kernel
from loka.numerics.names import Compute, Gemm
from loka.plan.evidence import Judged, Known, judge, with_ranges
from loka.plan.pinned import candidates, impossible_pins, pinned_operands, unknown_kernels
from loka.plan.plan import AS_IS, GemmPlan, Rejected, SitePlan, Target
from loka.plan.turning import why_not_turned
from loka.plan.words import place_words
from loka.policy.settings import Assignment, GemmSettings, SiteSettings
from loka.probe.profile import Verdict
from loka.sites.site import Site

_Sifted = tuple[tuple[str, ...], tuple[Rejected, ...]]


@dataclass(frozen=True, slots=True)
class Situation:
    """What all sites of a plan are decided against."""

    target: Target
    batch_size: int
    files: Mapping[str, str] = field(default_factory=dict)  # a policy file as the plan calls it -> as the user named it
    kernels: tuple[Kernel, ...] = PREFERRED
    known: Known | None = None  # the policy's profile


class ImpossibleRuleError(InputError):
    """Rules that name one site each and ask of it what it cannot do: one line for each in the message."""


def resolve(
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    situation: Situation,
    refused: Mapping[str, str],
) -> tuple[SitePlan, ...]:
    """Decide every GEMM of every site; `settings[i]` belongs to `sites[i]`.

    `refused` says, for each site whose owner's forward cannot be rewritten, why: such a site stays as it is. A GEMM
    that a broad rule or the defaults want in FP8 and that cannot run so stays as it is, with the reason.

    Raises ImpossibleRuleError where a rule that names exactly one site wants it in FP8 and it cannot.
    """
    decided: dict[tuple[object, ...], tuple[GemmPlan, ...]] = {}  # sites that are alike share their decisions
    sifted: dict[tuple[object, ...], _Sifted] = {}
    seen = situation.known.sites if situation.known is not None else {}
    problems: dict[str, None] = {}
    plans = []
    for site, wanted in zip(sites, settings, strict=True):
        unknown = unknown_kernels(wanted, situation.files)
        if unknown:
            problems.update(dict.fromkeys(unknown))
            continue
        obstacle = site.blocked or refused.get(site.name)
        key = (id(wanted), site.rows, site.k, site.n, site.input_grad, obstacle, id(seen.get(site.name)))
        gemms = decided.get(key)
        if gemms is None:
            gemms = _decide_all(site, wanted, situation, obstacle, sifted)
            decided[key] = gemms
        problems.update(dict.fromkeys(_impossible(site, wanted, gemms, situation.files)))
        pins = impossible_pins(site, wanted, gemms, situation.files, situation.batch_size, situation.target.value)
        problems.update(dict.fromkeys(pins))
        plans.append(SitePlan(site, gemms, wanted.history))
    if problems:
        raise ImpossibleRuleError("\n".join(problems))
    return tuple(plans)


def site_gemms(site: Site) -> tuple[Gemm, ...]:
    """The GEMMs of one training step: no dgrad where the input needs no gradient."""
    return tuple(gemm for gemm in Gemm if gemm is not Gemm.DGRAD or site.input_grad)


def deciding(wanted: SiteSettings, gemm: Gemm) -> Assignment | None:
    """The assignment that set a GEMM's `compute`: the GEMM's own or the site-wide one, whichever holds."""
    value = wanted.gemms[gemm].compute.value
    for path in (f"{gemm.value}.compute", "compute"):
        assignments = wanted.history.get(path)
        if assignments and assignments[-1].value == value:
            return assignments[-1]
    return None


def _decide_all(
    site: Site,
    wanted: SiteSettings,
    situation: Situation,
    obstacle: str | None,
    sifted: dict[tuple[object, ...], _Sifted],
) -> tuple[GemmPlan, ...]:
    """fprop, then dgrad, then wgrad: operands are turned from those of GEMMs that are decided before."""
    gemms: dict[Gemm, GemmPlan] = {}
    for gemm in site_gemms(site):
        unable = obstacle or why_not_turned(gemm, wanted.gemms[gemm].operands, gemms)
        gemms[gemm] = _decide(site, gemm, wanted, situation, unable, sifted)
    return tuple(gemms.values())


def _decide(
    site: Site,
    gemm: Gemm,
    wanted: SiteSettings,
    situation: Situation,
    obstacle: str | None,
    sifted: dict[tuple[object, ...], _Sifted],
) -> GemmPlan:
    asked = wanted.gemms[gemm]
    by = _by(deciding(wanted, gemm))
    operands, lacking = with_ranges(situation.known, site.name, gemm, asked.operands)
    judged = judge(situation.known, site.name, gemm, asked.operands, operands, wanted.budget)
    recipe = replace(asked, operands=operands)
    operands = pinned_operands(site, gemm, recipe, situation.batch_size, situation.target.value)
    if asked.compute is Compute.KEEP:
        return _kept(gemm, f"keep{by}", judged)
    obstacle = obstacle or lacking
    if obstacle is not None:
        able_otherwise = candidates(asked, situation.kernels)
        return _kept(gemm, obstacle, judged, tuple(Rejected(kernel.name, obstacle) for kernel in able_otherwise))
    key = (gemm, id(wanted), site.rows, site.k, site.n)
    if key not in sifted:
        sifted[key] = _sift(site, gemm, replace(asked, operands=operands), situation)
    able, rejected = sifted[key]
    if not able:
        return _kept(gemm, rejected[0].reason if rejected else "no kernel is known", judged, rejected)
    if asked.compute is Compute.AUTO:
        if judged.why_not:
            waiting = tuple(Rejected(name, judged.why_not) for name in able)
            return _kept(gemm, judged.why_not, judged, (*waiting, *rejected))
        reason = f"safe by evidence, auto{by}"
    else:
        reason = f"fp8{by}{_over_budget(judged)}"
    later = tuple(Rejected(name, f"{able[0]} is preferred where no measurement decides") for name in able[1:])
    return GemmPlan(gemm, able[0], operands, asked.accumulation, reason, (*later, *rejected), judged.evidence)


def _over_budget(judged: Judged) -> str:
    """What is said of a GEMM that is forced into FP8 against the evidence."""
    evidence = judged.evidence
    return f", over budget: {evidence.figures}" if evidence is not None and evidence.verdict is Verdict.UNSAFE else ""


def _sift(site: Site, gemm: Gemm, asked: GemmSettings, situation: Situation) -> _Sifted:
    """The kernels that can run a GEMM, in order, and those that cannot, with why."""
    able: list[str] = []
    rejected = []
    m, target = site.rows.at(situation.batch_size), situation.target.value
    for kernel in candidates(asked, situation.kernels):
        reason = kernel.why_not(gemm, asked.operands, asked.accumulation, asked.padding, m, site.k, site.n, target)
        if reason is None:
            able.append(kernel.name)
        else:
            rejected.append(Rejected(kernel.name, reason))
    return tuple(able), tuple(rejected)


def _kept(gemm: Gemm, reason: str, judged: Judged, rejected: tuple[Rejected, ...] = ()) -> GemmPlan:
    return GemmPlan(gemm, AS_IS, None, None, reason, rejected, judged.evidence)


def _by(assignment: Assignment | None) -> str:
    """Who decided: ` by policies/ranker.yaml:14`."""
    place = place_words(assignment) if assignment is not None else ""
    return f" by {place}" if place else ""


def _impossible(site: Site, wanted: SiteSettings, gemms: Sequence[GemmPlan], files: Mapping[str, str]) -> list[str]:
    """A message for each GEMM that a rule for this one site wants in FP8, and that stays as it is."""
    problems = []
    for plan in gemms:
        if plan.fp8 or wanted.gemms[plan.gemm].compute is not Compute.FP8:
            continue
        rule = deciding(wanted, plan.gemm)
        if rule is not None and rule.names_one_site:
            where = f"{files.get(rule.file, rule.file)}:{rule.line}"
            problems.append(
                f"{where}: {rule.source} asks for {plan.gemm.value} of {site.name!r} in FP8, which cannot be: "
                f"{plan.reason}; write `compute: keep` there, or leave the rule out"
            )
    return problems

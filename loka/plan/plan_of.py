"""Makes a plan of an examined policy: resolve, trace the owners it needs, resolve again, bind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from loka.devices.targets import spec_of
from loka.graph.planned_model import planned_model
from loka.graph.trace.tracer import Tracer
from loka.kernels.gemm.catalogue import GEMM_KERNELS, Kernel
from loka.kernels.measurements.parts import PartCosts
from loka.model.callables import current_directory_importable
from loka.mods.modded_model import Adapted
from loka.mods.registry import ModKind, mod_of, names_of
from loka.plan.communication import gathers_of
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites, check_sites, with_merged_sites
from loka.plan.examine import Examined, tracer_of
from loka.plan.plan import NATIVE, ModPlan, Plan
from loka.plan.prospect import gain_of
from loka.plan.resolve import resolve
from loka.plan.rewrite.owner_mods import ModOutcome, OwnerTracer, owner_outcomes, requested_owners
from loka.plan.rewrite.plan_bindings import bind
from loka.plan.rewrite.rewrite_request import RewriteRequest, float64_sites, rewrite_request_of, scopes_of
from loka.plan.rewrite.rewrites import Rewrites, rewrite, with_regions
from loka.plan.rewrite.site_mods import (
    interaction_outcomes,
    open_interactions,
    requested_interactions,
    slower_interactions,
    with_site_mods,
)
from loka.plan.select.interaction_times import interaction_plans, without_fused_sites
from loka.plan.select.workload import TracedNeighbours
from loka.plan.tuning.choices import AS_IT_STANDS, Choice, chosen_settings
from loka.plan.units import check_units, units_of, within_units
from loka.policy.policy import Policy
from loka.policy.settings import Assignment, SiteSettings
from loka.version import __version__

LEAST_SHARE = 0.01  # share of a training step from which a mod of sites that was not asked for is taken
LEFT_BY_MEASUREMENT = "left to torch.compile by a measured step"


class RecordedPlan(PartCosts, Protocol):
    """Costs that a plan can name as the ones that decided it."""

    @property
    def name(self) -> str:
        """The file or set, as named in the plan."""
        ...

    @property
    def sha256(self) -> str:
        """sha256 of its measurements."""
        ...


# Shipped measurements include libraries that a user may not have; a policy's own are from the user's machine.
_WITH_TORCH = tuple(kernel for kernel in GEMM_KERNELS if kernel.library is None and kernel.name != NATIVE)


def kernels_for(policy: Policy) -> tuple[Kernel, ...]:
    """The kernels that measured times may choose among: () for all."""
    return () if policy.measurements is not None else _WITH_TORCH


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan, and the sites that decided together in it."""

    plan: Plan
    chains: tuple[tuple[str, ...], ...] = ()  # the names of the sites of each chain


def plan_of(
    examined: Examined,
    known: ProfiledSites | None = None,
    costs: RecordedPlan | None = None,
    kernels: tuple[Kernel, ...] = (),
    tracer: Tracer | None = None,
) -> Plan:
    """Decide, trace the owners needed, decide again with the results of tracing, and bind.

    `known` is the evidence, `costs` the measurements; with measurements, `kernels` are those that FP8 may run on, ()
    for all. `tracer` is `tracer_of(examined)` for plans that share what is traced.
    Raises InputError where the evidence is for other mods, or for sites of other shapes.
    """
    return decided(examined, known, costs, kernels, tracer).plan


def decided(
    examined: Examined,
    known: ProfiledSites | None = None,
    costs: RecordedPlan | None = None,
    kernels: tuple[Kernel, ...] = (),
    tracer: Tracer | None = None,
    choice: Choice = AS_IT_STANDS,
    by: str = "",
) -> Decided:
    """As `plan_of`, with what a choice decides instead of predicted times; `by`: the file that it is from."""
    tracer = tracer or tracer_of(examined)
    if costs is None:  # without times no mod is known to win
        asked = tuple(rule for rule in examined.policy.mods if rule.asked)
        examined = replace(examined, policy=replace(examined.policy, mods=asked))
    if not choice.as_it_stands:
        chosen = chosen_settings(examined.sites, examined.settings, choice, by)
        examined = replace(examined, settings=chosen)

    def with_mods_of(policy: Policy) -> Decided:
        return _with_interactions(replace(examined, policy=policy), known, costs, kernels, tracer, choice.interactions)

    policy, found = examined.policy, with_mods_of(examined.policy)
    for mod in _not_asked(found.plan, policy):
        fewer = policy.without_mod(mod.source)
        without = with_mods_of(fewer)
        gain = gain_of(without.plan, found.plan)
        if gain is None or gain.share < LEAST_SHARE:
            policy, found = fewer, without
        else:
            mods = tuple(replace(each, gain=gain) if each == mod else each for each in found.plan.mods)
            found = replace(found, plan=replace(found.plan, mods=mods))
    return found


def _not_asked(plan: Plan, policy: Policy) -> tuple[ModPlan, ...]:
    """The mods of sites that changed some without being asked for."""
    sources = {rule.source for rule in policy.mods if not rule.asked and rule.use in names_of(ModKind.SITES)}
    return tuple(mod for mod in plan.mods if mod.source in sources)


def _with_interactions(
    examined: Examined,
    known: ProfiledSites | None,
    costs: RecordedPlan | None,
    kernels: tuple[Kernel, ...],
    tracer: Tracer,
    interactions: bool | None,
) -> Decided:
    """With the interactions that `where: faster` leaves open decided: all, none, or (None) by predicted times."""
    slower: dict[str, str] = {}  # modules whose interactions are left to the compiler, each with the reason
    if interactions is False:
        slower = dict.fromkeys(_open_interactions(examined), LEFT_BY_MEASUREMENT)
    while True:
        found = _decided_without(slower, examined, known, costs, kernels, tracer)
        more = slower_interactions(examined.policy.mods, found.plan.interactions)
        if not more or interactions:
            return found
        slower |= more  # the GEMMs in them decide anew


def _open_interactions(examined: Examined) -> tuple[str, ...]:
    """The modules whose interactions `where: faster` leaves open."""
    policy, sites, model = examined.policy, examined.sites, examined.built.module
    with current_directory_importable():
        owners = requested_interactions(policy.mods, sites, model, examined.flow).owners
    return open_interactions(policy.mods, owners)


def _decided_without(
    slower: Mapping[str, str],
    examined: Examined,
    known: ProfiledSites | None,
    costs: RecordedPlan | None,
    kernels: tuple[Kernel, ...],
    tracer: Tracer,
) -> Decided:
    policy, sites, model = examined.policy, examined.sites, examined.built.module
    asked = settings = _as_recorded(policy, examined.settings)
    named = dict(zip((file for file, _ in policy.files), policy.named, strict=True))
    if known is not None:
        check_sites(known, sites, examined.adapted.adaptations)
    considered, units = kernels if costs is not None else (), units_of(policy, model)
    siblings = within_units(examined.siblings, units)
    with current_directory_importable():
        interacting = requested_interactions(policy.mods, sites, model, examined.flow, slower)
        modded = with_site_mods(policy.mods, sites, settings, siblings, tracer, interacting.mixing)
    sites, settings = modded.sites, modded.settings
    trace = OwnerTracer(modded.trace, requested_owners(policy.mods, model, examined.flow))
    evidence = None if known is None else with_merged_sites(known, sites)
    situation = Situation(
        policy.target,
        policy.model.batch_size,
        named,
        considered,
        evidence,
        costs,
        policy.execution,
        policy.ne_percent,
    )
    interacting = requested_interactions(policy.mods, sites, model, examined.flow, slower)
    plans, wide = resolve(sites, settings, situation, {}), float64_sites(sites, model)
    request = rewrite_request_of(plans, settings, interacting, modded.changed, trace.scopes, wide, examined.flow, units)
    rewrites = _rewritten(request, model, trace)
    traced = rewrites.traced if costs is not None else TracedNeighbours()
    if traced.chains or traced.alone:  # with their neighbours known, some may be as fast without FP8
        plans = resolve(sites, settings, situation, {}, traced)
        again = rewrite_request_of(
            plans, settings, interacting, modded.changed, trace.scopes, wide, examined.flow, units
        )
        rewrites = _rewritten(again, model, trace) if again != request else rewrites
    if rewrites.refused:
        plans = resolve(sites, settings, situation, rewrites.refused, traced)
    plans = with_regions(plans, rewrites)
    for owner, reason in slower.items():
        rewrites.interactions.refuse([owner], reason)
    interactions = interaction_plans(
        rewrites.interactions.fused, plans, policy.model.batch_size, costs, spec_of(situation.target)
    )
    plans = without_fused_sites(plans, interactions)
    fused = interaction_outcomes(policy.mods, model, rewrites.interactions, interacting.crossing)
    outcomes = {**modded.outcomes, **fused}
    outcomes |= owner_outcomes(trace, rewrites.forwards, rewrites.untraced, model)
    bindings = bind(plans, rewrites.forwards, model)
    plan = Plan(
        name=policy.name,
        target=situation.target,
        batch_size=policy.model.batch_size,
        policy_files=policy.files,
        sites=plans,
        bindings=bindings,
        model=planned_model(model, examined.built.args, examined.built.kwargs, policy.model.batch_size),
        skipped=tuple(rewrites.skipped),
        loka_version=__version__,
        rule_notes=tuple((rule.source, rule.note) for rule in policy.rules if rule.note),
        profile=(known.name, known.sha256) if known is not None else None,
        measurements=(costs.name, costs.sha256) if costs is not None else None,
        mods=_mod_plans(policy, examined.adapted, outcomes),
        interactions=interactions,
        execution=policy.execution,
        ne_budget=policy.ne_percent,
        opaque=examined.opaque,
        gathers=gathers_of(policy, model, examined.sites, asked, plans, bindings),
        exchange=policy.exchange,
    )
    check_units(policy, plan.bindings, units)
    return Decided(plan, traced.chains)


def _rewritten(request: RewriteRequest, model: nn.Module, trace: OwnerTracer) -> Rewrites:
    """Traces the owners of a request. All owners are captured in one run."""
    with current_directory_importable():
        trace.capture([scope.owner for scope in scopes_of(request, model)])
        return rewrite(request, model, trace)


def _as_recorded(policy: Policy, settings: Sequence[SiteSettings]) -> tuple[SiteSettings, ...]:
    """The settings with files named as in `Policy.files`, so that a plan is the same on every machine."""
    known: dict[int, SiteSettings] = {}
    assignments: dict[Assignment, Assignment] = {}

    def recorded(assignment: Assignment) -> Assignment:
        if assignment not in assignments:
            assignments[assignment] = replace(assignment, file=policy.relative(assignment.file))
        return assignments[assignment]

    def with_files(wanted: SiteSettings) -> SiteSettings:
        history = {path: tuple(map(recorded, entries)) for path, entries in wanted.history.items()}
        return replace(wanted, history=history, alternatives=tuple(map(with_files, wanted.alternatives)))

    for wanted in settings:
        if id(wanted) not in known:
            known[id(wanted)] = with_files(wanted)
    return tuple(known[id(wanted)] for wanted in settings)


def _mod_plans(policy: Policy, adapted: Adapted, outcomes: Mapping[str, ModOutcome]) -> tuple[ModPlan, ...]:
    """A policy's `mods` with their results, those of `auto` where they have some; `outcomes` are by `source`."""
    modules = {applied.rule.source: applied for applied in adapted.applied}
    plans = []
    for rule in policy.mods:
        changed, outcome = modules.get(rule.source), outcomes.get(rule.source, ModOutcome())
        if not rule.asked and not outcome.rewritten:
            continue
        mod = mod_of(rule.use)
        plans.append(
            ModPlan(
                use=rule.use,
                source=rule.source,
                place=f"{policy.relative(rule.place.file)}:{rule.place.line}" if rule.asked else "auto",
                exact=mod.exact,
                promise=mod.description,
                settings=rule.settings,
                adaptations=changed.adaptations if changed is not None else (),
                rewritten=outcome.rewritten,
                unchanged=(*(changed.unchanged if changed is not None else ()), *outcome.unchanged),
                note=rule.note or "",
            )
        )
    return tuple(plans)

"""Makes the plan of a policy: build the model, find its sites, resolve, trace the owners it needs, bind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from loka.devices.targets import DEVICES, TargetDevice
from loka.errors import InputError
from loka.gc import deferred_gc
from loka.graph.trace.tracer import BATCHES, Tracer
from loka.kernels.gemm.catalogue import GEMM_KERNELS, Kernel
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import PartCosts
from loka.mods.fingerprint import mod_fingerprints
from loka.mods.modded_model import Adapted, adapted, model_without_mods
from loka.mods.policy_loader import policy_argument
from loka.mods.registry import interaction_planning
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites, check_sites, open_measurements, open_profile, with_merged_sites
from loka.plan.model_state import model_state
from loka.plan.plan import NATIVE, Plan
from loka.plan.plan_cache import KnownPlan, PlanCache, key_of
from loka.plan.plan_file import plan_in
from loka.plan.prospect import Prospect, prospect_of, safe_profile
from loka.plan.report.mod_plans import ForwardOutcome, mod_plans
from loka.plan.resolve import resolve
from loka.plan.rewrite.owner_mods import OwnerTracer, owner_outcomes, requested_owners
from loka.plan.rewrite.plan_bindings import bind
from loka.plan.rewrite.rewrite_request import RewriteRequest, float64_sites, rewrite_request_of, scopes_of
from loka.plan.rewrite.rewrites import Rewrites, rewrite, with_regions
from loka.plan.rewrite.site_mods import (
    interaction_outcomes,
    requested_interactions,
    slower_interactions,
    with_site_mods,
)
from loka.plan.select.latency_selection import interaction_plans, without_fused_sites
from loka.plan.select.mod_gains import with_gains
from loka.plan.select.workload import TracedNeighbours
from loka.policy.cascade.cascade import resolve_settings
from loka.policy.cascade.settings import Assignment, SiteFacts, SiteSettings
from loka.policy.policy import Policy
from loka.sites.build_model import BuiltModel, build_model, build_module, light, light_copy
from loka.sites.callables import call, current_directory_importable, directory_kept, find_callable
from loka.sites.discover import find_sites
from loka.sites.flow import Flow
from loka.sites.random_state import seeded
from loka.sites.site import Site
from loka.version import __version__

# Shipped measurements include libraries that a user may not have; a policy's own are from the user's machine.
_WITH_TORCH = tuple(kernel for kernel in GEMM_KERNELS if kernel.library is None and kernel.name != NATIVE)
_FIELDS = ("model.factory", "model.inputs", "model.batch_size", "model")


class ExampleInputs(Protocol):
    """The positional and keyword arguments of a model's forward, for a number of samples, drawn by a seed."""

    def __call__(self, batch: int, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make them. Raises what the author's function raises, as InputError."""
        ...


@dataclass(frozen=True, slots=True)
class Examined:
    """A policy's model with its mods applied, and its sites."""

    policy: Policy
    built: BuiltModel
    sites: tuple[Site, ...]
    settings: tuple[SiteSettings, ...]
    adapted: Adapted
    siblings: tuple[tuple[str, ...], ...] = ()  # names of sites that seem to read one tensor
    flow: Flow = field(default_factory=Flow)  # what products become
    notes: tuple[str, ...] = ()  # what the sites cannot say: layers beside them, rows that are no line in the batch


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the profile and the measurements that decided it, each None if there was none."""

    plan: Plan
    known: ProfiledSites | None
    measurements: Measurements | None = None
    notes: tuple[str, ...] = ()  # on finding the sites (`SiteMap.notes`)
    prospect: Prospect | None = None  # where the plan has no FP8, what FP8 would bring


def make_plan(policy: str | os.PathLike[str] | Policy) -> Plan:
    """The plan of a policy: for every GEMM of its model the recipe and kernel, with the reason.

    Builds the model, and runs it on fake tensors, and on a few samples to trace owners. Needs no GPU. Sizes are those
    of one call at the policy's batch size, times are in microseconds, shares are of the training GEMM FLOPs.

    Args:
        policy: The policy: a YAML file, or the result of `load_policy`.

    Raises:
        InputError: The policy (PolicyError), a callable or the model is wrong, with `file:line:column`; its profile or
            measurements are missing or do not fit; or a rule requests something impossible for one site.

    Warns:
        RenamedWarning: A field has a name that is no longer used.
        UncheckedWarning: The profile or the measurements are of an earlier LoKA and have no checksum.
    """
    return planned(policy).plan


def planned(
    policy: str | os.PathLike[str] | Policy,
    gains: bool = False,
    prospects: bool = False,
    cache: PlanCache | None = None,
) -> Planned:
    """The plan of a policy, as from `make_plan`, with the profile and the measurements.

    With `gains`, the plan includes the measured gain of each mod, which takes another planning for each of them: of a
    copy of the same model, and with a quick check of its forwards, as only times are read from it. With `prospects`, a
    plan without FP8 comes with what it would bring.

    With a `cache`, a plan that it has is not made again; for processes that import the model's code after LoKA.
    """
    with deferred_gc(), directory_kept():  # ten thousand sites make a million objects and hardly any garbage
        loaded = policy_argument(policy, "policy")
        known = open_profile(loaded)
        measurements = open_measurements(loaded)
        kernels = () if loaded.measurements is not None else _WITH_TORCH

        with _placed(loaded):
            module = build_module(loaded.model.factory)
        key = None if cache is None else _key(loaded, known, measurements, module)
        if cache is not None and key is not None and (found := cache.find(key, gains, prospects)) is not None:
            return Planned(found.plan, known, measurements, found.notes, found.prospect)
        with _placed(loaded):
            built = model_without_mods(loaded, module)
        compared = gains and measurements is not None and bool(loaded.mods)
        original = _copy(built) if compared else None

        def without(fewer: Policy) -> Plan:
            smaller = examine(fewer, _copy(original))
            tracer = tracer_of(smaller, quick=True)
            return plan_of(smaller, _standing_in(known, smaller), measurements, kernels, tracer)

        examined = examine(loaded, built)
        examined = replace(examined, built=light(built))
        del built  # and its inputs
        tracer = tracer_of(examined)

        def at(batch_size: int, assumed: bool) -> Plan:
            larger = _at_batch_size(examined, batch_size)
            return plan_of(larger, assumed_safe(larger) if assumed else known, measurements, kernels, tracer)

        made = plan_of(examined, known, measurements, kernels, tracer)
        if compared:
            made = with_gains(made, loaded, without)
        prospect = prospect_of(at, made, examined.settings) if prospects else None
        if cache is not None and key is not None:
            with_gain = compared or not loaded.mods or measurements is None  # or there can be none
            prospected = prospects or made.share_fp8 > 0 or measurements is None
            cache.keep(key, KnownPlan(made, examined.notes, prospect, with_gain, prospected))
        return Planned(made, known, measurements, examined.notes, prospect)


def _at_batch_size(examined: Examined, batch_size: int) -> Examined:
    """The same model at another batch size: its sites know their rows for each."""
    model = replace(examined.policy.model, batch_size=batch_size)
    return replace(examined, policy=replace(examined.policy, model=model))


def assumed_safe(examined: Examined) -> ProfiledSites:
    """Made-up evidence that every GEMM of every site is safe in the recipes of its policy."""
    factory, adaptations = examined.policy.model.factory, examined.adapted.adaptations
    return safe_profile(examined.sites, examined.settings, factory, adaptations)


def _key(
    policy: Policy, known: ProfiledSites | None, measurements: Measurements | None, module: nn.Module
) -> str | None:
    """The key of a policy's plan in a cache; None where its model or its inputs cannot be described."""
    try:
        with current_directory_importable():
            inputs = inputs_of(policy, BuiltModel(module, (), {}, policy.model.batch_size))
            state = model_state(module, inputs, BATCHES)
        texts = [Path(name).read_bytes().decode() for name in policy.named]
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the model's own code can raise anything: planning says what is wrong
        return None
    if state is None:
        return None
    evidence = None if known is None else (known.name, known.sha256)
    times = None if measurements is None else (measurements.name, measurements.sha256)
    return key_of({"policy": repr(policy), "texts": texts, "profile": evidence, "measurements": times, "model": state})


def _copy(built: BuiltModel | None) -> BuiltModel | None:
    """A copy to change; None where the model cannot be copied, and has to be built once more."""
    try:
        return light_copy(built) if built is not None else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - copying runs the model's own code, which can raise anything
        return None


def _standing_in(known: ProfiledSites | None, examined: Examined) -> ProfiledSites | None:
    """The whole policy's profile for its model without one mod: a gain compares times, and needs no own evidence."""
    if known is None:
        return None
    mods = mod_fingerprints(examined.adapted.adaptations)
    return replace(known, profile=replace(known.profile, mods=mods))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a plan.json, or the plan of a policy.

    Raises InputError, also if a plan.json in a generated package has changed since it was generated.
    """
    name = os.fspath(path)
    return plan_in(name) if name.endswith(".json") else make_plan(name)


def model_sites(factory: str, inputs: str | None, batch_size: int) -> tuple[Site, ...]:
    """The sites of a model without a policy. Raises InputError as `build_model` and `find_sites` do."""
    with deferred_gc(), directory_kept(), current_directory_importable():
        return find_sites(build_model(factory, inputs, batch_size)).sites


def examine(policy: Policy, built: BuiltModel | None = None) -> Examined:
    """Build a policy's model, apply the policy's mods, find its sites, and apply the rules to them.

    `built` is the model without mods, where it was built before; it is changed.
    """
    with _placed(policy), current_directory_importable():
        built = model_without_mods(policy) if built is None else built
        changed = adapted(built, policy.mods)
        found = find_sites(built)
    sites = found.sites
    facts = [
        SiteFacts(site.name, site.kind.value, site.rows.at(built.batch_size), site.k, site.n, site.share)
        for site in sites
    ]
    wanted = resolve_settings(policy, facts)
    return Examined(policy, built, sites, wanted, changed, found.siblings, found.flow, found.notes)


def tracer_of(examined: Examined, quick: bool = False) -> Tracer:
    """A tracer of the model's owners, which remembers what it traced; `quick`: compared by their outputs alone."""
    return Tracer(examined.built.module, inputs_of(examined.policy, examined.built), quick)


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
    tracer = tracer or tracer_of(examined)
    slower: dict[str, str] = {}  # modules whose interactions are left to the compiler, each with the reason
    while True:
        plan = _plan_without(slower, examined, known, costs, kernels, tracer)
        more = slower_interactions(examined.policy.mods, plan.interactions)
        if not more:
            return plan
        slower |= more  # the GEMMs in them decide anew


def _plan_without(
    slower: Mapping[str, str],
    examined: Examined,
    known: ProfiledSites | None,
    costs: RecordedPlan | None,
    kernels: tuple[Kernel, ...],
    tracer: Tracer,
) -> Plan:
    policy, sites, model = examined.policy, examined.sites, examined.built.module
    settings = _as_recorded(policy, examined.settings)
    named = dict(zip((file for file, _ in policy.files), policy.named, strict=True))
    if known is not None:
        check_sites(known, sites, examined.adapted.adaptations)
    considered = kernels if costs is not None else ()
    with current_directory_importable():
        interacting = requested_interactions(policy.mods, sites, model, examined.flow, slower)
        reserved = interaction_planning().reserved(interacting, sites)
        modded = with_site_mods(policy.mods, sites, settings, examined.siblings, tracer, reserved)
    sites, settings = modded.sites, modded.settings
    trace = OwnerTracer(modded.trace, requested_owners(policy.mods, model))
    evidence = with_merged_sites(known, sites)
    situation = Situation(
        TargetDevice(policy.target),
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
    request = rewrite_request_of(plans, settings, interacting, modded.changed, trace.scopes, wide, examined.flow)
    rewrites = _rewritten(request, model, trace)
    traced = rewrites.traced if costs is not None else TracedNeighbours()
    if traced.chains or traced.alone:  # with their neighbours known, some may be as fast without FP8
        plans = resolve(sites, settings, situation, {}, traced)
        again = rewrite_request_of(plans, settings, interacting, modded.changed, trace.scopes, wide, examined.flow)
        rewrites = _rewritten(again, model, trace) if again != request else rewrites
    if rewrites.refused:
        plans = resolve(sites, settings, situation, rewrites.refused, traced)
    plans = with_regions(plans, rewrites)
    for owner, reason in slower.items():
        rewrites.interactions.refuse([owner], reason)
    interactions = interaction_plans(
        rewrites.interactions.fused, plans, policy.model.batch_size, costs, DEVICES[situation.target]
    )
    plans = without_fused_sites(plans, interactions)
    outcomes: dict[str, ForwardOutcome] = {**modded.outcomes}
    outcomes |= interaction_outcomes(policy.mods, model, rewrites.interactions)
    outcomes |= owner_outcomes(trace, rewrites.forwards, rewrites.untraced, model)
    return Plan(
        name=policy.name,
        target=situation.target,
        batch_size=policy.model.batch_size,
        policy_files=policy.files,
        sites=plans,
        bindings=bind(plans, rewrites.forwards, model),
        skipped=tuple(rewrites.skipped),
        loka_version=__version__,
        rule_notes=tuple((rule.source, rule.note) for rule in policy.rules if rule.note),
        profile=(known.name, known.sha256) if known is not None else None,
        measurements=(costs.name, costs.sha256) if costs is not None else None,
        mods=mod_plans(policy, examined.adapted, outcomes),
        interactions=interactions,
        execution=policy.execution,
        ne_budget=policy.ne_percent,
    )


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


def inputs_of(policy: Policy, built: BuiltModel) -> ExampleInputs:
    """The example inputs of a model; `build_model` has checked them before."""

    def inputs(batch: int, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        spec = policy.model.inputs
        if spec is not None:
            function = find_callable(spec, "model.inputs")[0]
        else:
            home = find_callable(policy.model.factory, "model.factory")[1]
            function = getattr(built.module, "example_inputs", None) or home.example_inputs
        with seeded(seed):
            made: Any = call(function, (batch,), spec or "example_inputs", "model.inputs")
        if isinstance(made, dict):
            return (), made
        return (made if isinstance(made, tuple) else (made,)), {}

    return inputs


@contextmanager
def _placed(policy: Policy) -> Iterator[None]:
    """Adds the position of the field to errors about a field of the policy's model."""
    try:
        yield
    except InputError as error:
        message = str(error)
        field = next((name for name in _FIELDS if message.startswith(f"{name}: ")), None)
        if field is None:
            raise
        raise InputError(f"{policy.where(field)}: {message}") from error

"""Builds a policy's model with its mods, finds its sites, and applies the rules to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from loka.errors import InputError
from loka.graph.sites.discover import find_sites, sites_in
from loka.graph.sites.flow import Flow
from loka.graph.sites.forwards import Forwards
from loka.graph.sites.site import Opaque, Site
from loka.graph.trace.tracer import Tracer
from loka.model.build_model import BuiltModel
from loka.model.callables import current_directory_importable, find_callable
from loka.model.example_inputs import ExampleInputs, example_inputs
from loka.mods.adaptation import mod_fingerprints
from loka.mods.auto_mods import with_auto_mods
from loka.mods.dataflow import analyse_dataflow
from loka.mods.modded_model import Adapted, adapted, model_without_mods
from loka.plan.evidence import ProfiledSites
from loka.policy.cascade import resolve_settings
from loka.policy.policy import Policy
from loka.policy.settings import SiteFacts, SiteSettings
from loka.probe.profile.profile import Estimate, Interval, Profile, SiteProfile
from loka.version import __version__

_FIELDS = ("model.factory", "model.inputs", "model.batch_size", "model", "train.batches")


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
    opaque: tuple[Opaque, ...] = ()  # products that are no sites
    notes: tuple[str, ...] = ()  # what the sites cannot say: layers beside them, rows that are no line in the batch


def examine(policy: Policy, built: BuiltModel | None = None, forwards: Forwards | None = None) -> Examined:
    """Build a policy's model, apply the policy's mods, find its sites, and apply the rules to them.

    `built` is the model without mods, where it was built before; it is changed. `forwards` are those of that model,
    where they are known. Mods of `auto` are added to the policy.
    """
    policy = with_auto_mods(policy)
    with placed(policy), current_directory_importable():
        built = model_without_mods(policy) if built is None else built
        changed = adapted(built, policy.mods, lambda model: analyse_dataflow(model, forwards))
        found = find_sites(built) if changed.adaptations or forwards is None else sites_in(built, forwards)
    sites = found.sites
    facts = [
        SiteFacts(site.name, site.kind.value, site.rows.at(built.batch_size), site.k, site.n, site.share)
        for site in sites
    ]
    wanted = resolve_settings(policy, facts)
    return Examined(policy, built, sites, wanted, changed, found.siblings, found.flow, found.opaque, found.notes)


def tracer_of(examined: Examined, quick: bool = False) -> Tracer:
    """A tracer of the model's owners, which remembers what it traced; `quick`: compared by their outputs alone."""
    return Tracer(examined.built.module, inputs_of(examined.policy, examined.built), quick)


def inputs_of(policy: Policy, built: BuiltModel) -> ExampleInputs:
    """What makes the example inputs of a model; `build_model` has checked them before."""
    model = policy.model
    home = find_callable(model.factory, "model.factory")[1]
    return example_inputs(built.module, home, model.factory, model.inputs, model.batches)


@contextmanager
def placed(policy: Policy) -> Iterator[None]:
    """Adds the position of the field to errors about a field of the policy's model."""
    try:
        yield
    except InputError as error:
        message = str(error)
        field = next((name for name in _FIELDS if message.startswith(f"{name}: ")), None)
        if field is None:
            raise
        raise InputError(f"{policy.where(field)}: {message}", error.code) from error


def assumed_safe(examined: Examined) -> ProfiledSites:
    """Made-up evidence that every GEMM of every site is safe in each recipe of its policy."""
    mere, sqnr = Interval(0.0, 0.0, 0.0), Interval(99.0, 99.0, 99.0)
    profiles = []
    for site, wanted in zip(examined.sites, examined.settings, strict=True):
        estimates = tuple(
            Estimate(gemm, asked.operands, mere, sqnr, draws=1)
            for each in (wanted, *wanted.alternatives)
            for gemm, asked in each.gemms.items()
        )
        profiles.append(SiteProfile(site.name, site.k, site.n, 0, (), estimates))
    profile = Profile("assumed", examined.policy.model.factory, __version__, "", 1, 1, 1, 1, tuple(profiles), ())
    mods = mod_fingerprints(examined.adapted.adaptations)
    return ProfiledSites.of(replace(profile, mods=mods), "assumed safe")

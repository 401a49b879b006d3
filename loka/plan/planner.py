"""Makes the plan of a policy: build the model, find its sites, resolve, trace the owners it needs, bind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from loka.errors import IgnoredWarning
from loka.gc import deferred_gc
from loka.graph.sites.forwards import forwards_of
from loka.kernels.measurements.lookup import Measurements
from loka.model.build_model import BuiltModel, build_module, light, light_copy
from loka.model.callables import current_directory_importable
from loka.mods.adaptation import mod_fingerprints
from loka.mods.auto_mods import with_auto_mods
from loka.mods.modded_model import model_without_mods
from loka.mods.policy_loader import policy_argument
from loka.plan.evidence import ProfiledSites, open_measurements, open_profile
from loka.plan.examine import Examined, assumed_safe, examine, placed, tracer_of
from loka.plan.plan import Plan
from loka.plan.plan_of import decided, kernels_for, plan_of
from loka.plan.prospect import Prospect, prospect_of, with_exact_gains, with_gains
from loka.plan.serialize import read_plan_file
from loka.plan.tuning.choices import AS_IT_STANDS, Choice
from loka.plan.tuning.record import TunedFile, confirmed_plan, tuned_inputs
from loka.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the profile and the measurements that decided it, each None if there was none."""

    plan: Plan
    known: ProfiledSites | None
    measurements: Measurements | None = None
    notes: tuple[str, ...] = ()  # on finding the sites (`SiteMap.notes`)
    prospect: Prospect | None = None  # where the plan has no FP8, what FP8 would bring
    ignored: str = ""  # why the record of `loka tune` at the policy's place does not hold


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
        IgnoredWarning: The record of `loka tune` at the policy's place does not hold any more.
    """
    return planned(policy).plan


def planned(
    policy: str | os.PathLike[str] | Policy,
    gains: bool = False,
    prospects: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Planned:
    """The plan of a policy, as from `make_plan`, with the profile and the measurements.

    With `gains`, the plan includes the measured gain of each mod, which takes another planning for each of them: of a
    copy of the same model, and with a quick check of its forwards, as only times are read from it. With `prospects`, a
    plan without FP8 comes with what it would bring. `progress` is called with what takes the next seconds.
    """
    with deferred_gc(), _one_thread():  # ten thousand sites make a million objects and hardly any garbage
        loaded = policy_argument(policy, "policy")
        known = open_profile(loaded)
        measurements = open_measurements(loaded)
        tuned = TunedFile.of(loaded)
        kernels = kernels_for(loaded)

        with placed(loaded):
            module = build_module(loaded.model.factory)
        with placed(loaded):
            built = model_without_mods(loaded, module)
        compared = gains and measurements is not None and bool(loaded.mods)
        original = _copy(built) if compared else None
        forwards = None
        if compared:  # read once for the plan, and for those without a mod
            with placed(loaded), current_directory_importable():
                forwards = forwards_of(built)

        examined = examine(loaded, built, forwards)
        examined = replace(examined, built=light(built))
        del built  # and its inputs
        tracer = tracer_of(examined)
        progress(f"tracing forwards, and choosing for {len(examined.sites)} sites")

        def at(batch_size: int, assumed: bool) -> Plan:
            progress(f"planning for batch size {batch_size}, to say what FP8 would bring")
            larger = _at_batch_size(examined, batch_size)
            return plan_of(larger, assumed_safe(larger) if assumed else known, measurements, kernels, tracer)

        def with_choice(choice: Choice) -> Plan:
            return decided(examined, known, measurements, kernels, tracer, choice, tuned.name).plan

        inputs = tuned_inputs(loaded, examined.built, examined.sites, examined.settings, known)
        made, ignored = confirmed_plan(tuned, inputs, with_choice)
        _warn(ignored)

        def without(fewer: Policy) -> Plan:
            gone = [mod.use for mod in examined.policy.mods if mod not in fewer.mods]
            progress(f"planning without {', '.join(gone)}, to say what it gains")
            smaller = examine(fewer, _copy(original), forwards)
            tracer = tracer_of(smaller, quick=True)
            choice = tuned.choice if made.tuned is not None else AS_IT_STANDS
            return decided(smaller, _standing_in(known, smaller), measurements, kernels, tracer, choice).plan

        if gains and measurements is not None:
            made = with_gains(made, examined.policy, without)
        prospects = prospects and made.tuned is None  # a measured step knows better
        prospect = prospect_of(at, made, examined.settings) if prospects else None
        if prospect is not None:
            more = None
            if not loaded.auto_mods:
                policy_with = with_auto_mods(replace(examined.policy, auto_mods=True))
                more = plan_of(replace(examined, policy=policy_with), known, measurements, kernels, tracer)
            prospect = with_exact_gains(prospect, made, more)
        return Planned(made, known, measurements, examined.notes, prospect, ignored)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread inside: forwards are compared on a few samples, for which several wait for one another.

    On two busy cores a plan took ten times as long with two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warn(ignored: str) -> None:
    if ignored:
        warnings.warn(ignored, IgnoredWarning, stacklevel=3)


def _at_batch_size(examined: Examined, batch_size: int) -> Examined:
    """The same model at another batch size: its sites know their rows for each."""
    model = replace(examined.policy.model, batch_size=batch_size)
    return replace(examined, policy=replace(examined.policy, model=model))


def _copy(built: BuiltModel | None) -> BuiltModel | None:
    """A copy to change; None where the model cannot be copied, and has to be built once more."""
    try:
        return light_copy(built) if built is not None else None
    except Exception:  # noqa: BLE001 - of the model's own code
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
    return read_plan_file(name) if name.endswith(".json") else make_plan(name)

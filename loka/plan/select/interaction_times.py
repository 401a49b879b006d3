"""Interactions with their own kernels: their times, and the sites that they take the place of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.graph.sites.site import GemmKind, Site
from loka.kernels.fused.interaction.interaction_specs import specs_of
from loka.kernels.measurements.interaction_forms import DotForm, FmForm, Form, form_of, parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED, PartCosts, PartKind
from loka.mods.rewriting.fused_interactions import Fused
from loka.plan.plan import InteractionPlan, Plan, SitePlan, StepTime
from loka.plan.select.perf_model import PerfModel, call_time


def interaction_plans(
    fused: Sequence[Fused],
    plans: Sequence[SitePlan],
    batch_size: int,
    costs: PartCosts | None,
    device: DeviceSpec = DEFAULT,
) -> tuple[InteractionPlan, ...]:
    """The interactions with their own kernels, with times if there are `costs`."""
    sites = {plan.site.name: plan.site for plan in plans}
    perf_model = PerfModel(costs, device) if costs is not None else None
    claimed: set[str] = set()
    found = []
    for each in fused:
        products = (site for site in sites.values() if _multiplies(site, each, sites, batch_size))
        product = next((site for site in products if site.name not in claimed), None)
        fused_sites = each.sites + (() if product is None else (product.name,))
        claimed.update(fused_sites if product is not None else ())
        samples = _samples(each, sites, batch_size)
        if isinstance(each.form, DotForm) and product is not None:
            samples = product.rows.at(batch_size) // each.form.embeddings
        forward, backward = parts_of(each.form, samples, each.columns, RENDERED)
        beside = product if isinstance(each.form, DotForm) else sites.get(each.beside)
        found.append(
            InteractionPlan(
                work=forward.work,
                owner=each.owner,
                what=each.what,
                form=backward.around,
                samples=forward.rows,
                columns=each.columns,
                calls=beside.calls if beside is not None else 1,
                sites=fused_sites,
                chosen=_time(each.form, forward.rows, each.columns, RENDERED, perf_model),
                as_is=_time(each.form, forward.rows, each.columns, COMPILED, perf_model),
            )
        )
    return tuple(found)


def without_fused_sites(plans: Sequence[SitePlan], interactions: Sequence[InteractionPlan]) -> tuple[SitePlan, ...]:
    """The plans, without times for sites fused into interactions, which are no separate GEMMs any more."""
    fused_sites = {name for each in interactions for name in each.sites}
    if not fused_sites:
        return tuple(plans)
    return tuple(replace(plan, timing=None) if plan.site.name in fused_sites else plan for plan in plans)


def interaction_by_site(plan: Plan) -> Mapping[str, InteractionPlan]:
    """The interaction that a site is fused into, by the site's name."""
    return {name: each for each in plan.interactions for name in each.sites}


def place_in_interaction(interaction: InteractionPlan) -> str:
    """Text for a site fused into an interaction: `in the mixing layer of layers.0`."""
    kind = "dot interaction" if interaction.work is PartKind.DOT else "mixing layer"
    return f"in the {kind} of {interaction.owner or 'the model itself'}"


def kernel_names(interaction: InteractionPlan) -> tuple[str, str]:
    """Names of its forward and gradient kernels in a generated package's fused.py."""
    forward, gradients = specs_of(form_of(interaction.work, interaction.form), interaction.columns)
    return forward.function, gradients.function


def step_times(interactions: Sequence[InteractionPlan]) -> Iterator[tuple[InteractionPlan, StepTime, StepTime]]:
    """The interactions with both times known, with these times."""
    for each in interactions:
        if each.chosen is not None and each.as_is is not None:
            yield each, each.chosen, each.as_is


def _samples(fused: Fused, sites: Mapping[str, Site], batch_size: int) -> int:
    """Samples of one call, from the rows of x^T (B, d, n) times rank, if it is a site. Others follow the batch."""
    site = sites.get(fused.sites[0]) if fused.sites else None
    return batch_size if site is None else site.rows.at(batch_size) // fused.columns


def _multiplies(site: Site, fused: Fused, sites: Mapping[str, Site], batch_size: int) -> bool:
    """True for a product without a Parameter that an interaction of x (B, n, d) computes.

    It is the outer one of an FM interaction, x times x^T @ rank, or that of a dot interaction, x times x^T.
    """
    if site.weight is not None or site.owner != fused.owner or site.k != fused.columns:
        return False
    match fused.form:
        case FmForm() as form:
            rows = _samples(fused, sites, batch_size) * form.embeddings
            return site.kind is GemmKind.BMM and site.rows.at(batch_size) == rows and site.n == form.rank
        case DotForm() as form:
            return site.n == form.embeddings and site.rows.at(batch_size) % form.embeddings == 0
    return False


def _time(form: Form, samples: int, columns: int, kernel: str, perf_model: PerfModel | None) -> StepTime | None:
    if perf_model is None:
        return None
    first, second = parts_of(form, samples, columns, kernel)
    forward, backward = perf_model.part(first), perf_model.part(second)
    if forward is None or backward is None:
        return None
    return call_time(forward, backward).rounded

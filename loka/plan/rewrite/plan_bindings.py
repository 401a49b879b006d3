"""Groups modules by generated class, so that layers that are alike share one class."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.sites.site import GemmKind
from loka.plan.format import common_pattern
from loka.plan.plan import BindingKind, PlannedBinding, SitePlan

_WORD = re.compile(r"[A-Za-z0-9]+")
_LONGEST = 60  # characters of a class name


@dataclass(frozen=True, slots=True)
class _Member:
    """One module to be bound, before it is grouped with others."""

    module: str
    sites: tuple[str, ...]
    forward: ForwardIR | None


def bind(plans: Sequence[SitePlan], forwards: Mapping[str, ForwardIR], model: nn.Module) -> tuple[PlannedBinding, ...]:
    """The bindings of a plan, in the model order of their first modules.

    `forwards` has the rewritten forwards by owner, with the FP8 sites among their calls; every other plain nn.Linear
    with a GEMM in FP8 is bound separately. Only the types and shapes of `model` are read.
    """
    decided = {plan.site.name: plan for plan in plans}
    covered = {call for forward in forwards.values() for call in site_calls(forward)}
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for owner, forward in forwards.items():
        member, module = _Member(owner, site_calls(forward), forward), model.get_submodule(owner)
        recipes = tuple(_recipe(decided[site]) for site in member.sites)
        alike = _type_name(module), _shapes(module, forward), relative_to_owner(forward), recipes
        groups.setdefault(alike, []).append(member)
    for plan in plans:
        site = plan.site
        if site.kind is GemmKind.LINEAR and plan.fp8 and site.name not in covered:
            key = (_type_name(model.get_submodule(site.name)), site.k, site.n, site.bias is not None, *_recipe(plan))
            groups.setdefault(key, []).append(_Member(site.name, (site.name,), None))
    order = (name for name, _ in model.named_modules(remove_duplicate=False))
    positions = {name: number for number, name in enumerate(order)}
    names: set[str] = set()
    bindings = []
    for members in sorted(
        (sorted(group, key=lambda member: positions[member.module]) for group in groups.values()),
        key=lambda group: positions[group[0].module],
    ):
        bindings.append(_binding(members, model, names))
    return tuple(bindings)


def site_calls(forward: ForwardIR) -> tuple[str, ...]:
    """The names of the sites that a forward calls, each once, in the order of their first calls."""
    return tuple(dict.fromkeys(step.call.site for step in forward.statements if step.call is not None))


def class_name(modules: Sequence[str], module_type: str, weight: tuple[int, ...], taken: set[str]) -> str:
    """A class name from the common parts of the modules' names: layers.0.fmb.0, layers.1.fmb.0 -> LayersFmb0.

    For names of different depths, their last parts count. The model itself, and modules with nothing in common, are
    named after their type and the shape of their weight, if any: Linear256x512. Adds the name to `taken`.
    """
    depth = min(name.count(".") for name in modules) + 1
    common = common_pattern([".".join(name.split(".")[-depth:]) for name in modules])
    by_type = _camel(module_type.rpartition(".")[2]) + "x".join(map(str, weight))
    base = _camel(common) or by_type or "Module"
    if not base[0].isalpha():
        base = f"Module{base}"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}{'X' if base[-1].isdigit() else ''}{number}"
    taken.add(name)
    return name


def _camel(text: str) -> str:
    made = ""
    for word in _WORD.findall(text):
        joint = "X" if made[-1:].isdigit() and word[0].isdigit() else ""
        made += joint + word[0].upper() + word[1:]
    return made[:_LONGEST]


def _binding(members: Sequence[_Member], model: nn.Module, names: set[str]) -> PlannedBinding:
    first = members[0]
    module = model.get_submodule(first.module)
    module_type = _type_name(module)
    modules = tuple(member.module for member in members)
    kind = BindingKind.LINEAR if first.forward is None else BindingKind.FORWARD
    shapes = _shapes(module, first.forward)
    return PlannedBinding(
        name=class_name(modules, module_type, dict(shapes).get("weight", ()), names),
        kind=kind,
        modules=modules,
        module_type=module_type,
        sites=tuple(member.sites for member in members),
        shapes=shapes,
        forward=first.forward,
    )


def _shapes(module: nn.Module, forward: ForwardIR | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parameters that a generated forward may read: those of the module and of its inlined children."""
    shapes = []
    for child in ("", *(forward.inlined if forward is not None else ())):
        prefix = f"{child}." if child else ""
        for name, parameter in module.get_submodule(child).named_parameters(recurse=False):
            shapes.append((prefix + name, tuple(parameter.shape)))
    return tuple(shapes)


def relative_to_owner(forward: ForwardIR) -> ForwardIR:
    """The forward without the name of its owner, so that the forwards of equal layers are equal."""
    prefix = f"{forward.owner}." if forward.owner else ""
    statements = tuple(
        step if step.call is None else replace(step, call=replace(step.call, site=step.call.site.removeprefix(prefix)))
        for step in forward.statements
    )
    regions = tuple(replace(region, site=region.site.removeprefix(prefix)) for region in forward.regions)
    return replace(forward, owner="", statements=statements, regions=regions)


def _recipe(plan: SitePlan) -> tuple[object, ...]:
    return tuple((gemm.gemm, gemm.operands, gemm.accumulation, gemm.kernel, gemm.m_buckets) for gemm in plan.gemms)


def _type_name(module: nn.Module) -> str:
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"

"""What FSDP2's all-gathers carry, weight by weight, and what goes over the wire in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn

from loka.errors import Code
from loka.graph.expression import Arg, Ref, expression_of, is_of
from loka.graph.ir import unpadded
from loka.graph.sites.site import Site
from loka.graph.sites.weights import find_weight
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.numerics.enums import Compute, Gemm
from loka.plan.format import format_place
from loka.plan.plan import GatherPlan, PlannedBinding, SitePlan
from loka.plan.resolve import ImpossibleRuleError
from loka.plan.tuning.choices import MEASURED
from loka.policy.communication import Wire
from loka.policy.policy import GATHER, Policy
from loka.policy.settings import Assignment, SiteSettings

_COLUMNS = 16  # of an FP8 copy: kernels pad to a multiple of it
_SCALE_BYTES = 4  # of a row
_PART = "it is one of several matrices in a Parameter"


@dataclass(slots=True)
class _Weight:
    """A Parameter, and what reads it."""

    name: str
    parameter: nn.Parameter
    sites: list[str] = field(default_factory=list)
    asked: list[Assignment] = field(default_factory=list)  # what rules say of its sites
    forced: list[Assignment] = field(default_factory=list)  # of these, "fp8" for one site whose recipe rules settle
    obstacles: list[str] = field(default_factory=list)  # why each site cannot read a gathered FP8 copy


def gathers_of(
    policy: Policy,
    model: nn.Module,
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    plans: Sequence[SitePlan],
    bindings: Sequence[PlannedBinding],
) -> tuple[GatherPlan, ...]:
    """What the all-gather of each site's weight carries, in model order; () without `communication.weights`.

    `settings[i]` belongs to `sites[i]`, those of the model before mods rewrote calls; `plans` are of what became of
    them. A weight is gathered in one way: where several sites read it, all of them have to allow FP8. Raises
    ImpossibleRuleError for a rule that names one site and asks for FP8 there, where rules settle that it cannot be.
    """
    if not policy.gathers:
        return ()
    now = {name: plan for plan in plans for name in plan.site.rule_names}
    read = {site for binding in bindings for site in _read_as_they_are(binding)}
    weights: dict[int, _Weight] = {}
    named = dict(zip((file for file, _ in policy.files), policy.named, strict=True))
    for site, wanted in zip(sites, settings, strict=True):
        found = find_weight(model, site.weight) if site.weight is not None else None
        if found is None or site.weight is None:
            continue
        name = ".".join(site.weight.split(".")[: -len(found.index) or None])
        weight = weights.setdefault(id(found.parameter), _Weight(name, found.parameter))
        weight.sites.append(site.name)
        asked = wanted.history.get(GATHER, ())[-1:]
        weight.asked += asked
        weight.forced += [by for by in asked if by.names_one_site and by.value == Wire.FP8 and _is_settled(wanted)]
        weight.obstacles.append(_PART if found.index else _obstacle(now.get(site.name), read))
    gathers = tuple(map(_gather, weights.values()))
    problems = [
        f"{named.get(by.file, by.file)}:{by.line}: {by.source} asks for {gather.weight!r} to be gathered in fp8, which "
        f"cannot be: {gather.reason}; write `carry: native` there, or leave the rule out"
        for gather, weight in zip(gathers, weights.values(), strict=True)
        for by in weight.forced
        if gather.wire is not Wire.FP8
    ]
    if problems:
        raise ImpossibleRuleError("\n".join(problems), Code.IMPOSSIBLE)
    return gathers


def _is_settled(wanted: SiteSettings) -> bool:
    """True if rules alone say what a site runs in; evidence and times say nothing of it."""
    compute = [wanted.history[f"{gemm}.compute"][-1] for gemm in Gemm]
    if any(by.value == Compute.AUTO or by.source == MEASURED for by in compute):
        return False
    return "scaling" not in wanted.history or all(by.value == Compute.KEEP for by in compute)


def _read_as_they_are(binding: PlannedBinding) -> Iterator[str]:
    """The sites of a binding whose weight is a Parameter that its forward reads in these calls alone."""
    if binding.forward is None:
        yield from (site for sites in binding.sites for site in sites)
        return
    parameters = {expression_of(name) for name, _ in binding.shapes}
    calls = [step.call for step in binding.forward.statements if step.call is not None]
    weights = {call.site: _text((unpadded(call) or call).weight) for call in calls}
    reads = [
        (ref.text, weights[step.call.site] if step.call is not None else "")
        for step in binding.forward.statements
        for ref in step.operands
    ]
    for sites in binding.sites:
        for site, in_first in zip(sites, binding.sites[0], strict=True):  # the forward was traced on the first module
            weight = weights.get(in_first, "")
            if weight in parameters and all(text == weight == of for text, of in reads if is_of(text, weight)):
                yield site


def _text(weight: Arg) -> str:
    return weight.text if isinstance(weight, Ref) else ""


def _obstacle(plan: SitePlan | None, read: set[str]) -> str:
    """Why a site cannot read an FP8 copy that FSDP gathers; "" if it can."""
    if plan is None or not plan.fp8:
        return "its GEMMs stay in the model's dtype"
    if plan.site.members:
        return "a mod reads it together with other weights"
    recipe = plan.recipe
    if not (recipe.is_chain or recipe.keeps_wgrad) or recipe.is_static:
        return "its recipe reads more than one FP8 copy of the weight, or a scale of the whole weight"
    if max(plan.site.k, plan.site.n) > LARGEST_WIDTH:
        return f"kernels take up to {LARGEST_WIDTH} columns"
    return "" if plan.site.name in read else "its forward reads the weight in another way, too"


def _gather(weight: _Weight) -> GatherPlan:
    parameter = weight.parameter
    other = next((each for each in weight.asked if each.value != Wire.FP8), None)
    obstacle = next(filter(None, weight.obstacles), "")
    if other is not None:
        wire, reason = Wire(other.value), f"{other.value} by {format_place(other)}"
    elif obstacle:
        wire, reason = Wire.NATIVE, obstacle
    else:
        wire = Wire.FP8
        reason = f"fp8 by {format_place(weight.asked[-1])}" if weight.asked else "its recipe reads one FP8 copy alone"
    *rows, columns = parameter.shape
    in_bf16 = 2 * parameter.numel()
    nbytes = {
        Wire.FP8: prod(rows) * (-(-columns // _COLUMNS) * _COLUMNS + _SCALE_BYTES),
        Wire.BF16: in_bf16,
        Wire.NATIVE: parameter.numel() * parameter.dtype.itemsize,
    }[wire]
    return GatherPlan(weight.name, tuple(weight.sites), wire, reason, nbytes, in_bf16)

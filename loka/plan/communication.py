"""What ranks send each other by a plan: the all-gathers of its weights, and TorchRec's exchanges, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import nn

from loka.errors import Code
from loka.graph.expression import Ref, expression_of
from loka.graph.ir import unpadded
from loka.graph.sites.site import Site
from loka.graph.sites.weights import find_weight
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.numerics.enums import Compute, Gemm
from loka.plan.format import format_place, format_share, grouped, pattern_of, rule_patterns
from loka.plan.plan import GatherPlan, Plan, PlannedBinding, SitePlan
from loka.plan.resolve import ImpossibleRuleError
from loka.plan.tuning.choices import MEASURED
from loka.policy.communication import FLOAT32_BYTES, ExchangeSetting, Wire
from loka.policy.policy import GATHER, Policy
from loka.policy.settings import Assignment, SiteSettings

GATHERS = ("all-gather of", "count", "carries", "MB", "of BF16", "why")
_COLUMNS = 16  # of an FP8 copy: kernels pad to a multiple of it
_SCALE_BYTES = 4  # of a row
_PART = "it is one of several matrices in a Parameter"


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
    alone = {site for binding in bindings for site in _read_alone(binding)}
    named = dict(zip((file for file, _ in policy.files), policy.named, strict=True))
    readers = [
        (site, wanted, weight)
        for site, wanted in zip(sites, settings, strict=True)
        if site.weight is not None and (weight := find_weight(model, site.weight)) is not None
    ]
    gathers: list[GatherPlan] = []
    problems: list[str] = []
    for group in grouped(readers, lambda each: id(each[2].parameter)):
        asked = [(by, wanted) for _, wanted, _ in group for by in wanted.history.get(GATHER, ())[-1:]]
        obstacles = [_PART if weight.index else _obstacle(now.get(site.name), alone) for site, _, weight in group]
        first, _, weight = group[0]
        name = ".".join((first.weight or "").split(".")[: -len(weight.index) or None])
        names = tuple(site.name for site, _, _ in group)
        gather = _gather(name, weight.parameter, names, [by for by, _ in asked], next(filter(None, obstacles), ""))
        gathers.append(gather)
        problems += [
            f"{named.get(by.file, by.file)}:{by.line}: {by.source} asks for {name!r} to be gathered in fp8, which "
            f"cannot be: {gather.reason}; write `carry: native` there, or leave the rule out"
            for by, wanted in asked
            if by.names_one_site and by.value == Wire.FP8 != gather.wire and _is_settled(wanted)
        ]
    if problems:
        raise ImpossibleRuleError("\n".join(problems), Code.IMPOSSIBLE)
    return tuple(gathers)


def _is_settled(wanted: SiteSettings) -> bool:
    """True if rules alone say what a site runs in; evidence and times say nothing of it."""
    compute = [wanted.history[f"{gemm}.compute"][-1] for gemm in Gemm]
    if any(by.value == Compute.AUTO or by.source == MEASURED for by in compute):
        return False
    return "scaling" not in wanted.history or all(by.value == Compute.KEEP for by in compute)


def _read_alone(binding: PlannedBinding) -> Iterator[str]:
    """The sites of a binding whose weight is a Parameter that its forward reads in these calls alone."""
    if binding.forward is None:
        yield from (site for sites in binding.sites for site in sites)
        return
    steps = binding.forward.statements
    parameters = {expression_of(name) for name, _ in binding.shapes}
    weights = {step.call.site: (unpadded(step.call) or step.call).weight for step in steps if step.call is not None}
    reads = [(ref, step.call and weights[step.call.site]) for step in steps for ref in step.operands]
    for sites in binding.sites:
        for site, in_first in zip(sites, binding.sites[0], strict=True):  # the forward was traced on the first module
            weight = weights.get(in_first)
            if not isinstance(weight, Ref) or weight.text not in parameters:
                continue
            if all(ref == weight == of for ref, of in reads if ref.is_of(weight.text)):
                yield site


def _obstacle(plan: SitePlan | None, alone: set[str]) -> str:
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
    return "" if plan.site.name in alone else "its forward reads the weight in another way, too"


def _gather(
    name: str, parameter: nn.Parameter, sites: tuple[str, ...], asked: Sequence[Assignment], obstacle: str
) -> GatherPlan:
    other = next((each for each in asked if each.value != Wire.FP8), None)
    if other is not None:
        wire, reason = Wire(other.value), f"{other.value} by {format_place(other)}"
    elif obstacle:
        wire, reason = Wire.NATIVE, obstacle
    else:
        wire = Wire.FP8
        reason = f"fp8 by {format_place(asked[-1])}" if asked else "its recipe reads one FP8 copy alone"
    *rows, columns = parameter.shape
    in_bf16 = 2 * parameter.numel()
    nbytes = {
        Wire.FP8: prod(rows) * (-(-columns // _COLUMNS) * _COLUMNS + _SCALE_BYTES),
        Wire.NATIVE: parameter.numel() * parameter.dtype.itemsize,
    }.get(wire, in_bf16)
    return GatherPlan(name, sites, wire, reason, nbytes, in_bf16)


def gather_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row of GATHERS for each weight; those that differ only in the numbers of their names share one.

    MB are of one gather of all of a row.
    """
    names = [each.weight for each in plan.gathers]
    rows: list[tuple[str, ...]] = []
    for group in grouped(plan.gathers, lambda each: (pattern_of(each.weight), each.wire, each.reason, each.nbytes)):
        nbytes, in_bf16 = sum(each.nbytes for each in group), sum(each.nbytes_bf16 for each in group)
        name = ", ".join(rule_patterns([each.weight for each in group], names))
        figures = (_megabytes(nbytes), f"{nbytes / max(in_bf16, 1):.3f}")
        rows.append((name, str(len(group)), group[0].wire.value, *figures, group[0].reason))
    return rows


def communication_lines(plan: Plan) -> Iterator[str]:
    """What the table leaves open: the bytes of a step, and TorchRec's exchanges."""
    if plan.gathers:
        nbytes, in_bf16 = sum(each.nbytes for each in plan.gathers), sum(each.nbytes_bf16 for each in plan.gathers)
        yield (
            f"All-gathers of these weights in a step: {_megabytes(nbytes)} MB for the forward and as much for the "
            f"backward (none with reshard_after_forward=False), {nbytes / max(in_bf16, 1):.3f} of bfloat16. Of N ranks "
            "each receives (N - 1) / N of it."
        )
    if any(each.wire is Wire.NATIVE for each in plan.gathers):
        yield "native counts the dtype of the Parameter; MixedPrecisionPolicy of fully_shard may give another."
    if plan.exchange is not None:
        forward, backward = map(plan.exchange.bytes_each, (plan.exchange.forward, plan.exchange.backward))
        yield (
            f"TorchRec's exchanges: {exchange_words(plan.exchange)}: {forward:.3g} bytes of a number and "
            f"{backward:.3g} of its gradient, {format_share((forward + backward) / (2 * FLOAT32_BYTES))} of float32. "
            "The package's qcomms() returns the QCommsConfig; tables are in no plan, and so are their sizes."
        )
        if plan.exchange.row is not None:
            yield (
                "Of tables that are sharded by rows TorchRec reduces and scatters, and not in fp8: it takes FP16 for "
                "the forward and BF16 for the backward instead, and says so."
            )
            yield "Exchanges in fp8 were never run by us: their codec has no CPU kernel. Compare a run with native."


def gather_words(gather: GatherPlan) -> str:
    """One weight: `fp8 (fp8 by t.yaml:14), 27456 bytes for the forward and for the backward, 0.516 of bfloat16`."""
    ratio = gather.nbytes / max(gather.nbytes_bf16, 1)
    each = f"{gather.nbytes} bytes for the forward and for the backward, {ratio:.3f} of bfloat16"
    return f"{gather.wire.value} ({gather.reason}), {each}"


def exchange_words(exchange: ExchangeSetting | None) -> str:
    """`forward fp8, backward bf16, a scale for 64 numbers`; `-` where a policy says nothing of it."""
    if exchange is None:
        return "-"
    scale = f", a scale for {exchange.row} numbers" if exchange.row is not None else ""
    return f"forward {exchange.forward.value}, backward {exchange.backward.value}{scale}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g}"

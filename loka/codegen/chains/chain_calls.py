"""The chains of a forward, and the arguments of their functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.codegen.chains.chain_shapes import ChainShape, chain_shape, fits
from loka.codegen.chains.static_operands import arguments as known_arguments
from loka.codegen.chains.static_operands import without_maxima
from loka.codegen.layout import tuple_of
from loka.codegen.modules import statement_text
from loka.codegen.modules.linear_recipes import SiteRecipe, site_recipe
from loka.errors import LokaError
from loka.graph.expression import Ref, RefKind
from loka.graph.ir import ForwardIR, Region, SiteCall, unpadded
from loka.graph.patterns.linear_chain import LinearChain, chain_input, find_chains, residual_stage
from loka.graph.patterns.norm import ChainNorm
from loka.kernels.fused.kernel_values import LARGEST_HELD
from loka.plan.plan import SitePlan
from loka.plan.rewrite.rewrites import KERNEL_OPERATIONS


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """A chain of a forward and its shape; `sites`: numbers of its linears' sites in the binding."""

    chain: LinearChain
    shape: ChainShape
    sites: tuple[int, ...]
    others: tuple[Ref, ...] = ()  # arguments for the shape's `others`

    @property
    def places(self) -> range:
        """Indices of the statements that it replaces."""
        return range(self.chain.first, self.chain.last + 1)


def planned_chains(forward: ForwardIR, index: Mapping[int, int], plans: Sequence[SitePlan]) -> dict[int, PlannedChain]:
    """The chains of GEMMs of one kind, by their first statement.

    Kinds: FP8 with transposed copies (`Recipe.is_chain`; wgrad may stay native if the chain has both of its operands in
    the model's dtype), FP8 with static scales (`Recipe.is_static`), and native GEMMs in a region that the plan
    replaces; each with a backward or without, as a chain's backward goes through all of its GEMMs. `index`: statement
    of a GEMM -> number of its site.
    """
    around = {place: region for region in forward.regions for place in range(region.first, region.last + 1)}
    kinds: dict[str, str] = {}
    trained: dict[str, bool] = {}
    regions: list[Region] = []
    for place, number in sorted(index.items()):
        recipe, site = chain_recipe(plans[number]), site_call(forward, place).site
        kind = "plain" if not recipe.fp8 and place in around else ""
        form = recipe.operands
        kind = "known" if form.is_static else "fp8" if form.is_chain or form.keeps_wgrad else kind
        if kind and fits(plans[number]):
            kinds[site] = kind
            trained[site] = len(plans[number].gemms) > 1
            regions.append(around.get(place, Region(site, place, place, ("linear",))))

    def same(site: str, other: str) -> bool:
        return (kinds[site], trained[site]) == (kinds[other], trained[other])

    while True:
        chains = find_chains(forward, regions, KERNEL_OPERATIONS, same, lambda site: kinds[site] != "plain")
        made = [_planned(forward, chain, index, plans) for chain in chains]
        lacking = {site for planned in made for site in _without_operands(planned)}
        if not lacking:
            return {planned.chain.first: planned for planned in made if planned.shape.worthwhile}
        regions = [region for region in regions if region.site not in lacking]


def chain_recipe(plan: SitePlan) -> SiteRecipe:
    """The recipe of a site as part of a chain.

    A site without dgrad that keeps wgrad has no transposed copies in its recipe; it gets the dgrad recipe of a chain,
    which never runs.
    """
    recipe = site_recipe(plan)
    if recipe.operands.is_static:
        return without_maxima(recipe)
    operands = plan.recipe.dgrad_in_form
    if recipe.fprop is None or recipe.wgrad is not None or plan.recipe.has_dgrad or operands is None:
        return recipe
    return replace(recipe, dgrad=replace(recipe.fprop, operands=operands))


def _planned(
    forward: ForwardIR, chain: LinearChain, index: Mapping[int, int], plans: Sequence[SitePlan]
) -> PlannedChain:
    sites = tuple(index[stage.linear] for stage in chain.stages)
    biases = [site_call(forward, stage.linear).bias is not None for stage in chain.stages]
    own = [plans[number] for number in sites]
    residuals = [residual_stage(forward, chain, stage) for stage in chain.stages]
    others = _others(forward, chain, residuals)
    shape = chain_shape(chain, own, biases, [chain_recipe(plan) for plan in own], residuals, others)
    missing = _missing_columns(forward, chain, shape)
    if missing:
        first, *rest = shape.stages
        shape = replace(shape, stages=(replace(first, given=first.k - missing), *rest))
    return PlannedChain(chain, shape, sites, tuple(others))


def _missing_columns(forward: ForwardIR, chain: LinearChain, shape: ChainShape) -> int:
    """Number of zero columns padding the first linear's operands that its kernels write instead of torch."""
    bare = unpadded(site_call(forward, chain.stages[0].linear))
    takes = shape.fp8 and not shape.known and shape.stages[0].k <= LARGEST_HELD
    return bare.columns if bare is not None and takes else 0


def _without_operands(planned: PlannedChain) -> set[str]:
    """The sites that keep wgrad although the chain does not have its operands in the model's dtype."""
    stages = planned.shape.stages
    return {
        stage.site
        for number, stage in enumerate(planned.chain.stages)
        if stages[number].keeps_wgrad and (len(stages) == 1 or not planned.shape.has_operands(number))
    }


def _others(forward: ForwardIR, chain: LinearChain, residuals: Sequence[int | None]) -> dict[Ref, str]:
    """The locals from outside that stages multiply by and add, but for the chain's input, and names for them."""
    outer: dict[Ref, None] = {}
    x = chain_input(forward, chain)
    for stage, number in zip(chain.stages, residuals, strict=True):
        residual = stage.residual if number is None else None
        refs = (stage.before_multiplier, stage.times, residual, stage.multiplier)
        outer.update({ref: None for ref in refs if ref is not None and ref.text != x})
    return {ref: "other" if len(outer) == 1 else f"other_{place}" for place, ref in enumerate(outer)}


def site_call(forward: ForwardIR, place: int) -> SiteCall:
    """The GEMM call of a statement. Raises LokaError if it is none."""
    found = forward.statements[place].call
    if found is None:
        raise LokaError(f"statement {place} is no GEMM. This is a fault in LoKA: please report it.")
    return found


def chain_arguments(
    forward: ForwardIR, planned: PlannedChain, scope: statement_text.NameScope, freezes: bool
) -> list[str]:
    """Arguments of a chain's function, a tuple for each linear; `freezes`: its weights may be frozen."""
    chain, shape = planned.chain, planned.shape
    groups: list[list[str]] = []
    around: list[str] = []

    def name(ref: Ref) -> str:
        # A local that is unknown here is internal to the chain: the input of a linear, which no argument below reads.
        known = ref.kind is not RefKind.LOCAL or ref.text in scope.local
        return scope.text(ref) if known else "_"

    for stage, number in zip(chain.stages, planned.sites, strict=True):
        call = site_call(forward, stage.linear)
        bare = unpadded(call) if shape.stages[0].given and not groups else None
        if bare is not None:
            call = replace(call, x=bare.x, weight=bare.weight)
        parts = statement_text.linear_text(call, name)
        if not groups:
            x = scope.text(forward.statements[chain.first].operands[0]) if shape.stages[0].ops_before else parts.x
            before = _norm_texts(stage.before, scope)
            around = [x, *map(scope.text, planned.others), *([tuple_of(before)] if before else [])]
        group = [or_frozen(number, parts.weight) if freezes else parts.weight]
        group += [parts.bias] if parts.bias is not None else []
        group += _norm_texts(stage.after, scope)
        group += [scope.text(stage.dropout.module)] if stage.dropout is not None else []
        group += known_arguments(number) if shape.known else []
        groups.append(group)
    counted = [f"self.loka.counter_ids({', '.join(map(str, planned.sites))})"] if shape.fp8 else []
    return [*around, *map(tuple_of, groups), *counted]


def or_frozen(site: int, weight: str) -> str:
    """The frozen weight of a site, or else this one."""
    return f"self.loka_frozen({site}) or {weight}"


def _norm_texts(norm: ChainNorm | None, scope: statement_text.NameScope) -> list[str]:
    """A norm's tensors; the module that stands for those of a BatchNorm."""
    if norm is not None and norm.module is not None:
        return [scope.text(norm.module)]
    refs = () if norm is None else (norm.weight, norm.bias)
    return [scope.text(ref) for ref in refs if ref is not None]

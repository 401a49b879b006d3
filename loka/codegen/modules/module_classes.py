"""The module class of each binding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loka.codegen.chains.chain_calls import or_frozen
from loka.codegen.chains.chain_shapes import ChainShape, StageShape, fits
from loka.codegen.chains.chain_stages import ChainStages
from loka.codegen.chains.static_operands import OPERANDS, StaticOperand, static_operand, without_maxima
from loka.codegen.chains.static_operands import arguments as known_arguments
from loka.codegen.layout import call, formatted, literal, tuple_of
from loka.codegen.modules.forward_body import INDENT, ForwardBody, Gatherable, PackageKernels
from loka.codegen.modules.linear_recipes import describe, site_recipe
from loka.codegen.modules.signature import forward_header
from loka.codegen.names import Names, class_name, layers, listed, shown, snake, wrapped
from loka.errors import LokaError
from loka.kernels.gemm.catalogue import SCALED_MM
from loka.plan.plan import BindingKind, PlannedBinding, SitePlan


@dataclass(frozen=True, slots=True)
class ModuleView:
    """View of one generated class, for templates/modules.py.j2."""

    name: str
    docstring: str
    header: str  # def forward(...) -> ...:
    body: tuple[str, ...]
    quantized: str = ""  # the FP8 weights by site, which mode "infer" keeps; "" if there are none
    known: tuple[str, ...] = ()  # the lines that declare operands with static scales
    gatherable: tuple[str, ...] = ()  # the lines that declare weights of one FP8 copy


@dataclass(frozen=True, slots=True)
class BoundView:
    """The class of one binding, and the FP8 GEMMs of its sites."""

    binding: PlannedBinding
    module: ModuleView
    infer: bool  # also for inference: an fprop is in FP8, a kernel fuses something, or mods rewrote the forward
    gemms: tuple[tuple[str, ...], ...]
    kernels: tuple[tuple[tuple[str, ...], ...], ...] = ()  # for each of `gemms`; () if all are torch.scaled_mm


@dataclass(slots=True)
class ModuleWriter:
    """Writes the classes of one package and collects the kernels and regions they call."""

    sites: Mapping[str, SitePlan]
    batch_size: int
    kernels: PackageKernels
    class_names: Names = field(default_factory=Names)
    imports: set[str] = field(default_factory=set)

    def bound(self, binding: PlannedBinding) -> BoundView:
        """The class of one binding. Raises LokaError if the plan contradicts itself."""
        name = self.class_names.unique(class_name(binding.modules, binding.module_type, binding.name))
        plans = self._site_plans(binding)
        gemms = tuple(tuple(gemm.gemm.value for gemm in plan.gemms if gemm.fp8) for plan in plans)
        write = self._linear if binding.kind is BindingKind.LINEAR else self._forward
        module, fuses = write(binding, name, plans)
        rewritten = binding.forward is not None and bool(binding.forward.rewritten)
        infer = fuses or rewritten or any("fprop" in names for names in gemms)
        kernels = tuple(tuple(gemm.kernels for gemm in plan.gemms if gemm.fp8) for plan in plans)
        usual = all(each == (SCALED_MM.name,) for site in kernels for each in site)
        return BoundView(binding, module, infer, gemms, () if usual else kernels)

    def _site_plans(self, binding: PlannedBinding) -> tuple[SitePlan, ...]:
        """The plans of the first module's sites. Raises LokaError if other modules have other recipes."""
        found: list[tuple[SitePlan, ...]] = []
        for names in binding.sites:
            missing = [name for name in names if name not in self.sites]
            if missing:
                raise LokaError(
                    f"the plan binds a site that it lacks: {missing[0]!r}. Please report this fault in LoKA."
                )
            found.append(tuple(self.sites[name] for name in names))
        if not found or len(found) != len(binding.modules):
            raise LokaError(
                f"the binding {binding.name!r} lists no sites for a module. Please report this fault in LoKA."
            )
        seen = {tuple(plan.gemms for plan in plans): plans for plans in found}
        recipes = {tuple(_decisions(plan) for plan in plans) for plans in seen.values()}
        if len(recipes) > 1:
            raise LokaError(f"the binding {binding.name!r} mixes recipes. This is a fault in LoKA: please report it.")
        return found[0]

    def _linear(self, binding: PlannedBinding, name: str, plans: tuple[SitePlan, ...]) -> tuple[ModuleView, bool]:
        """The class of a single linear, and False: it fuses nothing."""
        (plan,) = plans
        recipe = site_recipe(plan)
        bias = "self.bias" if any(path == "bias" for path, _ in binding.shapes) else None
        freezes = recipe.fprop is not None
        weight = or_frozen(0, "self.weight") if freezes else "self.weight"
        chained = recipe.operands.is_chain and fits(plan)
        known = chained and recipe.operands.is_static
        gatherable: Sequence[Gatherable] = ()
        if chained:
            plain = without_maxima(recipe) if known else recipe
            shape = ChainShape((StageShape(plan.site.k, plan.site.n, bias is not None, plain),))
            gatherable = [(0, "weight", kernel) for kernel in ChainStages(shape).weight_kernels()]
            found = layers(binding.sites, snake(name))
            kernel = self.kernels.chains.function(shape, found)
            static = known_arguments(0) if known else []
            operands = [tuple_of([weight, *([bias] if bias else []), *static]), "self.loka.counter_ids(0)"]
        else:
            kernel = self.kernels.recipes.linear(recipe)
            operands = [weight, bias or "None", "self.loka.counter_id(0)"]
        product = call(f"{self.kernels.module}.{kernel}", ("x", *operands))
        view = ModuleView(
            name,
            self._docstring(binding, plans),
            "def forward(self, x: Tensor) -> Tensor:",
            (" " * INDENT + f"return {product}",),
            self._quantized(plans, {0: "self.weight"} if freezes else {}),
            _known_lines([static_operand(0, operand, recipe) for operand in OPERANDS] if known else ()),
            _gatherable_lines(gatherable),
        )
        return view, False

    def _forward(self, binding: PlannedBinding, name: str, plans: tuple[SitePlan, ...]) -> tuple[ModuleView, bool]:
        """The class of a straight-line forward, and True if kernels fuse operations around native GEMMs."""
        if binding.forward is None:
            raise LokaError(f"the binding {binding.name!r} has no forward. This is a fault in LoKA: please report it.")
        body = ForwardBody(self.kernels, binding.forward, binding, name, plans)
        self.imports |= body.imports
        view = ModuleView(
            name,
            self._docstring(binding, plans),
            forward_header(binding.forward, body.arguments),
            tuple(body.lines),
            self._quantized(plans, body.freezable),
            _known_lines([static_operand(*place, site_recipe(plans[place[0]])) for place in body.known]),
            _gatherable_lines(body.gatherable),
        )
        return view, body.fuses

    def _quantized(self, plans: Sequence[SitePlan], weights: Mapping[int, str]) -> str:
        """`{0: kernels.e4m3_rowwise(self.weight), ...}`, the weights that can be frozen by site; "" without any."""
        items = []
        for site, weight in sorted(weights.items()):
            recipe = site_recipe(plans[site]).fprop
            if recipe is None:
                raise LokaError(f"site {site} has no FP8 weight. This is a fault in LoKA: please report it.")
            quantizer = f"{self.kernels.module}.{self.kernels.recipes.quantizer(recipe.operands[1])}"
            items.append(f"{site}: {call(quantizer, [formatted(weight)])}")
        return "{" + ", ".join(items) + "}" if items else ""

    def _docstring(self, binding: PlannedBinding, plans: tuple[SitePlan, ...]) -> str:
        """The class's docstring: its modules, their sizes, and the recipe of each GEMM."""
        modules = f"{listed(binding.modules)}: {shown(binding.module_type)}."
        lines = [wrapped(modules, 4, first=6), ""]
        if binding.forward is not None and binding.forward.inlined:
            lines += ["    " + wrapped(f"With the forward of {listed(binding.forward.inlined, most=8)}.", 4), ""]
        if binding.forward is not None and binding.forward.rewritten:
            lines += [f"    Rewritten by {listed(binding.forward.rewritten)}: the same function to rounding.", ""]
        for index, plan in enumerate(plans):
            name = "" if binding.kind is BindingKind.LINEAR else f"{shown(plan.site.name)}: "
            text = f"{name}{self._sizes(binding, index)}; {describe(plan)}."
            lines.append("    " + wrapped(text, 4, hanging=4))
        return "\n".join(lines if plans else lines[:-1])

    def _sizes(self, binding: PlannedBinding, index: int) -> str:
        """M, K and N of one site: "M = 4096 (B), K = 512, N = 2048"."""
        sites = [self.sites[names[index]].site for names in binding.sites]
        rows = dict.fromkeys((str(site.rows), site.rows.at(self.batch_size)) for site in sites)
        m = " or ".join(f"{size} ({text})" for text, size in rows)
        return f"M = {m}, K = {sites[0].k}, N = {sites[0].n}"


def _known_lines(found: Sequence[StaticOperand]) -> tuple[str, ...]:
    """`loka_known = (dispatch.StaticScale(0, "input", 3.5, 0.015625), ...)`: the static scales of a module."""
    if not found:
        return ()
    each = [(one.site, one.operand.value, one.amax, one.scale) for one in found]
    made = [call("dispatch.StaticScale", map(literal, items)) for items in each]
    return (f"    loka_known = {tuple_of(made)}",)


def _gatherable_lines(found: Sequence[Gatherable]) -> tuple[str, ...]:
    """`loka_gatherable = ((0, "0.weight", "quantize_weights"), ...)`: the weights of which one FP8 copy is read."""
    made = [tuple_of(list(map(literal, each))) for each in found]
    return (f"    loka_gatherable = {tuple_of(made)}",) if made else ()


def _decisions(plan: SitePlan) -> tuple[object, ...]:
    return tuple((gemm.gemm, gemm.operands, gemm.accumulation, gemm.kernel, gemm.m_buckets) for gemm in plan.gemms)

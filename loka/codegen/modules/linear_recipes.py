"""Generated quantizers, one for each operand recipe, and linears, one for each recipe of three GEMMs.

Names follow the recipe: `e4m3_rowwise`, `linear_e4m3_rowwise`, `linear_fprop_dgrad_e4m3_rowwise_wgrad_as_is`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from loka.codegen.layout import call
from loka.codegen.modules.gemm_calls import GemmRecipe, gemm_call, kernel_label, kernel_suffix
from loka.codegen.names import Names, wrapped
from loka.errors import LokaError
from loka.numerics.enums import OPERANDS, Accumulation, Gemm, Operand
from loka.numerics.quantize import FORMATS, static_scale
from loka.numerics.recipe import OperandRecipe, Recipe
from loka.numerics.scalings import BLOCKS, Block
from loka.plan.plan import GemmPlan, SitePlan


@dataclass(frozen=True, slots=True)
class QuantizerView:
    """View of a quantizer, for templates/quantizer.py.j2."""

    name: str
    format: str  # e4m3
    dtype: str  # torch.float8_e4m3fn
    maximum: str  # the format's largest finite value as a Python number
    block: Block  # elements that share a scale
    power_of_two: bool
    amax: str | None  # maximum of a static scale as a Python number; None for a dynamic scale
    static_scale: str | None  # the scale derived from it


@dataclass(frozen=True, slots=True)
class LinearView:
    """View of a linear, an autograd function and its wrapper, for templates/linear.py.j2.

    fprop, dgrad and wgrad are lines of code; () is a plain matmul.
    """

    name: str  # linear_e4m3_rowwise
    function: str  # LinearE4m3Rowwise
    said: str
    weight: str  # the call that quantizes it for fprop; "" is none
    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]
    wgrad: tuple[str, ...]


_VARIABLE = {Operand.INPUT: "x", Operand.WEIGHT: "weight", Operand.GRAD_OUTPUT: "dy"}
# Each operand as a GEMM reads it, with the contracted dimension last (docs/kernels.md).
_VIEW = {
    (Gemm.FPROP, Operand.INPUT): "x",
    (Gemm.DGRAD, Operand.GRAD_OUTPUT): "dy",
    (Gemm.DGRAD, Operand.WEIGHT): "weight.t()",
    (Gemm.WGRAD, Operand.GRAD_OUTPUT): "dy.t()",
    (Gemm.WGRAD, Operand.INPUT): "x.t()",
}
_LONGEST = 76  # most characters of a linear's name; a longer recipe is only in its docstring


@dataclass(frozen=True, slots=True)
class SiteRecipe:
    """Recipes of the three GEMMs of a site; None is native."""

    fprop: GemmRecipe | None
    dgrad: GemmRecipe | None
    wgrad: GemmRecipe | None

    def items(self) -> tuple[tuple[Gemm, GemmRecipe | None], ...]:
        """The GEMMs and their recipes, in the order of counter ids."""
        return (Gemm.FPROP, self.fprop), (Gemm.DGRAD, self.dgrad), (Gemm.WGRAD, self.wgrad)

    @property
    def fp8(self) -> bool:
        """True if any GEMM runs in FP8."""
        return any(recipe is not None for _, recipe in self.items())

    @property
    def operands(self) -> Recipe:
        """The recipe of the operands, without kernels."""
        return Recipe.of({gemm: None if recipe is None else recipe.operands for gemm, recipe in self.items()})


def site_recipe(plan: SitePlan) -> SiteRecipe:
    """The recipe of a planned site.

    A site whose input or weight needs no gradient has no dgrad or wgrad in its plan and never runs one. To let it share
    its code with other sites, it gets those that match its other GEMMs; if wgrad reads transposed copies, a dgrad with
    fprop's recipe for the output gradient, and the weight transposed.
    """
    found = {gemm.gemm: _gemm_recipe(gemm) for gemm in plan.gemms}
    fprop, dgrad, wgrad = (found.get(gemm) for gemm in Gemm)
    operands = plan.recipe.wgrad_in_form
    if Gemm.WGRAD not in found and fprop is not None and operands is not None:
        wgrad = GemmRecipe(operands, fprop.accumulation, fprop.kernel)
    operands = plan.recipe.dgrad_in_form
    if Gemm.DGRAD not in found and fprop is not None and wgrad is not None and operands is not None:
        in_chain = wgrad.operands[0].transposed or plan.recipe.is_chain
        if in_chain or fprop.accumulation == wgrad.accumulation:
            alike = (fprop.kernel, fprop.m_buckets) == (wgrad.kernel, wgrad.m_buckets)
            dgrad = replace(fprop, operands=operands) if alike else GemmRecipe(operands, fprop.accumulation)
    return SiteRecipe(fprop, dgrad, wgrad)


def _gemm_recipe(plan: GemmPlan) -> GemmRecipe | None:
    if plan.operands is None:
        return None
    return GemmRecipe(plan.operands, plan.accumulation or Accumulation.PRECISE, plan.kernel, plan.m_buckets)


def describe(plan: SitePlan) -> str:
    """The recipes of a plan's GEMMs in words: "fprop, dgrad in e4m3 rowwise; wgrad in the model's dtype"."""
    return recipe_label((gemm.gemm, _gemm_recipe(gemm)) for gemm in plan.gemms)


def recipe_label(gemms: Iterable[tuple[Gemm, GemmRecipe | None]]) -> str:
    groups: dict[str, list[str]] = {}
    for gemm, recipe in gemms:
        groups.setdefault("the model's dtype" if recipe is None else _recipe_said(recipe), []).append(gemm.value)
    return "; ".join(f"{', '.join(names)} in {said}" for said, names in groups.items())


def _recipe_said(recipe: GemmRecipe) -> str:
    """A recipe in words: "e5m2 by e4m3 rowwise with fast accumulation", "transposed copies, tensorwise"."""
    first, second = recipe.operands
    if first.transposed and second.transposed:
        return f"transposed copies, {BLOCKS[first.scaling].label}" + _run_said(recipe)
    if second.transposed:
        rows = GemmRecipe((first, first), recipe.accumulation)
        return f"{_recipe_said(rows)} by a transposed copy{kernel_label(recipe)}"
    said = _operands_name(recipe).replace("_", " ").replace(" pow2", " with power-of-two scales")
    for operand in recipe.operands:
        if operand.amax is not None:
            said = said.replace(f"amax {_number_name(_amax(operand))}", f"for |x| up to {_amax(operand)!r}")
    return said + _run_said(recipe)


def _run_said(recipe: GemmRecipe) -> str:
    fast = " with fast accumulation" if recipe.accumulation == Accumulation.FAST else ""
    return fast + kernel_label(recipe)


def operand_name(recipe: OperandRecipe) -> str:
    """The quantizer's name: e4m3_rowwise, e4m3_1x128_pow2, e5m2_tensorwise_amax_3p5."""
    return f"{recipe.format}_{_suffix(recipe)}"


def _suffix(recipe: OperandRecipe) -> str:
    amax = "" if recipe.amax is None else f"_amax_{_number_name(recipe.amax)}"
    amax = "_known" if recipe.is_static and not amax else amax  # one function for all maxima
    transposed = "_transposed" if recipe.transposed else ""
    return BLOCKS[recipe.scaling].label + amax + ("_pow2" if recipe.power_of_two else "") + transposed


def _amax(recipe: OperandRecipe) -> float:
    if recipe.amax is None:
        raise LokaError("the plan has a static scale without its amax. This is a fault in LoKA: please report it.")
    return float(recipe.amax)


def _static_scale(recipe: OperandRecipe) -> float:
    return static_scale(_amax(recipe), recipe.format, recipe.power_of_two)


def _number_name(value: float) -> str:
    """3.5 as 3p5, 448.0 as 448, 1e-05 as 1em05."""
    text = repr(value)
    return text.removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")


def _gemm_name(recipe: GemmRecipe | None) -> str:
    """e4m3_rowwise, e4m3_rowwise_fast_on_fbgemm_rowwise, as_is; precise and torch's kernel are omitted."""
    if recipe is None:
        return "as_is"
    fast = "_fast" if recipe.accumulation == Accumulation.FAST else ""
    return _operands_name(recipe) + fast + kernel_suffix(recipe)


def _operands_name(recipe: GemmRecipe) -> str:
    """e4m3_rowwise, e5m2_by_e4m3_rowwise, e4m3_1x128_by_128x128."""
    a, b = recipe.operands
    if a == b:
        return operand_name(a)
    if _suffix(a) == _suffix(b):
        return f"{a.format}_by_{b.format}_{_suffix(a)}"
    if a.format == b.format:
        return f"{a.format}_{_suffix(a)}_by_{_suffix(b)}"
    return f"{operand_name(a)}_by_{operand_name(b)}"


def linear_name(recipe: SiteRecipe) -> str:
    """linear_e4m3_rowwise if all three agree, otherwise for example linear_fprop_dgrad_e4m3_rowwise_wgrad_as_is."""
    groups: dict[str, list[str]] = {}
    for gemm, gemm_recipe in recipe.items():
        groups.setdefault(_gemm_name(gemm_recipe), []).append(gemm.value)
    if len(groups) == 1:
        return f"linear_{next(iter(groups))}"
    name = "linear_" + "_".join(f"{'_'.join(gemms)}_{name}" for name, gemms in groups.items())
    return name if len(name) <= _LONGEST else "linear_mixed"


def _class_of(function: str) -> str:
    """linear_e4m3_1x128 as LinearE4m3Block1x128."""
    labels = {block.label for block in BLOCKS.values()}
    return "".join(
        f"Block{part}" if part[0].isdigit() and part in labels else part[0].upper() + part[1:]
        for part in function.split("_")
    )


class Recipes:
    """The quantizers and linears of a package, each once, in order of first use."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._linears: dict[SiteRecipe, tuple[str, str]] = {}
        self._quantizers: dict[OperandRecipe, str] = {}
        self.requantize_transpose: str | None = (
            None  # name of the function that makes transposed copies, if one is needed
        )

    def linear(self, recipe: SiteRecipe) -> str:
        """Register a call; returns the wrapper's name."""
        if recipe not in self._linears:
            name = self._names.unique(linear_name(recipe))
            self._linears[recipe] = (name, self._names.unique(_class_of(name)))
        return self._linears[recipe][0]

    def quantizer(self, recipe: OperandRecipe) -> str:
        """Register a use; returns the quantizer's name."""
        if recipe not in self._quantizers:
            self._quantizers[recipe] = self._names.unique(operand_name(recipe))
        return self._quantizers[recipe]

    def linears(self) -> tuple[LinearView, ...]:
        """Views of all registered linears."""
        return tuple(
            LinearView(
                name,
                function,
                wrapped(
                    f"y = x @ weight.T for x (M, K) and weight (N, K): {recipe_label(recipe.items())}.", 4, first=6
                ),
                "" if recipe.fprop is None else self._quantized(recipe.fprop.operands[1], "weight"),
                self._lines(Gemm.FPROP, recipe.fprop, "return ", "dtype", "counter_id", 8),
                self._lines(Gemm.DGRAD, recipe.dgrad, "dx = ", "x.dtype", "ctx.counter_id + 1", 12),
                self._lines(Gemm.WGRAD, recipe.wgrad, "dw = ", "weight.dtype", "ctx.counter_id + 2", 12),
            )
            for recipe, (name, function) in self._linears.items()
        )

    def quantizers(self) -> tuple[QuantizerView, ...]:
        """Views of all registered quantizers. Call it last: the other views register some."""
        return tuple(
            QuantizerView(
                name,
                recipe.format.value,
                str(FORMATS[recipe.format].dtype),
                repr(FORMATS[recipe.format].max),
                BLOCKS[recipe.scaling],
                recipe.power_of_two,
                repr(_amax(recipe)) if recipe.is_static else None,
                repr(_static_scale(recipe)) if recipe.is_static else None,
            )
            for recipe, name in self._quantizers.items()
        )

    def _lines(
        self, gemm: Gemm, recipe: GemmRecipe | None, result: str, dtype: str, counter_id: str, indent: int
    ) -> tuple[str, ...]:
        """Lines that quantize the operands, except the weight of fprop, and multiply."""
        if recipe is None:
            return ()
        lines: list[str] = []
        operands: list[str] = []
        for operand, operand_recipe in zip(OPERANDS[gemm], recipe.operands, strict=True):
            values, scale = f"{_VARIABLE[operand]}_fp8", f"{_VARIABLE[operand]}_scale"
            if (gemm, operand) != (Gemm.FPROP, Operand.WEIGHT):
                quantized = self._quantized(operand_recipe, _VIEW[gemm, operand])
                lines.append(" " * indent + f"{values}, {scale} = {quantized}")
            operands += values, f"{scale}[:1]" if operand_recipe.reads_first_scale else scale
        return (*lines, " " * indent + result + gemm_call(gemm, recipe, operands, dtype, counter_id))

    def _quantized(self, recipe: OperandRecipe, view: str) -> str:
        """A call that quantizes an operand; a transposed operand is quantized by row first, then transposed."""
        if not recipe.transposed:
            return call(self.quantizer(recipe), [view])
        if self.requantize_transpose is None:
            self.requantize_transpose = self._names.unique("requantize_transpose")
        quantized = call(self.quantizer(recipe.source), [view.removesuffix(".t()")])
        return call(self.requantize_transpose, [f"*{quantized}"])

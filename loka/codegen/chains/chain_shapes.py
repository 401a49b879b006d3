"""Shape of a chain, independent of its module's names: operations, sizes, recipes, and the kernels of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.codegen.modules.gemm_calls import GemmRecipe
from loka.codegen.modules.linear_recipes import SiteRecipe
from loka.errors import LokaError
from loka.graph.expression import Ref
from loka.graph.patterns.linear_chain import LinearChain
from loka.graph.patterns.norm import ChainNorm
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.kernels.fused.norm.activations import name_and_constants
from loka.kernels.fused.norm.norm_spec import BLOCK, NormBackward, NormForward
from loka.kernels.fused.norm.norms import NORMS
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import SitePlan

_NO_EPS = 1e-05  # in the specs of kernels without a norm, so that equal kernels have equal specs


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm over the last dimension, over blocks of it, or over the rows."""

    kind: str
    weight: bool
    bias: bool
    eps: float
    block: int = BLOCK  # of a block_norm

    @property
    def over_columns(self) -> bool:
        """True for a BatchNorm, whose kernels are given its statistics."""
        return NORMS[self.kind].over_columns


@dataclass(frozen=True, slots=True)
class StageShape:
    """linear [* matrix] [+ matrix] [norm] [activation] [* matrix] for x (M, k) and a weight (n, k).

    Only the first stage may have something before its linear: [norm] [activation] [* matrix]. `times`, `residual` and
    the multipliers name an argument of the chain, those behind the linear possibly "x"; if `residual` is a number, it
    is the result of that stage.
    """

    k: int
    n: int
    bias: bool
    recipe: SiteRecipe
    before: NormShape | None = None
    after: NormShape | None = None
    activation: str | None = None
    times: str | None = None
    residual: str | int | None = None
    dropout: float = 0.0
    multiplier: str | None = None
    before_activation: str | None = None
    before_multiplier: str | None = None
    given: int = 0  # actual columns of x and weight, if the first stage's kernels pad them with zeros to k; else 0

    @property
    def summed(self) -> bool:
        """True if the product is multiplied by a matrix or one is added to it."""
        return self.times is not None or self.residual is not None

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations from its linear on, in order."""
        found = ["linear", *["times"] * (self.times is not None), *["residual"] * (self.residual is not None)]
        found += _ops(self.after, self.activation, self.multiplier)
        return (*found, *["dropout"] * (self.dropout > 0.0))

    @property
    def ops_before(self) -> tuple[str, ...]:
        """The operations before its linear, in order."""
        return _ops(self.before, self.before_activation, self.before_multiplier)

    @property
    def keeps_wgrad(self) -> bool:
        """True if only wgrad runs in the model's dtype."""
        return self.recipe.operands.keeps_wgrad

    @property
    def x(self) -> OperandRecipe:
        """Recipe of its input."""
        return _operand(self.recipe.fprop, 0)

    @property
    def weight(self) -> OperandRecipe:
        """Recipe of its weight."""
        return _operand(self.recipe.fprop, 1)

    @property
    def dy(self) -> OperandRecipe:
        """Recipe of its output gradient."""
        return _operand(self.recipe.dgrad, 0)

    @property
    def bent(self) -> bool:
        """True if a norm or an activation follows."""
        return self.after is not None or self.activation is not None

    @property
    def followed(self) -> bool:
        """True if a kernel processes the product; it then adds the linear's bias too."""
        return self.bent or self.summed

    @property
    def by_result(self) -> bool:
        """True if its result tells the gradient: that of a relu is zero where the result is."""
        return self.activation == "relu" and self.after is None and not self.summed and self.multiplier is None


@dataclass(frozen=True, slots=True)
class ChainShape:
    """All that a chain's generated text depends on: chains of one shape share their function."""

    stages: tuple[StageShape, ...]
    others: tuple[str, ...] = ()  # arguments other than x that stages multiply by or add

    @property
    def fp8(self) -> bool:
        """True if all GEMMs run in FP8; otherwise all are native."""
        return self.stages[0].recipe.fp8

    @property
    def known(self) -> bool:
        """True if all inputs and output gradients have static scales."""
        return self.stages[0].recipe.operands.is_static

    @property
    def worthwhile(self) -> bool:
        """True if generated kernels help: a native linear without neighbours is left to torch."""
        return self.fp8 or any(stage.ops_before or stage.followed for stage in self.stages)

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations in order: ("layer_norm", "linear", "layer_norm", "silu")."""
        return (*self.stages[0].ops_before, *(step for stage in self.stages for step in stage.ops))

    def reader(self, index: int) -> int | None:
        """Number of the stage whose residual is the result of stage `index`, or None."""
        return next((number for number, stage in enumerate(self.stages) if stage.residual == index), None)

    def keeps(self, index: int, inference: bool) -> bool:
        """True if a stage's kernel also writes its sum, for a later residual or for backward."""
        stage, following = self.stages[index], self.stages[index + 1 : index + 2]
        backward = stage.bent or any(other.keeps_wgrad for other in following)
        return self.reader(index) is not None or (stage.summed and backward and not inference)

    def leaves_sum(self, index: int) -> bool:
        """True if the gradient of a stage's sum stays as its two terms, which are kept in memory anyway.

        They are then added where they are used, by the kernels of the arguments' gradients.
        """
        stage, reader = self.stages[index], self.reader(index)
        within = stage.bent or isinstance(stage.residual, int)
        return reader is not None and not within and self.stages[reader].times is not None

    def has_operands(self, index: int) -> bool:
        """True if a stage's input and output gradient exist in the model's dtype, as a native wgrad needs."""
        stage, before = self.stages[index], self.stages[index - 1]
        if stage.followed or stage.bias:
            return False
        if index == 0:
            return not stage.ops_before
        return not before.bent and (before.summed or not before.bias)


def chain_shape(
    chain: LinearChain,
    plans: Sequence[SitePlan],
    biases: Sequence[bool],
    recipes: Sequence[SiteRecipe],
    residuals: Sequence[int | None],
    others: Mapping[Ref, str],
) -> ChainShape:
    """The shape of a found chain; `plans`, `biases`, `recipes` and `residuals` are those of its stages.

    `residuals` are numbers of stages whose results are added; `others` are the names of all arguments but x. Raises
    LokaError if the width of a norm does not match its linear.
    """

    def name(ref: Ref | None) -> str | None:
        return None if ref is None else others.get(ref, "x")

    stages = []
    for stage, plan, bias, recipe, number in zip(chain.stages, plans, biases, recipes, residuals, strict=True):
        for norm, width in ((stage.before, plan.site.k), (stage.after, plan.site.n)):
            if norm is not None and (width % norm.width if norm.kind == "block_norm" else norm.width not in (0, width)):
                raise LokaError(
                    f"{stage.site}: a norm over {norm.width} elements stands beside a linear of {width}. This is a "
                    "fault in LoKA: please report it."
                )
        made = StageShape(
            plan.site.k,
            plan.site.n,
            bias,
            recipe,
            before=_norm_shape(stage.before),
            after=_norm_shape(stage.after),
            activation=stage.activation,
            times=name(stage.times),
            residual=name(stage.residual) if number is None else number,
            dropout=stage.dropout.p if stage.dropout is not None else 0.0,
            multiplier=name(stage.multiplier),
            before_activation=stage.before_activation,
            before_multiplier=name(stage.before_multiplier),
        )
        stages.append(made)
    return ChainShape(tuple(stages), tuple(others.values()))


def _ops(norm: NormShape | None, activation: str | None, multiplier: str | None) -> tuple[str, ...]:
    steps = [norm.kind] if norm is not None else []
    steps += [name_and_constants(activation)[0]] if activation is not None else []
    return (*steps, *["times"] * (multiplier is not None))


def _norm_shape(norm: ChainNorm | None) -> NormShape | None:
    if norm is None:
        return None
    block = norm.width if norm.kind == "block_norm" else BLOCK
    eps = _NO_EPS if norm.module is not None else norm.eps  # which reads its own
    return NormShape(norm.kind, norm.weight is not None, norm.bias is not None, eps, block)


def _operand(gemm: GemmRecipe | None, place: int) -> OperandRecipe:
    if gemm is None:
        raise LokaError("a chain's GEMM has no recipe. This is a fault in LoKA: please report it.")
    return gemm.operands[place]


def fits(plan: SitePlan) -> bool:
    """True if the kernels support the widths of a site's input and output."""
    return max(plan.site.k, plan.site.n) <= LARGEST_WIDTH


def quantizer(width: int, given: int = 0) -> NormForward:
    """The kernel that quantizes a matrix to e4m3 by row; `given` columns are padded with zeros to `width`."""
    plain = NormForward(width, None, False, False, _NO_EPS, None, add=False, quantize=True, save=False)
    return replace(plain, width=given, aligned=width) if given else plain


def forward_before(stage: StageShape, quantize: bool, save: bool) -> NormForward:
    """The kernel that makes the first linear's input from x."""
    if not stage.ops_before:
        return quantizer(stage.k, stage.given)
    norm = stage.before
    around = (stage.before_activation, False, quantize)
    multiplied = stage.before_multiplier is not None
    if norm is None:
        return NormForward(stage.k, None, False, False, _NO_EPS, *around, multiplied=multiplied)
    affine = (norm.kind, norm.weight, norm.bias, norm.eps)
    return NormForward(stage.k, *affine, *around, save, block=norm.block, multiplied=multiplied)


def forward_after(stage: StageShape, quantize: bool, save: bool, keep: bool = False) -> NormForward:
    """The kernel that makes a stage's result, or the next linear's input, from the product."""
    made = _forward_after(stage, quantize, save, keep)
    return replace(made, dropout=stage.dropout, multiplied=stage.multiplier is not None)


def _forward_after(stage: StageShape, quantize: bool, save: bool, keep: bool) -> NormForward:
    norm = stage.after
    around = (stage.activation, stage.bias, quantize)
    if norm is not None and norm.over_columns:
        return NormForward(stage.n, norm.kind, True, norm.bias, _NO_EPS, stage.activation, True, quantize)
    if norm is None:
        return NormForward(stage.n, None, False, False, _NO_EPS, *around, False, *_sums(stage), keep=keep)
    affine = (norm.kind, norm.weight, norm.bias, norm.eps)
    return NormForward(stage.n, *affine, *around, save, *_sums(stage), keep=keep, block=norm.block)


def _sums(stage: StageShape) -> tuple[bool, bool]:
    return stage.times is not None, stage.residual is not None


def backward_before(stage: StageShape, carried: bool = False) -> NormBackward:
    """The kernel from the gradient of the first linear's input to that of x; `carried`: x has another gradient too."""
    norm = stage.before
    return NormBackward(
        stage.k,
        None if norm is None else norm.kind,
        norm is not None and norm.weight,
        norm is not None and norm.bias,
        _NO_EPS if norm is None else norm.eps,
        stage.before_activation,
        multiplied=stage.before_multiplier is not None,
        residual_grad_in=carried,
        block=BLOCK if norm is None else norm.block,
    )


def backward_after(
    stage: StageShape, quantize: bool, carried: bool = False, carry: bool = True
) -> NormBackward | NormForward | None:
    """The kernel from the gradient of a stage's result to that of its product; None if they are the same.

    `carried`: the result has a gradient from a residual too. `carry`: the sum of both is to be written.
    """
    spec = _backward_after(stage, quantize, carried, carry)
    if not isinstance(spec, NormBackward):
        return spec
    return replace(spec, dropout=stage.dropout, multiplied=stage.multiplier is not None)


def _backward_after(stage: StageShape, quantize: bool, carried: bool, carry: bool) -> NormBackward | NormForward | None:
    if stage.summed or carried:
        return _backward_of_sum(stage, quantize, carried, carry)
    norm = stage.after
    if norm is not None and norm.over_columns:
        return NormBackward(stage.n, norm.kind, True, norm.bias, _NO_EPS, stage.activation, True, quantize)
    if norm is not None:
        affine = (norm.weight, norm.bias)
        return NormBackward(
            stage.n, norm.kind, *affine, norm.eps, stage.activation, stage.bias, quantize, block=norm.block
        )
    if stage.activation is not None or (quantize and stage.bias):
        return NormBackward(stage.n, None, False, False, _NO_EPS, stage.activation, stage.bias, quantize)
    return quantizer(stage.n) if quantize else None


def norm_sums(stage: StageShape) -> NormBackward | None:
    """The kernel that sums what the gradient of a BatchNorm needs over the rows; None for another norm."""
    norm = stage.after
    if norm is None or not norm.over_columns:
        return None
    what = (stage.n, norm.kind, True, norm.bias, _NO_EPS, stage.activation, True)
    return NormBackward(*what, sums_only=True, dropout=stage.dropout)


def _backward_of_sum(stage: StageShape, quantize: bool, carried: bool, carry: bool) -> NormBackward | NormForward:
    """`backward_after` of a stage with a product or a residual."""
    if not (stage.bent or stage.bias or stage.times is not None or carried):
        return quantizer(stage.n)
    norm = stage.after
    return NormBackward(
        stage.n,
        None if norm is None else norm.kind,
        norm is not None and norm.weight,
        norm is not None and norm.bias,
        _NO_EPS if norm is None else norm.eps,
        stage.activation,
        stage.bias,
        quantize,
        times=stage.times is not None,
        summed=stage.bent and stage.summed,
        residual_grad_in=carried,
        residual_grad_out=carry and stage.summed and (stage.bent or carried),
        block=BLOCK if norm is None else norm.block,
    )

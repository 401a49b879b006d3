"""What a chain is without the names of its module: operations, sizes, recipes, and the kernels that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.recipes import SiteRecipe
from loka.errors import LokaError
from loka.kernels.rendered_specs import (
    ACTIVATIONS,
    BLOCK,
    LARGEST_COUNT,
    LARGEST_WIDTH,
    NORMS,
    NormBackward,
    NormForward,
)
from loka.plan.plan import SitePlan
from loka.sites.chains import Chain, Known
from loka.sites.norms import ChainNorm

KNOWN = Known(frozenset(NORMS), frozenset(ACTIVATIONS))
_NO_EPS = 1e-05  # in the specs of kernels without a norm, so that equal kernels have equal specs
_LONGEST = 48  # characters of a name, without its sizes


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm over the last dimension, or over blocks of it."""

    kind: str
    weight: bool
    bias: bool
    eps: float
    block: int = BLOCK  # of a block_norm


@dataclass(frozen=True, slots=True)
class StageShape:
    """[norm] linear [norm] [activation] for x (M, k) and a weight (n, k); `before` in the first stage alone."""

    k: int
    n: int
    bias: bool
    recipe: SiteRecipe
    before: NormShape | None = None
    after: NormShape | None = None
    activation: str | None = None

    @property
    def followed(self) -> bool:
        """Whether a kernel works on the product, and takes the linear's bias along."""
        return self.after is not None or self.activation is not None


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Everything that a chain's text depends on: chains of one shape share their function."""

    stages: tuple[StageShape, ...]

    @property
    def fp8(self) -> bool:
        """Whether the GEMMs run in FP8, all of them, or in the model's dtype, all of them."""
        return self.stages[0].recipe.fp8

    @property
    def worthwhile(self) -> bool:
        """Whether there is a kernel for anything in it: in the model's dtype a linear alone is best left to torch."""
        return self.fp8 or any(stage.before is not None or stage.followed for stage in self.stages)

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations in order: ("layer_norm", "linear", "layer_norm", "silu")."""
        found: list[str] = []
        for stage in self.stages:
            found += [stage.before.kind] if stage.before is not None else []
            found.append("linear")
            found += [stage.after.kind] if stage.after is not None else []
            found += [stage.activation] if stage.activation is not None else []
        return tuple(found)

    @property
    def name(self) -> str:
        """layer_norm_linear_silu_e4m3_512x2048; a long one says where it begins and ends."""
        name = "_".join(self.ops)
        if len(name) > _LONGEST:
            name = f"{self.ops[0]}_to_{self.ops[-1]}_{len(self.stages)}_linears"
        sizes = "x".join(str(size) for size in (self.stages[0].k, *(stage.n for stage in self.stages)))
        return f"{name}{'_e4m3' if self.fp8 else ''}_{sizes}"


def chain_shape(
    chain: Chain, plans: Sequence[SitePlan], biases: Sequence[bool], recipes: Sequence[SiteRecipe]
) -> ChainShape:
    """The shape of a found chain; `plans`, `biases` and `recipes` are those of its stages.

    Raises LokaError where a norm is not as wide as the linear beside it.
    """
    stages = []
    for stage, plan, bias, recipe in zip(chain.stages, plans, biases, recipes, strict=True):
        for norm, width in ((stage.before, plan.site.k), (stage.after, plan.site.n)):
            if norm is not None and (width % norm.width if norm.kind == "block_norm" else norm.width != width):
                raise LokaError(
                    f"{stage.site}: a norm over {norm.width} elements stands beside a linear of {width}. This is a "
                    "fault in LoKA: please report it."
                )
        before, after = _norm_shape(stage.before), _norm_shape(stage.after)
        stages.append(StageShape(plan.site.k, plan.site.n, bias, recipe, before, after, stage.activation))
    return ChainShape(tuple(stages))


def _norm_shape(norm: ChainNorm | None) -> NormShape | None:
    if norm is None:
        return None
    block = norm.width if norm.kind == "block_norm" else BLOCK
    return NormShape(norm.kind, norm.weight is not None, norm.bias is not None, norm.eps, block)


def fits(plan: SitePlan) -> bool:
    """Whether the kernels are wide enough for a site's input and output."""
    return max(plan.site.k, plan.site.n) <= LARGEST_WIDTH


def quantiser(width: int) -> NormForward:
    """The kernel that makes e4m3 rows of a matrix."""
    return NormForward(width, None, False, False, _NO_EPS, None, add=False, quantise=True, save=False)


def forward_before(stage: StageShape, quantise: bool, save: bool) -> NormForward:
    """The kernel that makes a first linear's input from x."""
    norm = stage.before
    if norm is None:
        return quantiser(stage.k)
    affine = (norm.weight, norm.bias)
    return NormForward(stage.k, norm.kind, *affine, norm.eps, None, False, quantise, save, norm.block)


def forward_after(stage: StageShape, quantise: bool, save: bool) -> NormForward:
    """The kernel that makes a stage's result, or the next linear's input, from the product."""
    norm = stage.after
    if norm is None:
        return NormForward(stage.n, None, False, False, _NO_EPS, stage.activation, stage.bias, quantise, False)
    affine = (norm.weight, norm.bias)
    return NormForward(stage.n, norm.kind, *affine, norm.eps, stage.activation, stage.bias, quantise, save, norm.block)


def backward_before(stage: StageShape) -> NormBackward:
    """The kernel that makes x's gradient from that of a first linear's input."""
    norm = stage.before
    if norm is None:
        raise LokaError("no norm stands before the linear. This is a fault in LoKA: please report it.")
    affine = (norm.weight, norm.bias)
    return NormBackward(stage.k, norm.kind, *affine, norm.eps, None, add=False, quantise=False, block=norm.block)


def backward_after(stage: StageShape, quantise: bool) -> NormBackward | NormForward | None:
    """The kernel that makes the product's gradient from that of the stage's result; None where they are the same."""
    norm = stage.after
    if norm is not None:
        affine = (norm.weight, norm.bias)
        return NormBackward(stage.n, norm.kind, *affine, norm.eps, stage.activation, stage.bias, quantise, norm.block)
    if stage.activation is not None or (quantise and stage.bias):
        return NormBackward(stage.n, None, False, False, _NO_EPS, stage.activation, stage.bias, quantise)
    return quantiser(stage.n) if quantise else None


def reductions(count: int) -> tuple[int, ...]:
    """In how many operands each launch of `Reduce` takes so many partial sums: as few launches as there can be."""
    most = LARGEST_COUNT["reduce"]
    launches = -(-count // most)
    return tuple(count // launches + (index < count % launches) for index in range(launches))

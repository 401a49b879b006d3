"""Stages of a chain as plain values: what generated code gives to the one function that runs every chain.

A chain is a run of linears with the norms and activations around them. `loka.dispatch.chain` loops over its stages and
knows the tensors of each by name:

| names | tensors |
|---|---|
| weight, bias, norm_weight, norm_bias | arguments; the head's norm stands before the first linear |
| x_fp8, x_scale, x_scale_max, x_fp8_t | the linear's input in FP8, and its transposed copy |
| x_plain | the same in the model's dtype, for a GEMM in that dtype |
| weight_fp8, weight_scale, weight_scale_max, weight_fp8_t | its weight |
| y, sum, out | its product, the sum before a norm, the result of the chain |
| mean, rstd | statistics of the norm |
| running_mean, running_var | those of a BatchNorm's module |
| norm_shift, norm_scale, norm_rstd | what a BatchNorm is to its kernels (`loka.dispatch.batch_norm`) |
| norm_mean_dn, norm_mean_dn_n | what its gradient subtracts |
| mask | what a dropout keeps of the stage's result; None in evaluation |
| grad, dsum, dy | gradients of the stage's result, of its sum, of its product |
| dy_fp8, dy_scale, dy_scale_max, dy_fp8_t | the last of them in FP8 |
| times, residual, residual_grad | matrices that it multiplies by and adds; the gradient of its result as a residual |
| multiplier, dmultiplier | what its norm or activation is multiplied by, and the gradient of that |
| NAME_sums | the gradient of a vector as partial sums |
| x_overflow_stats, dy_overflow_stats | statistics of an operand with a static scale |
| next_scale, next_overflow_stats | those of the next linear's input |

Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

_OF_BATCH_NORM = ("norm_shift", "norm_scale", "norm_rstd")
_READ_AGAIN = ("x", "y", "sum", "out", "mean", "rstd", "bias", "norm_weight", "norm_bias", "mask", *_OF_BATCH_NORM)
_OF_INPUT = ("x_fp8", "x_fp8_t", "x_scale", "x_scale_max", "x_plain")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of `fused`: its function, and the names of its arguments and results.

    In a forward, names of a linear's input are those of the stage that follows; such results come first.
    """

    function: str
    arguments: str  # names with spaces between
    results: str
    reads: tuple[str, ...] = field(init=False, repr=False)
    writes: tuple[str, ...] = field(init=False, repr=False)  # without those of the next linear's input
    writes_next: tuple[str, ...] = field(init=False, repr=False)  # these come first

    def __post_init__(self) -> None:
        results = self.results.split()
        object.__setattr__(self, "reads", tuple(self.arguments.split()))
        object.__setattr__(self, "writes", tuple([name for name in results if name not in _OF_INPUT]))
        object.__setattr__(self, "writes_next", tuple([name for name in results if name in _OF_INPUT]))


@dataclass(frozen=True, slots=True)
class ScaledGemm:
    """An FP8 GEMM: its operator, the scalings of both operands, and how it accumulates."""

    operator: str  # a function of `loka.dispatch`, or another library's operator, fbgemm::f8f8bf16_rowwise
    scalings: tuple[str, str]
    fast: bool = False
    first_scale: tuple[bool, bool] = (False, False)  # for each operand: its first scale applies to all
    m_buckets: str = ""  # table of kernels by rows of the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGemms:
    """The three GEMMs of a linear; None runs in the model's dtype."""

    fprop: ScaledGemm | None = None
    dgrad: ScaledGemm | None = None
    wgrad: ScaledGemm | None = None
    saved: str = "x_plain"  # names of the operands that forward leaves to them
    static: bool = False  # scales of inputs and output gradients are given; transposed copies keep them
    keeps_wgrad: bool = field(init=False, repr=False)  # only wgrad runs in the model's dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeps_wgrad", self.fprop is not None and self.wgrad is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A linear and what follows: [* times] [+ residual] [norm] [activation] [* multiplier] [dropout].

    The head has no linear: [norm] [activation] [* multiplier] of x, before the first one.
    """

    parameters: str = ""  # names of its tensors, in the order in which they are given; of a linear the weight is first
    gemms: StageGemms = StageGemms()
    weight: tuple[Launch, ...] = ()  # make the FP8 weight, unless a launch of the chain does
    forward: Launch | None = None  # from the product to the next linear's input or the result
    inference: Launch | None = None  # the same without a backward, if it is another
    backward: Launch | None = None  # from the gradient of the result to that of the product
    dropout: float = 0.0  # probability p of the one that ends it
    norm_sums: Launch | None = None  # before it, what the gradient of a BatchNorm sums over the rows
    bias_in_gemm: bool = False
    unpadded_k: int = 0  # columns of x and weight, if kernels add zeros behind them
    times: str | None = None  # argument that the product is multiplied by
    residual: str | int | None = None  # argument, or number of the stage whose result is added
    multiplier: str | None = None  # argument that its norm or activation is multiplied by
    names: tuple[str, ...] = field(init=False, repr=False)  # of `parameters`
    frozen_names: tuple[str, ...] = field(init=False, repr=False)  # the same with frozen weights
    saved_names: tuple[str, ...] = field(init=False, repr=False)  # of what forward leaves to backward
    sums: tuple[tuple[str, str], ...] = field(init=False, repr=False)  # (vector, its partial sums) that backward makes
    kept_names: tuple[str, ...] = field(init=False, repr=False)  # of what the gradients of arguments are made of

    def __post_init__(self) -> None:
        names = tuple(self.parameters.split())
        read = self.backward.reads if self.backward is not None else ()
        read += ("y",) if self.times is not None else ()  # for the gradient of `times`
        read += (*self.norm_sums.reads, *_OF_BATCH_NORM) if self.norm_sums is not None else ()
        saved = tuple([name for name in _READ_AGAIN if name in read or name in names])
        if "weight" in names:
            saved = ("weight", *self.gemms.saved.split(), *saved)
        frozen = names if self.gemms.fprop is None else ("weight_fp8", "weight_scale", *names[1:])
        summed = ("dsum", "y", "bias") if self.times is not None else () if self.residual is None else ("dsum",)
        kept = (*summed, *["dmultiplier"] * (self.multiplier is not None))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "frozen_names", frozen)
        object.__setattr__(self, "saved_names", saved)
        object.__setattr__(self, "kept_names", kept)
        made = self.backward.writes if self.backward is not None else ()
        sums = [(name, f"{name}_sums") for name in names if f"{name}_sums" in made]
        object.__setattr__(self, "sums", tuple(sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages one after the other, behind a head, which has the norm and activation before the first linear, if any."""

    k: int  # width of x
    n: int  # of the result
    stages: tuple[Stage, ...]
    head: Stage = Stage()
    others: tuple[str, ...] = ()  # arguments other than x that stages multiply by or add
    weights: tuple[tuple[int, ...], ...] = ()  # numbers of the stages whose weights one launch quantizes
    products: tuple[tuple[str, str], ...] = ()  # (argument, kernel that adds up its gradient)
    # Names of tensors, those of the head and of each stage: the arguments, those with frozen weights, what is saved.
    names: tuple[tuple[str, ...], ...] = field(init=False, repr=False)
    frozen_names: tuple[tuple[str, ...], ...] = field(init=False, repr=False)
    saved_names: tuple[tuple[str, ...], ...] = field(init=False, repr=False)
    arguments: int = field(init=False, repr=False)  # how many `names` there are
    dx_is_plain: bool = field(init=False, repr=False)  # x's gradient is that of the first linear's input
    summed: tuple[str, ...] = field(init=False, repr=False)  # all arguments that stages multiply by or add
    readers: tuple[int | None, ...] = field(init=False, repr=False)  # of each stage's result, as a residual

    def __post_init__(self) -> None:
        head = ("x", *self.others, *self.head.names)
        object.__setattr__(self, "names", (head, *[stage.names for stage in self.stages]))
        object.__setattr__(self, "frozen_names", (head, *[stage.frozen_names for stage in self.stages]))
        factors = [name for stage in (self.head, *self.stages) for name in (stage.times, stage.multiplier)]
        again = [name for name in factors if name is not None]
        of_head = tuple(dict.fromkeys([*self.head.saved_names, *again]))
        object.__setattr__(self, "saved_names", (of_head, *[stage.saved_names for stage in self.stages]))
        object.__setattr__(self, "arguments", sum(map(len, self.names)))
        matrices = [name for stage in self.stages for name in (stage.times, stage.residual, stage.multiplier)]
        by_residual = {stage.residual: number for number, stage in enumerate(self.stages)}
        object.__setattr__(self, "dx_is_plain", self.head.backward is None and "x" not in dict(self.products))
        object.__setattr__(self, "summed", tuple(dict.fromkeys([name for name in matrices if isinstance(name, str)])))
        object.__setattr__(self, "readers", tuple([by_residual.get(number) for number in range(len(self.stages))]))


def with_gathered(chain: Chain, gathered: tuple[bool, ...]) -> Chain:
    """A chain that takes the FP8 values and scales of some stages' weights as arguments, behind the weight."""
    stages = tuple(
        [
            replace(stage, parameters=" ".join(["weight weight_fp8 weight_scale", *stage.names[1:]]), weight=())
            if is_gathered
            else stage
            for stage, is_gathered in zip(chain.stages, gathered, strict=True)
        ]
    )
    left = [tuple([number for number in group if not gathered[number]]) for group in chain.weights]
    return replace(chain, stages=stages, weights=tuple([group for group in left if group]))


def constant(chain: Chain) -> Callable[..., Chain]:
    """A function that returns a chain, whose result is a constant to torch.compile: it guards on none of its fields.

    Of its argument, see `with_gathered`; () is the chain itself. The mark is that of
    torch.compiler.assume_constant_result, which would import Dynamo.
    """
    made: dict[tuple[bool, ...], Chain] = {(): chain}

    def get(gathered: tuple[bool, ...] = ()) -> Chain:
        if gathered not in made:
            made[gathered] = with_gathered(chain, gathered)
        return made[gathered]

    get._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return get

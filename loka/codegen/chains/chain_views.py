"""Views of a chain for the templates in templates/chain/, which have the code itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum

from loka.codegen.modules.gemm_calls import GemmView
from loka.kernels.fused.matrix_kernels import RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.quantization import ROWWISE
from loka.kernels.fused.rendering import AnySpec

OPERAND = "operand"  # key of results that are one `Quantized`: the first three of a kernel that quantizes rowwise


class StageKind(StrEnum):
    """Precision of a stage's GEMMs; the template of its backward has this name."""

    FP8 = "fp8"  # e4m3, rowwise scales; wgrad reads transposed copies with one scale each
    KEPT_WGRAD = "kept_wgrad"  # the same with wgrad in the model's dtype
    STATIC = "static"  # static scales
    STATIC_KEPT_WGRAD = "static_kept_wgrad"
    NATIVE = "native"  # the model's dtype


class InputGradient(StrEnum):
    """Place where the gradient of a stage's input is computed."""

    ALWAYS = "always"  # the stage before, or a norm with parameters, needs it
    NORM = "norm"  # if x needs a gradient: input of the norm's backward before the first linear
    PLAIN = "plain"  # if x needs a gradient: it is that gradient
    LAST = "last"  # after all stages, where it is added to x's other gradients


@dataclass(frozen=True, slots=True)
class Launch:
    """`results = fused.function(arguments)`."""

    spec: AnySpec
    arguments: tuple[str, ...]
    results: tuple[str, ...]  # without those that `operands` stand for
    operands: tuple[str, ...] = ()  # names of `Quantized`, each of the next three results

    @property
    def function(self) -> str:
        """The kernel's name in `fused`."""
        return self.spec.function


def launch(spec: AnySpec, arguments: Mapping[str, str], results: Mapping[str, str]) -> Launch:
    """A launch, from arguments and results by the kernel's own names; OPERAND names values, scale and scale_max."""
    parameters = list(spec.parameters)
    if isinstance(spec, NormForward) and spec.takes_dtype:
        parameters.append("dtype")
    given = tuple(arguments[name] for name in parameters)
    if OPERAND not in results or spec.results[:3] != ROWWISE.results:
        return Launch(spec, given, tuple(results[name] for name in spec.results))
    rest = tuple(results[name] for name in spec.results if name not in ROWWISE.results)
    return Launch(spec, given, rest, (results[OPERAND],))


@dataclass(frozen=True, slots=True)
class ForwardStage:
    """A linear and the kernel after it."""

    suffix: str  # of its names: "_1"; "" if there is only one stage
    cast_weight: tuple[Launch, ...]  # launches that make the FP8 weight; () if frozen, native or among `cast_weights`
    fprop: GemmView | None  # None: torch's linear
    x: str  # its input in the model's dtype, for torch's linear
    operand: tuple[str, str]  # its input in FP8, and the scales
    weight: tuple[str, str]  # in FP8, and its scales
    bias: str | None  # added by the GEMM itself
    epilogue: Launch | None
    freed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackwardStage:
    """Backward of a stage: from the gradient of its result to those of weight and input."""

    kind: StageKind
    number: int
    suffix: str
    counter_id: str  # of fprop; dgrad and wgrad have the next two
    weight_position: int  # among forward's arguments
    gradient: Launch | None  # makes "dy", the gradient of the product; None if it is that of the result
    grad_stays: str | None  # new name of the gradient of the result; None if it is freed
    beside: str | None  # the matrix to add to it for the gradient of `sum`
    sum: str
    x: str  # the linear's input in the model's dtype, for a native wgrad
    bias: str | None  # bias whose gradient is the sum of the rows of dy
    dgrad: GemmView | None
    wgrad: GemmView | None
    dy: tuple[str, str]  # dgrad's operands, each with its scales
    weight_transposed: tuple[str, str]
    dx: InputGradient
    guarded: bool  # the gradient of this stage's input is computed only if x needs one
    unpadded_k: int  # columns of x and weight before padding; 0 without padding
    transpose_all: RequantizeTranspose | None  # for wgrad and dgrad
    transpose_wgrad: RequantizeTranspose | Launch | None  # for wgrad alone
    transpose_weight: RequantizeTranspose | None  # for dgrad alone
    freed_after_wgrad: tuple[str, ...]
    freed: tuple[str, ...]
    reduce: Launch | None  # reduces partial sums once they fill a launch


@dataclass(frozen=True, slots=True)
class NormGradient:
    """From the gradient of the first linear's input to that of x, through the norm between them."""

    residual_grad: Launch | None  # adds x's other gradients if there are several
    gradient: Launch


@dataclass(frozen=True, slots=True)
class OtherGradient:
    """The gradient of an argument that stages multiply by or add: a sum, or the term of a single stage."""

    name: str
    position: int  # among forward's arguments
    sum: Launch | None
    share: str


@dataclass(frozen=True, slots=True)
class TorchStep:
    """`result = function(arguments)` in torch; exactly one of `function`, `method` and `operator` is set."""

    result: str
    arguments: tuple[object, ...]  # names, and values written as literals
    function: str = ""  # of torch.nn.functional
    method: str = ""  # of the first argument
    operator: str = ""  # between the arguments


@dataclass(frozen=True, slots=True)
class FrozenChainView:
    """View of the function for frozen weights, for templates/chain/frozen.py.j2."""

    name: str
    layers: str  # the model's layers that call it
    steps: tuple[str, ...]  # layer_norm, linear, silu
    sizes: str  # "x (..., 512), weight (2048, 512)"
    k: int  # width of x
    width: int  # of the result
    parameters: dict[str, str]  # name -> type
    counter_ids: tuple[str, ...]
    others: dict[str, int]  # arguments that stages multiply by or add -> widths
    x: str  # name of its input in the body
    input: Launch | None  # makes the first linear's input; None if that is x in the model's dtype
    sums_dtype: tuple[str, ...] | None  # arguments whose dtypes decide that of sums; None without sums
    cast_weights: tuple[Launch, ...]  # launches that each make the FP8 weights of several stages
    forward: tuple[ForwardStage, ...]
    result: str


@dataclass(frozen=True, slots=True)
class ChainView(FrozenChainView):
    """View of the autograd function and its wrapper, for templates/chain/training.py.j2."""

    function: str  # the class
    recipe: str  # recipe of the GEMMs, for the docstring
    forward_parameters: dict[str, str]  # of the autograd function's forward: name -> type
    applied: tuple[tuple[str, ...], ...]  # the wrapper's arguments for them: first, of each stage, and last
    saved: tuple[tuple[str, ...], ...]  # for the norm before the first linear, and for each stage
    saves_operands: bool  # some of them are `Quantized`
    copied_weights: tuple[str, ...]  # of which FP8 copies are saved in their place
    dtypes: dict[str, str]  # not available from saved tensors: name in backward -> expression in forward
    overflow_stats: tuple[str, ...]
    optional: tuple[str, ...]  # gradients that are computed only if needed
    backward: tuple[BackwardStage, ...]  # from the last stage to the first
    norm: NormGradient | None
    reduce: tuple[Launch, ...]  # reduce the remaining partial sums at the end
    dx: Launch | None  # adds the gradients of x
    other_gradients: tuple[OtherGradient, ...]
    gradients: tuple[tuple[str, ...], ...]  # of all arguments of forward, in the groups of `applied`
    torch_steps: tuple[TorchStep, ...]  # the chain for a batch without rows


def kernels_of(view: FrozenChainView) -> tuple[AnySpec, ...]:
    """The kernels that a chain launches, each once."""
    parts = (part.spec if isinstance(part, Launch) else part for part in _parts(view))
    return tuple(dict.fromkeys(part for part in parts if not isinstance(part, GemmView)))


def scalings_of(view: FrozenChainView) -> set[str]:
    """The scalings that a chain's GEMMs read as constants of the module."""
    gemms = [part for part in _parts(view) if isinstance(part, GemmView)]
    return {gemm.scaling[0] for gemm in gemms if gemm.scalings.startswith("*")}


def has_operands(view: FrozenChainView) -> bool:
    """True if some kernel of a chain returns `Quantized`."""
    return any(isinstance(part, Launch) and part.operands for part in _parts(view))


def _parts(part: object) -> Iterator[Launch | RequantizeTranspose | GemmView]:
    match part:
        case Launch() | RequantizeTranspose() | GemmView():
            yield part
        case tuple():
            for item in part:
                yield from _parts(item)
        case _ if is_dataclass(part):
            for field in fields(part):
                yield from _parts(getattr(part, field.name))

"""What a chain consists of, as the templates in templates/chain/ read it: the code itself stands there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum

from loka.codegen.modules.gemm_calls import GemmView
from loka.kernels.fused.cast_transpose.matrix_spec import RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.rendering import AnySpec


class StageKind(StrEnum):
    """How a stage's GEMMs run; the template of its backward is called after it."""

    FP8 = "fp8"  # e4m3 with a scale a row; wgrad reads transposed copies that have one scale each
    KEPT_WGRAD = "kept_wgrad"  # the same, but for wgrad in the model's dtype
    STATIC = "static"  # static scales
    STATIC_KEPT_WGRAD = "static_kept_wgrad"
    NATIVE = "native"  # the model's dtype


class InputGradient(StrEnum):
    """Where a stage's backward computes the gradient of its input."""

    ALWAYS = "always"  # the stage before, or a norm with parameters, needs it
    NORM = "norm"  # where x needs a gradient: it goes through the norm before the first linear
    PLAIN = "plain"  # where x needs a gradient: it is that gradient
    LAST = "last"  # after all stages, where it is added to x's other gradients


@dataclass(frozen=True, slots=True)
class Launch:
    """`results = fused.function(arguments)`."""

    spec: AnySpec
    arguments: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def function(self) -> str:
        """The kernel's name in `fused`."""
        return self.spec.function


def launch(spec: AnySpec, arguments: Mapping[str, str], results: Mapping[str, str]) -> Launch:
    """A launch, with arguments and results by the names that the kernel has for them."""
    parameters = list(spec.parameters)
    if isinstance(spec, NormForward) and spec.takes_dtype:
        parameters.append("dtype")
    return Launch(spec, tuple(arguments[name] for name in parameters), tuple(results[name] for name in spec.results))


@dataclass(frozen=True, slots=True)
class ForwardStage:
    """A linear and the kernel behind it."""

    suffix: str  # of its names: "_1"; "" where there is one stage alone
    cast_weight: tuple[Launch, ...]  # what makes the FP8 weight; () where it is frozen or stays as it is
    fprop: GemmView | None  # None: torch's linear
    x: str  # its input in the model's dtype, for torch's linear
    weight: str  # in FP8
    weight_scale: str
    bias: str | None  # what the GEMM itself adds
    epilogue: Launch | None
    freed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackwardStage:
    """A linear and what stands behind it, from the gradient of the stage's result to those of weight and input."""

    kind: StageKind
    number: int
    suffix: str
    counter_id: str  # of fprop; dgrad and wgrad have the next two
    weight_position: int  # among forward's arguments
    gradient: Launch | None  # what makes the gradient of the product, "dy"; None where it is that of the result
    grad_stays: str | None  # what the gradient of the result is called from there on; None where it goes
    beside: str | None  # the matrix that it is the gradient of `sum` with
    sum: str
    x: str  # the linear's input in the model's dtype, where wgrad reads that
    bias: str | None  # whose gradient is the sum of the rows of dy
    dgrad: GemmView | None
    wgrad: GemmView | None
    dy_scale: str  # dgrad's operands
    weight_transposed: str
    weight_scale: str
    dx: InputGradient
    guarded: bool  # whether only an x that needs a gradient needs that of this stage's input
    unpadded_k: int  # columns of x and of the weight, where they were padded; else 0
    transpose_all: RequantizeTranspose | None  # for wgrad and dgrad
    transpose_wgrad: RequantizeTranspose | Launch | None  # for wgrad alone
    transpose_weight: RequantizeTranspose | None  # for dgrad alone
    freed_after_wgrad: tuple[str, ...]
    freed: tuple[str, ...]
    reduce: Launch | None  # what adds up partial sums, once they fill a launch


@dataclass(frozen=True, slots=True)
class NormGradient:
    """From the gradient of the first linear's input to that of x, through the norm between them."""

    residual_grad: Launch | None  # what adds up x's other gradients, where there are several
    gradient: Launch


@dataclass(frozen=True, slots=True)
class OtherGradient:
    """The gradient of an argument that stages multiply by or add: a sum, or the share of a single stage."""

    name: str
    position: int  # among forward's arguments
    sum: Launch | None
    share: str


@dataclass(frozen=True, slots=True)
class TorchStep:
    """`result = function(arguments)` in torch's own operations; one of `function`, `method` and `operator` is there."""

    result: str
    arguments: tuple[object, ...]  # names, and values that stand in the code
    function: str = ""  # of torch.nn.functional
    method: str = ""  # of the first argument
    operator: str = ""  # between the arguments


@dataclass(frozen=True, slots=True)
class FrozenChainView:
    """The function for weights that were quantised once, as templates/chain/frozen.py.j2 reads it."""

    name: str
    layers: str  # those of the model that it is for
    steps: tuple[str, ...]  # layer_norm, linear, silu
    sizes: str  # "x (..., 512), weight (2048, 512)"
    width: int  # of the result
    parameters: dict[str, str]  # with their types
    counter_ids: tuple[str, ...]
    others: dict[str, int]  # those of the tensors that stages multiply by or add, with their widths
    x: str  # what its input is called in the body
    input: Launch | None  # what makes the first linear's input; None where that is x in the model's dtype
    sums_dtype: tuple[str, ...] | None  # the arguments whose dtypes sums have; None without sums
    forward: tuple[ForwardStage, ...]
    result: str


@dataclass(frozen=True, slots=True)
class ChainView(FrozenChainView):
    """The autograd function and its wrapper, as templates/chain/training.py.j2 reads it."""

    function: str  # the class
    recipe: str  # what the GEMMs run in
    forward_parameters: dict[str, str]  # of the autograd function's forward, with their types
    applied: tuple[str, ...]  # what the wrapper passes for them
    saved: tuple[str, ...]
    dtypes: dict[str, str]  # what backward cannot read off what is saved: its name there, and where forward finds it
    overflow_stats: tuple[str, ...]
    optional: tuple[str, ...]  # the gradients that are computed only where they are needed
    backward: tuple[BackwardStage, ...]  # from the last to the first
    norm: NormGradient | None
    reduce: tuple[Launch, ...]  # what adds up the partial sums that are left in the end
    dx: Launch | None  # what adds up the gradients of x
    other_gradients: tuple[OtherGradient, ...]
    gradients: tuple[str, ...]  # of all arguments of forward
    torch_steps: tuple[TorchStep, ...]  # the chain for a batch without rows


def kernels_of(view: FrozenChainView) -> tuple[AnySpec, ...]:
    """The kernels that a chain launches, each once."""
    return tuple(dict.fromkeys(_specs(view)))


def _specs(part: object) -> Iterator[AnySpec]:
    match part:
        case Launch():
            yield part.spec
        case RequantizeTranspose():
            yield part
        case tuple():
            for item in part:
                yield from _specs(item)
        case _ if is_dataclass(part):
            for field in fields(part):
                yield from _specs(getattr(part, field.name))

"""Parts other than GEMMs and interactions: their rendered kernels, arguments, one call for all launches, and a check.

| work | `around` | `recipe` | kernels |
|---|---|---|---|
| quantize | | `e4m3 rowwise`, `e4m3 blockwise_1x128`, the same with e5m2 | one |
| quantize | | `e4m3 tensorwise` | one that finds the maximum, one that writes |
| requantize_transpose | | `e4m3 tensorwise` | a third of one for three such matrices, as in generated packages |
| forward | norm, activation | a dtype, or as for quantize | one, with the statistics that the backward needs |
| backward | norm, activation | a dtype, or as for quantize except tensorwise | one, and one that adds partial sums |
| copy | | the dtype of `part.dtype`: transposed, contiguous; another dtype: converted | torch's |

The sums are the gradients of the norm's weight and bias, if it usually has them (`norms.NORMS`): a layer_norm has both,
an rms_norm a weight, a block_norm of 256 neither.

A kernel is compared with its reference on evenly spaced rows of up to 16 million elements; sums over rows are compared
only if that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from loka.bench.record.check_numbers import LEAST_SUM_DB, Check, check_of, check_values, results_of, spaced
from loka.bench.record.gemm_parts import DTYPES, PreparedCall
from loka.bench.timing import SEED
from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose, of_the_batch
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from loka.kernels.fused.norm.norms import NORMS, traits_of
from loka.kernels.fused.quantization import ROWWISE, Quantization
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import FORMATS, Quantized, quantize, requantize_transpose

EPS = 1e-5
REQUANTIZED = "e4m3 tensorwise"
TRANSPOSED_PER_LAUNCH = 3  # matrices: in a generated package the output gradient, the input and the weight of a linear
FLOATS = ("bfloat16", "float16", "float32")
_MODES = {Scaling.ROWWISE: "rowwise", Scaling.TENSORWISE: "tensorwise", Scaling.BLOCKWISE_1X128: "blockwise"}


@dataclass(frozen=True, slots=True)
class Around:
    """The norm and the activation of a part, each optional."""

    norm: str | None
    activation: str | None

    @property
    def weight(self) -> bool:
        """True if the norm usually has a weight."""
        return "weight" in traits_of(self.norm).parameters

    @property
    def bias(self) -> bool:
        """True if the norm usually has a bias."""
        return "bias" in traits_of(self.norm).parameters


def parse_around(text: str) -> Around:
    """Parse `around`: "layer_norm silu", "silu", "rms_norm", "". Raises InputError for anything else."""
    words = text.split()
    norms = [word for word in words if word in NORMS and not NORMS[word].over_columns]
    activations = [word for word in words if word in ACTIVATIONS]
    if len(norms) + len(activations) < len(words) or len(norms) > 1 or len(activations) > 1:
        known = f"one of {', '.join(NORMS)} and one of {', '.join(ACTIVATIONS)}"
        raise InputError(f"no kernel computes {text!r}; what stands around a GEMM is at most {known}")
    return Around(norms[0] if norms else None, activations[0] if activations else None)


def parse_written(recipe: str) -> Quantization | None:
    """Parse what a producer writes: a Quantization with power-of-two scales, or None for a plain dtype.

    Raises InputError for a recipe that no kernel has.
    """
    if recipe in FLOATS:
        return None
    words = recipe.split(" ")
    if len(words) == 2 and words[0] in tuple(Format) and words[1] in tuple(_MODES):
        return Quantization(_MODES[Scaling(words[1])], Format(words[0]))
    scalings = ", ".join(scaling.value for scaling in _MODES)
    raise InputError(f"no kernel writes {recipe!r}; it can be {', '.join(FLOATS)}, or e4m3 or e5m2 and {scalings}")


def specs_of(part: Part) -> tuple[Spec, ...]:
    """The specs of a part's rendered kernels in the order of their launches; none for a copy.

    Raises InputError if no kernel is rendered for it, and for a GEMM.
    """
    match part.work:
        case PartKind.REQUANTIZE_TRANSPOSE:
            if part.recipe != REQUANTIZED:
                raise InputError(
                    f"no kernel requantizes and transposes a matrix to {part.recipe!r}; it can be {REQUANTIZED!r}"
                )
            return (RequantizeTranspose(TRANSPOSED_PER_LAUNCH),)
        case PartKind.COPY:
            return ()
        case PartKind.QUANTIZE:
            how = parse_written(part.recipe)
            if how is None:
                raise InputError(f"{part.recipe} is not quantized; what is only copied is a copy")
            return _forward(part.columns, Around(None, None), how, save=False)
        case PartKind.FORWARD:
            return _forward(part.columns, parse_around(part.around), parse_written(part.recipe), save=True)
        case PartKind.BACKWARD:
            return _backward(part)
    raise InputError("a GEMM is no rendered kernel of a region; its parts are prepared elsewhere")


def _forward(width: int, around: Around, how: Quantization | None, save: bool) -> tuple[Spec, ...]:
    first = () if how is None or how.scaling != "tensorwise" else (_one(width, around, Quantization("maximum"), False),)
    return (*first, _one(width, around, how, save))


def _one(width: int, around: Around, how: Quantization | None, save: bool) -> NormForward:
    return NormForward(
        width=width, norm=around.norm, weight=around.weight, bias=around.bias, eps=EPS, activation=around.activation,
        add=False, quantize=how is not None, save=save, how=how or ROWWISE,
    )  # fmt: skip


def _backward(part: Part) -> tuple[Spec, ...]:
    around, how = parse_around(part.around), parse_written(part.recipe)
    if how is not None and how.scaling == "tensorwise":
        raise InputError("a backward kernel under one scale that is found is not measured; rowwise is")
    spec = NormBackward(
        width=part.columns, norm=around.norm, weight=around.weight, bias=around.bias, eps=EPS,
        activation=around.activation, add=False, quantize=how is not None, how=how or ROWWISE,
    )  # fmt: skip
    sums = around.weight + around.bias
    return (spec, Reduce(sums)) if sums else (spec,)


SAMPLED = 2**24  # most elements of a matrix that are compared with the reference
FORMAT_OF = {info.dtype: format for format, info in FORMATS.items()}
BY_ROWS = frozenset({"x", "grad", "mean", "rstd"})  # parameters with a row or an element for each row of x


@dataclass(frozen=True, slots=True)
class Producers:
    """Prepares parts other than GEMMs. `module` has the rendered kernels that `specs_of` describes."""

    module: ModuleType
    device: str = "cuda"

    def prepare(self, part: Part) -> PreparedCall:
        """Prepare a part's call. Raises InputError if no kernel is rendered for it."""
        torch.manual_seed(SEED)
        if part.dtype not in DTYPES:
            raise InputError(f"no kernel takes {part.dtype!r}; it can be {', '.join(DTYPES)}")
        if part.work is PartKind.COPY:
            return self._copy(part)
        specs = specs_of(part)
        launch = [self._operator(spec) for spec in specs]
        if part.work is PartKind.REQUANTIZE_TRANSPOSE:
            arguments = requantize_arguments(*[(part.rows, part.columns)] * TRANSPOSED_PER_LAUNCH, device=self.device)
            check = partial(_check_transposed, arguments)
            return PreparedCall(lambda *given: launch[0](list(given)), arguments, check, TRANSPOSED_PER_LAUNCH)
        first = specs[0]
        if not isinstance(first, NormForward | NormBackward):
            raise InputError(f"{part} has no arguments to be measured with")
        arguments = norm_arguments(first, part.rows, self.device, DTYPES[part.dtype])
        second = specs[1] if len(specs) > 1 else None
        call: Callable[..., Any] = launch[0]
        if isinstance(second, Reduce):
            call = partial(with_sums, *launch, second.count, DTYPES[part.dtype])
        elif second is not None:
            call = partial(_in_two, *launch)
        if first.quantize and first.how.scaling == "maximum":
            return PreparedCall(call, arguments, partial(_check_tensorwise, arguments[0]))
        return PreparedCall(call, arguments, partial(self._check, first, arguments))

    def _operator(self, spec: Spec) -> Any:
        return getattr(self.module, spec.function)

    def _copy(self, part: Part) -> PreparedCall:
        x = torch.randn(part.rows, part.columns, device=self.device).to(DTYPES[part.dtype])
        if part.recipe not in DTYPES:
            raise InputError(f"a copy is written as {', '.join(DTYPES)}, not as {part.recipe!r}")
        same, dtype = part.recipe == part.dtype, DTYPES[part.recipe]
        expected = (x.t() if same else x).float()
        call = _transposed if same else lambda x: x.to(dtype)
        return PreparedCall(call, (x,), lambda found: Check(wrong=check_values("the copy", found.float(), expected)))

    def _check(self, spec: NormForward | NormBackward, arguments: Sequence[Any], made: Any) -> Check:
        """Compare results with the reference on sampled rows; sums only if all rows are sampled."""
        rows = arguments[0].shape[0]
        places = spaced(rows, max(SAMPLED // spec.width, 1)).to(arguments[0].device)
        named = zip(spec.parameters, arguments, strict=True)
        sampled = [value[places] if name in BY_ROWS else value for name, value in named]
        expected = self._operator(spec).reference(*sampled)
        wanted = dict(zip(spec.results, results_of(expected), strict=True))
        found = dict(zip(spec.results, results_of(made), strict=False))
        wrong = [check_values("its result", _values(found, places), _values(wanted, slice(None)))]
        if len(places) == rows:
            for name in ("dweight", "dbias"):
                if name in wanted:
                    total, right = found[name].double().sum(0), wanted[name].double().sum(0)
                    wrong.append(check_values(name, total, right, LEAST_SUM_DB))
        return check_of(wrong)


def _values(results: dict[str, Tensor], places: Tensor | slice) -> Tensor:
    """Rows `places` of the first result in float32; FP8 values are dequantized."""
    name, first = next(iter(results.items()))
    if name != "values":
        return first[places].float()
    scale, values = results["scale"][places], first[places].float()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, dim=1)[:, : values.shape[1]]
    return values * scale


def with_sums(
    backward: Callable[..., Any], reduce: Callable[..., Any], count: int, dtype: torch.dtype, *arguments: Any
) -> Any:
    """Call a backward kernel, then the kernel that reduces the last `count` of its results, which are partial sums.

    Returns the results of the backward kernel.
    """
    results = backward(*arguments)
    reduce(list(results[-count:]), dtype)
    return results


def _in_two(maximum: Callable[..., Any], write: Callable[..., Any], *arguments: Any) -> Any:
    """Call the kernel that finds the maximum, then the one that quantizes with it."""
    return write(*arguments, results_of(maximum(*arguments))[0])


def norm_arguments(
    spec: NormForward | NormBackward, rows: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Arguments of a norm's kernel: matrices (rows, width), vectors (width,) in `dtype`, float32 statistics of x."""
    matrices = {name: torch.randn(rows, spec.width, device=device, dtype=dtype) for name in ("grad", "x")}
    x = matrices["x"].float()
    statistics = {"mean": x.mean(1), "rstd": torch.rsqrt(x.var(1, unbiased=False) + EPS)}
    vectors = {name: torch.randn(spec.width, device=device, dtype=dtype) for name in ("add", "weight", "bias")}
    known = {**matrices, **statistics, **vectors}
    return tuple(known[name] for name in spec.parameters)


def requantize_arguments(*sizes: tuple[int, int], device: str = "cuda") -> tuple[Tensor, ...]:
    """Arguments of `requantize_transpose`: e4m3 values, power-of-two scales and their maximum for each operand."""
    found: list[Tensor] = []
    for rows, columns in sizes:
        values = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scale = torch.exp2(-torch.randint(0, 4, (rows, 1), device=device).float())
        found += [values, scale, scale.max().reshape(1)]
    return tuple(found)


def _check_tensorwise(x: Tensor, made: Any) -> Check:
    values, scale = made[0], made[1]
    places = spaced(x.shape[0], max(SAMPLED // x.shape[1], 1)).to(x.device)
    largest = float(x.abs().max())
    right = quantize(
        x[places], format=FORMAT_OF[values.dtype], scaling=Scaling.TENSORWISE, power_of_two=True, amax=largest
    )
    return Check(wrong=check_values("its result", values[places].float() * scale, right.values.float() * right.scale))


def _check_transposed(arguments: Sequence[Tensor], made: Sequence[Tensor]) -> Check:
    """Check each matrix; `arguments` hold values, scales and maximum of each, `made` values and scales.

    Behind the batch's rows there are zeros, to a multiple of 16, in the copies that have them as columns.
    """
    reasons = []
    for index in range(TRANSPOSED_PER_LAUNCH):
        values, scale = arguments[3 * index : 3 * index + 2]
        right = requantize_transpose(Quantized(values, scale))
        transposed, spread = made[2 * index : 2 * index + 2]
        expected = right.values.float()
        if index < of_the_batch(TRANSPOSED_PER_LAUNCH):
            expected = pad(expected, (0, -len(values) % 16))
        reasons += [
            check_values("its result", transposed.float(), expected),
            check_values("its scale", spread.float(), right.scale),
        ]
    return check_of(reasons)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()

"""Specs of the rendered kernels of parts other than GEMMs.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import ACTIVATIONS, NormBackward, NormForward, Spec
from loka.kernels.fused.norm.norms import NORMS, traits_of
from loka.kernels.fused.quantization import ROWWISE, Quantization
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Format, Scaling

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
    norms = [word for word in words if word in NORMS]
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

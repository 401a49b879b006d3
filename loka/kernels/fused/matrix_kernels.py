"""Kernels of whole matrices: transposed copies, column sums, sums of products; their specs.

They take matrices with any number of rows and columns, except `Products`, whose width is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.kernel_values import check_width, padded_width
from loka.kernels.fused.quantization import Quantization

LARGEST_COUNT = {"requantize_transpose": 3, "transpose": 3, "reduce": 6}  # operands in one launch, at most


@dataclass(frozen=True, slots=True)
class RequantizeTranspose:
    """`numerics.requantize_transpose` of e4m3 matrices, up to three in one launch.

    Parameters: values (R, C) e4m3, scale (R, 1), scale_max (P,), the largest of the scales in P parts; results:
    transposed (C, R) e4m3, scale_t (C, 1), filled with the one scale. With more than one operand the names end in _0,
    _1, _2, and the parameters of an operand are adjacent.

    One operand is a weight. Of several the first two are those of wgrad, a GEMM that sums over the batch's rows: their
    copies are (C, R rounded up to a multiple of 16), with zeros behind, as the GEMM takes them for any batch.
    """

    count: int  # operands

    def __post_init__(self) -> None:
        _check_count("requantize_transpose", self.count)

    @property
    def function(self) -> str:
        """The operator's name."""
        return "requantize_transpose"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return numbered(("values", "scale", "scale_max"), self.count)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return numbered(("transposed", "scale_t"), self.count)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transposed copies of e4m3 matrices with one scale each, up to three in one launch.

    Parameters: values (R, C) e4m3; results: transposed (C, R). With more than one operand the names end in _0, _1, _2.
    """

    count: int  # operands

    def __post_init__(self) -> None:
        _check_count("transpose", self.count)

    @property
    def function(self) -> str:
        """The operator's name."""
        return "transpose"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return numbered(("values",), self.count)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return numbered(("transposed",), self.count)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Column sums of float32 matrices in one launch, with a deterministic order of additions.

    Parameters: partial (P, N) float32 and `dtype: torch.dtype` of its sum; results: total (N,). With more than one
    operand the names end in _0, _1, ..., and the parameters of an operand are adjacent.
    """

    count: int  # operands

    def __post_init__(self) -> None:
        _check_count("reduce", self.count)

    @property
    def function(self) -> str:
        """The operator's name."""
        return "reduce"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters: a tensor and a dtype for each operand."""
        return numbered(("partial", "dtype"), self.count)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return numbered(("total",), self.count)


@dataclass(frozen=True, slots=True)
class Products:
    """plain_0 + ... + grad_0 * (x_0 + add_0) + ...: the gradient of a factor of several products and sums.

    Parameters: `plain` matrices plain_0, ... (M, width); for the i-th of `adds` grad_i, x_i (M, width) and, if it is
    True, add_i (width,); `dtype: torch.dtype` of the result, out (M, width). Sums are float32.
    """

    width: int
    plain: int  # matrices that are only added
    adds: tuple[bool, ...]  # one per product: True if a vector is added to its second factor

    def __post_init__(self) -> None:
        check_width(self.width)
        if self.plain + 2 * len(self.adds) < 2:
            raise InputError("a kernel of products without a product or a sum would copy its input")

    @property
    def function(self) -> str:
        """The operator's name: products_and_2_added_plain_64 has two sums, a product with add, and one without."""
        kinds = ["added" if add else "plain" for add in self.adds]
        return "_".join(["products", *(["and", str(self.plain)] if self.plain else []), *kinds, str(self.width)])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's tensor parameters."""
        found = [f"plain_{index}" for index in range(self.plain)]
        for index, add in enumerate(self.adds):
            found += [f"grad_{index}", f"x_{index}", *([f"add_{index}"] if add else [])]
        return tuple(found)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("out",)


@dataclass(frozen=True, slots=True)
class CastTranspose:
    """A matrix and its transpose in FP8 under one scale, in one pass: for operands that no fused kernel writes.

    The mode is `static` or `tensorwise`, as both copies need the same scale. Parameters: x (R, C) of any floating dtype
    and `scale` (1, 1), with or without `overflow_stats` (2,), or `maxima` (Q,); results: values (R, C), transposed (C,
    R), then amax (P,) and overflow (P,), nothing, or scale (1, 1), as in `Quantization`.
    """

    how: Quantization

    def __post_init__(self) -> None:
        if self.how.scaling not in ("static", "tensorwise"):
            raise InputError(
                f"a cast_transpose kernel has one scale for both copies, static or tensorwise, not {self.how.scaling}; "
                "rowwise values are transposed by RequantizeTranspose"
            )

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"cast_transpose_{self.how.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return ("x", *self.how.parameters)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("values", "transposed", *self.how.results[1:])


def of_the_batch(operands: int) -> int:
    """How many of the operands of a `RequantizeTranspose`, the first, have the batch's rows: see there."""
    return min(2, operands) if operands > 1 else 0


def numbered(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names for each operand, with its number where there are several."""
    return tuple(f"{name}{end}" for end in endings(count) for name in names)


def endings(count: int) -> list[str]:
    """Suffixes of each operand's names: _0, _1, ...; "" for a single operand."""
    return [f"_{index}" for index in range(count)] if count > 1 else [""]


def _check_count(family: str, count: int) -> None:
    if not 1 <= count <= LARGEST_COUNT[family]:
        raise InputError(f"a {family} kernel takes 1 to {LARGEST_COUNT[family]} operands, not {count}")


@dataclass(frozen=True, slots=True)
class ProductsLaunch:
    """Launch configuration: one program per block of columns of a row."""

    columns: int  # of a block, a power of two
    warps: int  # of a program


def products_launch(spec: Products, device: DeviceSpec = DEFAULT) -> ProductsLaunch:
    """The launch for a spec."""
    columns = min(padded_width(spec.width), device.launches.products_columns)
    return ProductsLaunch(columns, max(1, columns // 256))

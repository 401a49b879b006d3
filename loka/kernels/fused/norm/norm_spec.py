"""What a kernel is rendered for: the families, and everything about one of them that Triton specialises it to.

Every family works on rows: a matrix x of (M, width), M free at run time, width a constant of the kernel. Statistics and
sums are float32 whatever the dtype of x. Scales are powers of two, one a row, as `numerics.quantize` finds them with
`power_of_two=True`, unless a `Quantization` says otherwise (loka/kernels/fused/quantization.py).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD, check_width
from loka.kernels.fused.matrix_kernels import CastTranspose, Products, Reduce, RequantizeTranspose, Transpose
from loka.kernels.fused.norm.activations import GATES, name_and_constants
from loka.kernels.fused.norm.norms import NORMS, NormTraits, traits_of
from loka.kernels.fused.quantization import ROWWISE, Quantization

IN_CHUNKS = ("rowwise", "static", "maximum")  # scalings of rows that are wider than a program holds
BLOCK = 256  # elements that a block_norm normalises together, unless told


@dataclass(frozen=True, slots=True)
class _NormSpec:
    """What a norm's forward and its backward are both rendered for."""

    width: int  # of the last dimension, which the norm is over
    norm: str | None = None  # one of NORMS
    weight: bool = False  # whether the norm has a weight
    bias: bool = False  # whether the norm has a bias
    eps: float = 1e-5  # of the norm; a backward reads it only with `eps_in_backward`, for it is in rstd
    activation: str | None = None  # as ACTIVATIONS are named, or with a norm one of GATES
    add: bool = False  # whether a vector (a linear's bias) is added to x first
    quantize: bool = False  # e4m3 with a power-of-two scale a row, or a matrix of floats
    _: KW_ONLY
    multiplied: bool = False  # whether what an activation, or a norm over the row, gives is multiplied by a matrix

    @property
    def traits(self) -> NormTraits:
        """Those of its norm."""
        return traits_of(self.norm)

    @property
    def gated(self) -> bool:
        """Whether what the norm takes is multiplied by a function of what it gives."""
        return self.activation in GATES


@dataclass(frozen=True, slots=True)
class NormForward(_NormSpec):
    """[+ add] -> [* times] -> [+ residual] -> [norm] -> [activation] -> [* multiplier] -> e4m3 rows or a plain matrix.

    Parameters of the operator, in this order, those that the spec has: x (M, width), add (width,), times and residual
    (M, width), weight and bias (width,), multiplier (M, width), all of any floating dtype; and, where the result is a
    plain matrix or there is `kept`, `dtype: torch.dtype | None = None` of it (None: that of x). Results, in this order:
    values (M, width) e4m3, scale (M, 1), scale_max (P,) where `quantize`, else out (M, width); then kept (M, width),
    what the norm takes, where the spec has it; then mean (M,) and rstd (M,) where they are saved. P is the number of
    programs launched (1 on the CPU); `scale_max` is the largest scale that each of them wrote, zero where it had no
    row. In another mode, `how`, a parameter `scale` or `maxima` follows the other tensors, and its results stand for
    values, scale and scale_max. With a dropout the last tensor is mask (M, width) of uint8 or None, and where it is not
    None the result is zero where it is zero, and else divided by 1 - dropout. `aligned` columns of values, more than x
    has, are zeros behind those of x. Of a batch_norm add is the negative of the columns' means, and weight its own over
    their standard deviations.
    """

    save: bool = False  # whether the statistics of the norm are returned, for the backward; rms_norm has rstd alone
    times: bool = False  # whether x + add is multiplied by another matrix
    residual: bool = False  # whether a matrix is added to that
    keep: bool = False  # whether the sum before the norm is a result as well, as a plain matrix
    block: int = BLOCK  # of a block_norm, which saves nothing: its backward finds rstd again from x
    how: Quantization = ROWWISE  # where `quantize`: its results stand for values to scale_max
    aligned: int = 0  # columns of the values if more than x has, zeros behind; of a quantizer of rows alone
    dropout: float = 0.0  # probability with which an element of the result becomes zero, where there is a mask

    def __post_init__(self) -> None:
        _check_norm(self)
        _check_aligned(self)
        if self.how.scaling == "maximum" and self.save and self.traits.saved:
            raise InputError("a kernel that finds the maximum saves no statistics: the one that writes the values does")
        if self.how.scaling == "maximum" and self.keep:
            raise InputError("a kernel that finds the maximum keeps no sum: the one that writes the values does")
        computes = self.norm is not None or self.activation is not None or self.add or self.times or self.residual
        if not computes and not self.quantize:
            raise InputError("a forward kernel without add, norm, activation and quantization would copy its input")
        if self.keep and self.norm is None and self.activation is None and not self.quantize:
            raise InputError("a forward kernel whose result is the sum itself has no other sum to keep")
        if self.keep and not (self.add or self.times or self.residual):
            raise InputError("a forward kernel that adds nothing to its input would keep a copy of it")

    @property
    def function(self) -> str:
        """The operator's name."""
        inference = "inference" if self.traits.saved and not self.save else ""
        sums = [name for name in ("add", "times", "residual", "keep") if getattr(self, name)]
        what = _what(self) or ("" if sums else "quantize")
        width = f"{self.width}_to_{self.aligned}" if self.aligned else _width(self)
        how = self.how.name if self.quantize else ""
        parts = (*sums, what, _multiplied(self), _dropout(self), how, width, _eps(self), inference)
        name = "_".join(part for part in parts if part)
        return name if name != self.activation else f"{name}_forward"  # a device function is called after an activation

    @property
    def columns(self) -> int:
        """Of the values."""
        return self.aligned or self.width

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's tensor parameters."""
        sums = _named(add=self.add, times=self.times, residual=self.residual)
        vectors = _named(weight=self.weight, bias=self.bias)
        return ("x", *sums, *vectors, *_named(multiplier=self.multiplied), *_last(self))

    @property
    def takes_dtype(self) -> bool:
        """Whether the operator is told the dtype of a plain result."""
        return self.keep or not self.quantize

    @property
    def results(self) -> tuple[str, ...]:
        """The operator's results, in order."""
        out = self.how.results if self.quantize else ("out",)
        return out + _named(kept=self.keep) + (self.traits.saved if self.save else ())


@dataclass(frozen=True, slots=True)
class NormBackward(_NormSpec):
    """The gradient with respect to x of what a `NormForward` computes, as e4m3 rows or a plain matrix.

    Parameters, in this order, those that the spec needs: grad (M, width), the output's gradient; residual_grad_in (M,
    width), the gradient of the sum before the norm that comes from elsewhere; x (M, width), the forward's input, before
    `add`, or, with `summed`, the sum that the forward kept; add, weight, bias (width,); times (M, width); mean (M,) and
    rstd (M,) as the forward saved them; multiplier (M, width). x is not read where neither norm nor activation is
    there, nor add with `summed`, nor bias without an activation or a multiplier. Results: values (M, width) e4m3, scale
    (M, 1), scale_max (P,) where `quantize`, else dx (M, width) in the dtype of grad; then residual_grad_out (M, width),
    the whole gradient of that sum, in the dtype of residual_grad_in where there is one, else of grad; then dmultiplier
    (M, width) in that of grad, where there is a multiplier; then dweight, dbias, dadd, those that exist: partial sums
    (P, width) in float32, which `Reduce` adds up. A block_norm has no statistics: rstd is found again from x. Of `how`
    the same holds as in the forward; `maximum` gives no sums.

    With x + add = n, a batch_norm has two kernels. With `sums_only` the results are dweight and dbias, of dz * n and
    of dz, dz being the gradient of n * weight + bias. The other takes what follows from them, the means of columns
    mean_dn and mean_dn_n (width,), and gives dz * weight - mean_dn - n * mean_dn_n, and no sums.
    """

    times: bool = False  # whether x + add was multiplied by another matrix
    summed: bool = False  # whether x is what the norm took: after `times`, and after a residual
    residual_grad_in: bool = False  # whether the sum before the norm has a gradient from elsewhere too
    residual_grad_out: bool = False  # whether the gradient of that sum is a result: that of a residual
    block: int = BLOCK  # of a block_norm
    how: Quantization = ROWWISE  # where `quantize`, as in the forward; `maximum` gives no sums
    sums_only: bool = False  # of a batch_norm: the sums over rows and no gradient
    dropout: float = 0.0  # as in the forward

    def __post_init__(self) -> None:
        _check_norm(self)
        if self.sums_only and (not self.traits.over_columns or self.quantize):
            raise InputError("only of a batch_norm are there kernels for the sums alone, which quantize nothing")
        if not (self.reads_x or self.quantize or self.times or self.residual_grad_in):
            raise InputError("a backward kernel without norm, activation and quantization would copy its input")
        if self.reads_x and self.times and not self.summed:
            raise InputError("a norm or an activation of a product needs what it took: the sum that the forward kept")
        if self.summed and not self.reads_x:
            raise InputError("a backward kernel without norm and activation reads no sum")
        if self.residual_grad_out and not (self.reads_x or self.residual_grad_in):
            raise InputError(
                "a backward kernel without norm, activation and residual_grad_in would copy grad to residual_grad_out"
            )
        if self.residual_grad_out and not (self.quantize or self.times):
            raise InputError("a backward kernel whose result is the sum's gradient has no residual_grad_out")
        if self.residual_grad_out and self.how.scaling == "maximum":
            raise InputError(
                "a kernel that finds the maximum has no residual_grad_out: the one that writes the values does"
            )

    @property
    def function(self) -> str:
        """The operator's name."""
        sums = [name for name in ("add", "times", "summed") if getattr(self, name)]
        ends = ["in"] * self.residual_grad_in + ["out"] * self.residual_grad_out
        residual = ["_".join(["residual", *ends])] if ends else []
        eps = _eps(self) if self.traits.eps_in_backward else ""
        kind = "sums" if self.sums_only else self.how.name if self.quantize else ""
        what = (_what(self), _multiplied(self), _dropout(self))
        parts = (*sums, *what, "backward", *residual, kind, _width(self), eps)
        return "_".join(part for part in parts if part)

    @property
    def columns(self) -> int:
        """Of the values."""
        return self.width

    @property
    def reads_x(self) -> bool:
        """Whether the gradient depends on x."""
        return self.norm is not None or self.activation is not None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        bias = self.bias and (bool(self.activation) or self.multiplied)
        vectors = _named(x=self.reads_x, add=self.adds, weight=self.weight, bias=bias)
        carried, factors = _named(residual_grad_in=self.residual_grad_in), _named(times=self.times)
        means = _MEANS if self.traits.over_columns and not self.sums_only else ()
        multiplied = _named(multiplier=self.multiplied)
        return ("grad", *carried, *vectors, *factors, *self.traits.saved, *means, *multiplied, *_last(self))

    @property
    def adds(self) -> bool:
        """Whether add is added to x again."""
        return self.add and self.reads_x and not self.summed

    @property
    def results(self) -> tuple[str, ...]:
        """The operator's results, in order."""
        if self.sums_only:
            return ("dweight", "dbias")
        out = self.how.results if self.quantize else ("dx",)
        if self.how.scaling == "maximum":
            return out
        if self.traits.over_columns:
            return out + _named(residual_grad_out=self.residual_grad_out)
        return out + _named(
            residual_grad_out=self.residual_grad_out,
            dmultiplier=self.multiplied,
            dweight=self.weight,
            dbias=self.bias,
            dadd=self.add,
        )


_MEANS = ("mean_dn", "mean_dn_n")  # of columns, of the gradient with respect to n and of that times n

Spec = NormForward | NormBackward | RequantizeTranspose | Transpose | Reduce | Products | CastTranspose


def _named(**present: bool) -> tuple[str, ...]:
    return tuple(name for name, there in present.items() if there)


def _last(spec: NormForward | NormBackward) -> tuple[str, ...]:
    """The parameters that a quantization and a dropout need."""
    return (spec.how.parameters if spec.quantize else ()) + _named(mask=spec.dropout > 0.0)


def _multiplied(spec: NormForward | NormBackward) -> str:
    return "multiplied" if spec.multiplied else ""


def _dropout(spec: NormForward | NormBackward) -> str:
    """In names: `dropout_0_1`."""
    return f"dropout_{_identifier(repr(spec.dropout))}" if spec.dropout else ""


def _identifier(text: str) -> str:
    """In names: `leaky_relu_0_2`."""
    return "".join(c if c.isalnum() else "_" for c in text).strip("_")


def _width(spec: NormForward | NormBackward) -> str:
    """In names: nothing for rows that a program holds, as one function takes all their widths."""
    return str(spec.width) if spec.width > LARGEST_HELD else ""


def _what(spec: NormForward | NormBackward) -> str:
    """layer_norm_silu; a norm that has other parameters than it usually has is named after the difference."""
    parts = []
    if spec.norm is not None:
        parts.append(spec.norm)
        if spec.traits.over_blocks and spec.block != BLOCK:
            parts.append(f"of_{spec.block}")
        if not spec.weight and "weight" in spec.traits.parameters:
            parts.append("unweighted")
        if spec.bias != ("bias" in spec.traits.parameters):
            parts.append("biased" if spec.bias else "unbiased")
    if spec.activation is not None:
        parts.append(_identifier(spec.activation))
    return "_".join(parts)


def _eps(spec: NormForward | NormBackward) -> str:
    """Of the names of kernels that differ in eps alone: `eps_1e_06`; nothing for the usual 1e-05."""
    if spec.norm is None or spec.eps == 1e-5:
        return ""
    return f"eps_{_identifier(repr(spec.eps))}"


def _check_aligned(spec: NormForward) -> None:
    """Raises InputError where something else than a quantizer of rows is to write columns behind them."""
    if not spec.aligned:
        return
    computes = spec.norm or spec.activation or spec.add or spec.times or spec.residual or spec.keep
    if not spec.quantize or computes or spec.how.scaling != "rowwise":
        raise InputError("only a kernel that quantizes rows, and nothing else, writes columns of zeros behind them")
    if not spec.width < spec.aligned <= LARGEST_HELD:
        raise InputError(f"rows of {spec.width} elements cannot be made {spec.aligned}: more, and up to {LARGEST_HELD}")


def _check_norm(spec: NormForward | NormBackward) -> None:
    check_width(spec.width)
    if spec.norm is not None and spec.norm not in NORMS:
        raise InputError(f"no kernel has a norm {spec.norm!r}; it can be {', '.join(NORMS)} or None")
    if spec.activation is not None:
        name_and_constants(spec.activation)
    if spec.activation in GATES and spec.norm is None:
        raise InputError(f"{spec.activation} multiplies what a norm takes, and there is no norm")
    if spec.norm is None and (spec.weight or spec.bias):
        raise InputError("a kernel without a norm has neither weight nor bias; a linear's bias is `add`")
    if not spec.traits.parameters and (spec.weight or spec.bias):
        others = ", ".join(name for name, traits in NORMS.items() if traits.parameters)
        raise InputError(f"a {spec.norm} has neither weight nor bias; norms that can have them: {others}")
    if spec.traits.over_blocks:
        _check_block(spec)
    if spec.traits.over_columns:
        _check_over_columns(spec)
    if spec.dropout and (not 0.0 < spec.dropout < 1.0 or spec.width > LARGEST_HELD or spec.how.scaling == "maximum"):
        raise InputError(
            f"a kernel has a dropout above 0 and below 1, for rows of up to {LARGEST_HELD} elements, and not where it "
            f"finds the maximum alone; this is {spec.dropout} for {spec.width} elements, {spec.how.scaling}"
        )
    bends = spec.traits.over_rows if spec.norm else spec.activation is not None
    held = spec.width <= LARGEST_HELD and spec.how.scaling != "maximum"
    if spec.multiplied and not (bends and held and not spec.gated):
        raise InputError(
            f"a kernel multiplies what an activation, or a norm over rows, of up to {LARGEST_HELD} elements gives, "
            f"not a gate, and not where it finds the maximum alone; this is {_what(spec) or 'no norm'} of {spec.width}"
        )
    if not spec.quantize and spec.how != ROWWISE:
        raise InputError(f"a kernel that does not quantize has no scaling, and so not {spec.how.name!r}")
    if spec.width > LARGEST_HELD and spec.how.scaling not in IN_CHUNKS:
        raise InputError(
            f"rows of {spec.width} elements, more than {LARGEST_HELD}, are quantized {' or '.join(IN_CHUNKS)}, not "
            f"{spec.how.scaling}"
        )
    if spec.norm is not None and not 0.0 <= spec.eps < float("inf"):
        raise InputError(f"the eps of a norm must be finite, zero or above, not {spec.eps}")


def _check_over_columns(spec: NormForward | NormBackward) -> None:
    """Raises InputError for what the kernels of a norm over columns do not do."""
    if not (spec.add and spec.weight):
        raise InputError(f"a {spec.norm} has add and weight: they stand for the columns' means and deviations")
    if spec.times or spec.activation in GATES or (isinstance(spec, NormForward) and (spec.residual or spec.keep)):
        raise InputError(f"a {spec.norm} takes the product itself, not a sum or a product of it, and has no gate")
    if isinstance(spec, NormBackward) and spec.summed:
        raise InputError(f"a {spec.norm} takes the product itself: there is no sum that the forward kept")
    if spec.width > LARGEST_HELD:
        raise InputError(f"rows of {spec.width} elements are more than the {LARGEST_HELD} that a {spec.norm} takes")


def _check_block(spec: NormForward | NormBackward) -> None:
    if not 2 <= spec.block <= LARGEST_HELD or spec.block & (spec.block - 1):
        raise InputError(f"a block_norm's block must be a power of two, 2 to {LARGEST_HELD}, not {spec.block}")
    if spec.width % spec.block:
        raise InputError(
            f"a block_norm of blocks of {spec.block} needs a width that they divide, not {spec.width}; choose a block "
            "that divides it, or another norm"
        )

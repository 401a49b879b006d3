"""Specs of GEMMs in Triton: shapes fixed in the text, operands, accumulation and epilogue.

Operands are those of `loka::scaled_mm`: a of (M, K), b of (N, K), the product a @ b.T; M is free at run time, K and N
are in the text. They are e4m3 with float32 scales, rowwise or tensorwise, or bfloat16 without scales. The tensor core
sums e4m3 products with about 14 bits: `fast` leaves the whole contraction to it, `precise` adds its sums over at most
128 elements in float32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from loka.errors import InputError
from loka.kernels.fused.cast_transpose.matrix_spec import numbered
from loka.kernels.fused.norm.norm_spec import ACTIVATIONS
from loka.numerics.enums import Accumulation, Scaling

OPERANDS = ("e4m3", "bfloat16")
FLOATS = ("bfloat16", "float16", "float32")
NORMS = ("layer_norm", "rms_norm", "block_norm")
WHOLE_ROW = 512  # columns, at most, of a product with whole rows in a tile
BLOCKS = (64, 128, 256)  # block sizes of a block_norm, columns
LARGEST_GROUP = 8  # products in one launch
_LARGEST = 1 << 20  # of K and N


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not 1 <= size <= _LARGEST:
            raise InputError(f"no product has {name} = {size}; it is 1 to {_LARGEST}")


def _check_operands(operands: str) -> None:
    if operands not in OPERANDS:
        raise InputError(f"no product has operands of {operands!r}; they can be {' or '.join(OPERANDS)}")


def _check_out(out: str, allowed: tuple[str, ...]) -> None:
    if out not in allowed:
        raise InputError(f"no product is written as {out!r}; it can be {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operations on a product before it is written: [+ add] -> [norm] -> [activation] -> floats or e4m3 rows.

    A layer_norm and an rms_norm are over the row, a block_norm (also an RMSNorm) over each block of `block` columns. A
    norm over rows, and e4m3 rows, which have one power-of-two scale each, need tiles with whole rows.
    """

    add: bool = False  # add a vector (a linear's bias)
    norm: str | None = None  # one of NORMS
    weight: bool = False  # the norm has a weight
    bias: bool = False  # the norm has a bias
    eps: float = 1e-5  # of the norm
    block: int = 256  # columns of a block_norm
    activation: str | None = None  # one of norm_spec.ACTIVATIONS
    out: str = "bfloat16"  # one of FLOATS, or e4m3
    keep: bool = False  # for the backward: also return the product, in bfloat16, and the norm's statistics

    def __post_init__(self) -> None:
        if self.norm is not None and self.norm not in NORMS:
            raise InputError(f"no product has a norm {self.norm!r}; it can be {', '.join(NORMS)} or None")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            raise InputError(f"no product has an activation {self.activation!r}; it can be {allowed} or None")
        if self.norm is None and (self.weight or self.bias):
            raise InputError("a product without a norm has neither weight nor bias; a linear's bias is `add`")
        if self.norm is not None and not 0.0 <= self.eps < float("inf"):
            raise InputError(f"the eps of a norm must be finite, zero or above, not {self.eps}")
        if self.norm == "block_norm" and self.block not in BLOCKS:
            raise InputError(f"a block_norm goes over {', '.join(map(str, BLOCKS))} columns, not {self.block}")
        _check_out(self.out, (*FLOATS, "e4m3"))

    @property
    def quantize(self) -> bool:
        """True if the result is e4m3 rows with their scales."""
        return self.out == "e4m3"

    @property
    def whole_rows(self) -> bool:
        """True if a tile must hold whole rows."""
        return self.norm in ("layer_norm", "rms_norm") or self.quantize

    @property
    def is_plain(self) -> bool:
        """True if the product is only rounded to `out`."""
        return self == Epilogue(out=self.out) and not self.quantize


@dataclass(frozen=True, slots=True)
class TiledGemm:
    """epilogue(a @ b.T), a (M, K), b (N, K).

    Parameters of the operator: a, [scale_a], b, [scale_b], then those of add, weight, bias (N,) in the epilogue.
    Scales are float32, (M, 1) or (N, 1) rowwise, (1, 1) tensorwise. Results: values (M, N) e4m3, scale (M, 1),
    scale_max (P,) as in `NormForward` if the epilogue quantizes, else out (M, N); with `keep` also product (M, N) in
    bfloat16, before `add`, and the norm's statistics: mean (M,) and rstd (M,) of a layer_norm, only rstd of the others,
    (M, N / block) for a block_norm.
    """

    n: int  # columns of the product
    k: int  # length of the contraction
    operands: str = "e4m3"  # one of OPERANDS
    accumulation: Accumulation = Accumulation.PRECISE  # of e4m3; bfloat16 is always summed in float32
    scaling_a: Scaling = Scaling.ROWWISE  # of e4m3: rowwise or tensorwise
    scaling_b: Scaling = Scaling.ROWWISE
    epilogue: Epilogue = Epilogue(add=True)

    def __post_init__(self) -> None:
        _check_sizes(n=self.n, k=self.k)
        _check_operands(self.operands)
        for scaling in (self.scaling_a, self.scaling_b):
            if scaling not in (Scaling.ROWWISE, Scaling.TENSORWISE):
                raise InputError(f"a rendered product takes rowwise and tensorwise scales, not {scaling.value}")
        if self.epilogue.is_plain:
            raise InputError(
                "a product without an epilogue is not rendered, as the libraries' GEMMs are faster; run torch.scaled_mm"
            )
        if self.epilogue.whole_rows and self.n > WHOLE_ROW:
            raise InputError(
                f"a norm over rows, and e4m3 rows, need tiles of whole rows, and no tile has {self.n} columns: at most "
                f"{WHOLE_ROW}; use a kernel of its own after the product"
            )
        if self.epilogue.norm == "block_norm" and self.n % self.epilogue.block:
            raise InputError(f"blocks of {self.epilogue.block} columns do not divide a product of {self.n}")
        if self.epilogue.norm == "block_norm" and self.epilogue.quantize and self.n != self.epilogue.block:
            raise InputError("a tile holds one block of a block_norm, so e4m3 rows of several blocks cannot be written")

    @property
    def function(self) -> str:
        """The operator's name."""
        parts = ["gemm", *_operand_words(self), *_epilogue_words(self.epilogue), str(self.n), str(self.k)]
        return "_".join(parts)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        vectors = tuple(name for name in ("add", "weight", "bias") if getattr(self.epilogue, name))
        return (*_operand_parameters(self.operands), *vectors)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        out = ("values", "scale", "scale_max") if self.epilogue.quantize else ("out",)
        kept = ("product", *self.statistics) if self.epilogue.keep else ()
        return out + kept

    @property
    def statistics(self) -> tuple[str, ...]:
        """Statistics of the norm that are returned."""
        if not self.epilogue.keep or self.epilogue.norm is None:
            return ()
        return ("mean", "rstd") if self.epilogue.norm == "layer_norm" else ("rstd",)


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """Up to eight products of different shapes in one launch: out_i = a_i @ b_i.T, a_i (M_i, K_i), b_i (N_i, K_i).

    e4m3 operands have rowwise scales. Parameters: a_0, [scale_a_0], b_0, [scale_b_0], a_1, ...; results: out_0, out_1,
    ..., without a number for a single product.
    """

    shapes: tuple[tuple[int, int], ...]  # (N, K) of each product
    operands: str = "e4m3"  # one of OPERANDS
    accumulation: Accumulation = Accumulation.PRECISE
    out: str = "bfloat16"  # one of FLOATS

    def __post_init__(self) -> None:
        if not 1 <= len(self.shapes) <= LARGEST_GROUP:
            raise InputError(f"one launch takes 1 to {LARGEST_GROUP} products, not {len(self.shapes)}")
        for n, k in self.shapes:
            _check_sizes(n=n, k=k)
        _check_operands(self.operands)
        _check_out(self.out, FLOATS)

    @property
    def count(self) -> int:
        """Number of products."""
        return len(self.shapes)

    @property
    def function(self) -> str:
        """The operator's name."""
        sizes = [f"{n}x{k}" for n, k in self.shapes]
        if self.count > 2:  # short name; the digest distinguishes groups
            sizes = [str(self.count), hashlib.sha256("_".join(sizes).encode()).hexdigest()[:8]]
        return "_".join(["grouped_gemm", *_operand_words(self), *_out_words(self.out), *sizes])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return numbered(_operand_parameters(self.operands), self.count)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return numbered(("out",), self.count)


GemmSpec = TiledGemm | GroupedGemm


def _operand_parameters(operands: str) -> tuple[str, ...]:
    return ("a", "scale_a", "b", "scale_b") if operands == "e4m3" else ("a", "b")


def _operand_words(spec: GemmSpec) -> list[str]:
    """Operands in the function's name: the dtype, and deviations from precise sums of rowwise operands."""
    if spec.operands != "e4m3":
        return [spec.operands]
    words = ["e4m3"]
    if spec.accumulation is Accumulation.FAST:
        words.append("fast")
    if isinstance(spec, TiledGemm):
        for name in ("a", "b"):
            if getattr(spec, f"scaling_{name}") is Scaling.TENSORWISE:
                words.append(f"{name}_tensorwise")
    return words


def _out_words(out: str) -> list[str]:
    return [] if out == "bfloat16" else ["to", out]


def _epilogue_words(epilogue: Epilogue) -> list[str]:
    words = ["add"] if epilogue.add else []
    if epilogue.norm is not None:
        words.append(epilogue.norm)
        if epilogue.norm == "block_norm":
            words.append(str(epilogue.block))
        if not epilogue.weight:
            words.append("unweighted")
        if epilogue.bias != (epilogue.norm == "layer_norm"):
            words.append("biased" if epilogue.bias else "unbiased")
        if epilogue.eps != 1e-5:
            words.append("eps_" + "".join(c if c.isalnum() else "_" for c in repr(epilogue.eps)))
    if epilogue.activation is not None:
        words.append(epilogue.activation)
    return words + _out_words(epilogue.out) + (["kept"] if epilogue.keep else [])

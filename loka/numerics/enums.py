"""The vocabulary of the field, in one place: the three GEMMs of a linear layer, their operands, formats and scalings.

A linear layer y = x @ weight.T (x: M x K, weight: N x K) trains with three GEMMs:

| GEMM    | product              | operands             | contracts over |
|---------|----------------------|----------------------|----------------|
| `fprop` | y = x @ weight.T     | input, weight        | K              |
| `dgrad` | dx = dy @ weight     | grad_output, weight  | N              |
| `wgrad` | dw = dy.T @ x        | grad_output, input   | M              |
"""

from __future__ import annotations

from enum import StrEnum


class Autocast(StrEnum):
    """What a training loop's matrix products run in, by torch.autocast."""

    NONE = "none"  # the dtype of the weights
    BFLOAT16 = "bfloat16"


class Gemm(StrEnum):
    """One of the three matrix products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Operand(StrEnum):
    """One matrix that goes into a GEMM."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    Gemm.FPROP: (Operand.INPUT, Operand.WEIGHT),
    Gemm.DGRAD: (Operand.GRAD_OUTPUT, Operand.WEIGHT),
    Gemm.WGRAD: (Operand.GRAD_OUTPUT, Operand.INPUT),
}


class Format(StrEnum):
    """An 8-bit float of the OCP specification: e4m3 (finite, maximum 448) or e5m2 (with infinities, maximum 57344)."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"


class Scaling(StrEnum):
    """How many scales an operand has; rows run along the dimension that the GEMM does not contract."""

    TENSORWISE = "tensorwise"  # one
    ROWWISE = "rowwise"  # one a row
    BLOCKWISE_1X128 = "blockwise_1x128"  # one for 128 neighbours in a row
    BLOCKWISE_128X128 = "blockwise_128x128"  # one for a square of 128 rows and 128 columns


class Range(StrEnum):
    """Where a scale's maximum comes from: measured on the tensor in each step, or known beforehand."""

    DYNAMIC = "dynamic"
    STATIC = "static"


class Accumulation(StrEnum):
    """How the tensor core sums: `fast` keeps about 14 bits between promotions, `precise` promotes to float32."""

    FAST = "fast"
    PRECISE = "precise"


class AccumulationSetting(StrEnum):
    """What a policy asks of a GEMM's sums."""

    FAST = "fast"
    PRECISE = "precise"
    AUTO = "auto"  # fast where it is measured to be faster and as accurate


class Compute(StrEnum):
    """What a policy asks of a GEMM."""

    AUTO = "auto"  # FP8 where the evidence allows it
    FP8 = "fp8"  # FP8 wherever it can run
    KEEP = "keep"  # as the model has it


class Fuse(StrEnum):
    """Whether a site's neighbours (norm, activation, residual) are taken along into one region."""

    AUTO = "auto"  # where a measured kernel gains by it
    ALWAYS = "always"
    NEVER = "never"


GEMM_NAMESPACE = "loka"  # of the operators that are GEMMs, all of one form (loka.kernels.gemm.gemm_operator)

"""Enums shared by all rooms: the three GEMMs of a linear layer, their operands, formats and scalings.

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
    """Dtype of a training loop's matrix products under torch.autocast."""

    NONE = "none"  # no autocast: the dtype of the weights
    BFLOAT16 = "bfloat16"


class Gemm(StrEnum):
    """One of the three matrix products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Operand(StrEnum):
    """One matrix operand of a GEMM."""

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
    """Granularity of an operand's scales; rows run along the dimension that the GEMM does not contract."""

    TENSORWISE = "tensorwise"  # one scale
    ROWWISE = "rowwise"  # one scale per row
    BLOCKWISE_1X128 = "blockwise_1x128"  # one scale per 128 neighbours in a row
    BLOCKWISE_128X128 = "blockwise_128x128"  # one scale per square of 128 rows and 128 columns
    BLOCKWISE_1X32 = "blockwise_1x32"  # MXFP8: one scale per 32 neighbours in a row, a power of two
    NVFP4 = "nvfp4"  # 4 bits, with a scale in e4m3 per 16 neighbours in a row and one for all: for the Probe alone


class Range(StrEnum):
    """Source of a scale's maximum: measured on the tensor in each step (dynamic), or given beforehand (static)."""

    DYNAMIC = "dynamic"
    STATIC = "static"


class Accumulation(StrEnum):
    """Accumulation in the tensor core: `fast` keeps about 14 bits between promotions, `precise` promotes to float32."""

    FAST = "fast"
    PRECISE = "precise"


class AccumulationSetting(StrEnum):
    """A policy's setting for a GEMM's accumulation."""

    FAST = "fast"
    PRECISE = "precise"
    AUTO = "auto"  # fast where it is measured to be faster and as accurate


class Compute(StrEnum):
    """A policy's setting for the precision of a GEMM."""

    AUTO = "auto"  # FP8 where the evidence allows it
    FP8 = "fp8"  # FP8 wherever it can run
    KEEP = "keep"  # the model's own dtype


class Fuse(StrEnum):
    """A policy's setting for fusing a site with its neighbours (norm, activation, residual) into one region."""

    AUTO = "auto"  # where a measured kernel is faster for it
    ALWAYS = "always"
    NEVER = "never"


GEMM_NAMESPACE = "loka"  # of the GEMM operators, which share one signature (loka.kernels.gemm.gemm_operator)

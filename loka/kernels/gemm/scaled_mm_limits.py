"""What the FP8 GEMM behind `torch.nn.functional.scaled_mm` takes on a Hopper GPU.

Measured on an H100 with torch 2.11 and CUDA 13.0 (docs/results/LOG.md, tests/kernels/test_scaled_mm_gpu.py). The checks
are torch's own (aten/src/ATen/native/cuda/ScaledBlas.cpp) or cuBLASLt's, where it finds no algorithm:

- the pairs of scalings in PAIRS, no others; a transposed operand (`requantize_transpose`) has one scale for all its
  rows, which serves as a tensorwise scale and, as it is returned, as a rowwise one: its recipe says which;
- e5m2 for one operand at most, and for none under blockwise scaling;
- contraction and columns of the result in multiples of 16; rows are free, but for a 1x128-scaled first operand
  (multiples of 4: its scales are read in vectors of 16 bytes);
- fast accumulation with tensorwise and rowwise scales only.
"""

from __future__ import annotations

from loka.numerics.enums import Accumulation, Format, Scaling

BLOCKWISE = frozenset({Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128})
PAIRS = frozenset(
    {
        (Scaling.TENSORWISE, Scaling.TENSORWISE),
        (Scaling.ROWWISE, Scaling.ROWWISE),
        (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_1X128),
        (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128),
        (Scaling.BLOCKWISE_128X128, Scaling.BLOCKWISE_1X128),
    }
)
ALIGNMENT = 16  # of the contraction and of the result's columns, elements
ROW_ALIGNMENT_1X128 = 4  # of the first operand's rows where it is scaled 1x128


def refuse_recipe(
    scalings: tuple[Scaling, Scaling], formats: tuple[Format, Format], accumulation: Accumulation
) -> str | None:
    """Why the kernel cannot multiply operands of these scalings and formats, or None where it can."""
    if scalings not in PAIRS:
        allowed = ", ".join(sorted(f"{a.value} x {b.value}" for a, b in PAIRS))
        return f"no kernel multiplies {scalings[0].value} x {scalings[1].value}; it takes {allowed}"
    if formats == (Format.E5M2, Format.E5M2):
        return "the tensor core multiplies no e5m2 x e5m2; make one operand e4m3"
    if scalings[0] in BLOCKWISE and Format.E5M2 in formats:
        return "blockwise scaling takes e4m3 operands only"
    if scalings[0] in BLOCKWISE and accumulation is Accumulation.FAST:
        return "blockwise scaling has no fast accumulation; use accumulation: precise"
    return None


def row_alignment(scaling_a: Scaling) -> int:
    """What the first operand's rows must be a multiple of."""
    return ROW_ALIGNMENT_1X128 if scaling_a is Scaling.BLOCKWISE_1X128 else 1

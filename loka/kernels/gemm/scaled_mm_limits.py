"""Operands that the FP8 GEMM of `torch.nn.functional.scaled_mm` takes on a device, by the limits in its spec.

Those of Hopper (`loka.devices.hopper`) were measured on an H100 with torch 2.11 and CUDA 13.0 (docs/results/LOG.md,
tests/kernels/gemm/test_scaled_mm_gpu.py). The checks are torch's own (aten/src/ATen/native/cuda/ScaledBlas.cpp) or
cuBLASLt's, where it finds no algorithm:

- only the pairs of scalings in `pairs`; a transposed operand (`requantize_transpose`) has the same scale for all its
  rows, which can be used as a tensorwise or as a rowwise scale: its recipe says which;
- e5m2 for one operand at most, and for none with blockwise scaling;
- contraction and columns of the result in multiples of 16; rows are free, except for a 1x128-scaled first operand
  (multiples of 4);
- fast accumulation with tensorwise and rowwise scales only.
"""

from __future__ import annotations

from functools import cache

import torch

from loka.devices.spec import ScaledMMLimits
from loka.devices.targets import DEFAULT, device_named
from loka.numerics.enums import Accumulation, Format, Scaling


def refuse_recipe(
    scalings: tuple[Scaling, Scaling],
    formats: tuple[Format, Format],
    accumulation: Accumulation,
    limits: ScaledMMLimits = DEFAULT.scaled_mm,
) -> str | None:
    """Reason why a device's kernel cannot multiply operands of these scalings and formats; None where it can."""
    if scalings not in limits.pairs:
        allowed = ", ".join(sorted(f"{a} x {b}" for a, b in limits.pairs))
        return f"no kernel multiplies {scalings[0].value} x {scalings[1].value}; it takes {allowed}"
    if formats == (Format.E5M2, Format.E5M2):
        return "the tensor core multiplies no e5m2 x e5m2; make one operand e4m3"
    if scalings[0] in limits.precise_e4m3 and Format.E5M2 in formats:
        return "blockwise scaling takes e4m3 operands only"
    if scalings[0] in limits.precise_e4m3 and accumulation is Accumulation.FAST:
        return "blockwise scaling has no fast accumulation; use accumulation: precise"
    return None


@cache
def limits_of(device: int) -> ScaledMMLimits:
    """Limits of a CUDA device's kernel; the default target's for a device that is no target."""
    found = device_named(torch.cuda.get_device_name(device))
    return (found or DEFAULT).scaled_mm

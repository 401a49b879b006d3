"""How `CastTranspose` is launched, and what its template is given."""

from __future__ import annotations

from dataclasses import dataclass

from loka.kernels.fused.cast_transpose.matrix_spec import CastTranspose
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.norm.norm_launch import QUANTISE_TILE, QUANTISE_WARPS, REQUANTIZE_PARTS


@dataclass(frozen=True, slots=True)
class CastTransposeLaunch:
    """How the kernel is launched: a square tile a program."""

    tile: int  # rows and columns
    warps: int  # of a program
    chunk: int  # maxima read at a step


def cast_transpose_values(spec: CastTranspose) -> KernelValues:
    """Values of a matrix's two FP8 copies under one scale."""
    launch = CastTransposeLaunch(QUANTISE_TILE, QUANTISE_WARPS, REQUANTIZE_PARTS)
    shapes = {"x": "(R, C)", "values": "(R, C)", "transposed": "(C, R)", "scale": "(1, 1)", "maxima": "(Q,)"}
    shapes |= {"amax": "(P,)", "overflow": "(P,)", "overflow_stats": "(2,)"}
    return KernelValues(
        "cast_transpose/cast_transpose", spec, launch, f"To {spec.how.description}, and transposed", shapes
    )

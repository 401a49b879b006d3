"""How transpositions and column sums are launched, and what their templates are given."""

from __future__ import annotations

from dataclasses import dataclass

from loka.kernels.fused.cast_transpose.matrix_spec import Reduce, RequantizeTranspose, Transpose, endings
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.norm import norm_launch


@dataclass(frozen=True, slots=True)
class TransposeLaunch:
    """How a transposition is launched: a square tile a program."""

    tile: int  # rows and columns
    chunk: int  # maxima of scales read at a step
    warps: int  # of a program


@dataclass(frozen=True, slots=True)
class ReduceLaunch:
    """How column sums are launched: a block of columns a program."""

    columns: int
    rows: int  # read at a step
    warps: int  # of a program


_TRANSPOSE = TransposeLaunch(norm_launch.REQUANTIZE_TILE, norm_launch.REQUANTIZE_PARTS, norm_launch.REQUANTIZE_WARPS)
_REDUCE = ReduceLaunch(norm_launch.REDUCE_COLUMNS, norm_launch.REDUCE_ROWS, norm_launch.REDUCE_WARPS)


def transpose_values(spec: RequantizeTranspose | Transpose) -> KernelValues:
    """Values of transpositions, requantized or under one scale."""
    matrices = "e4m3 matrices" if isinstance(spec, RequantizeTranspose) else "matrices"
    one = "an e4m3 matrix" if isinstance(spec, RequantizeTranspose) else "a matrix"
    several = f"Transposed copies of {spec.count} {matrices}"
    shapes: dict[str, str] = {}
    for end in endings(spec.count):
        r, c = f"R{end}", f"C{end}"
        shapes |= {f"values{end}": f"({r}, {c}) e4m3", f"transposed{end}": f"({c}, {r})"}
        shapes |= {f"scale{end}": f"({r}, 1)", f"scale_max{end}": f"(P{end},)", f"scale_t{end}": f"({c}, 1)"}
    return KernelValues(
        family=f"cast_transpose/{'requantize_transpose' if isinstance(spec, RequantizeTranspose) else 'transpose'}",
        spec=spec,
        launch=_TRANSPOSE,
        title=f"The transposed copy of {one}" if spec.count == 1 else several,
        shapes=shapes,
        numbers={"ends": endings(spec.count)},
    )


def reduce_values(spec: Reduce) -> KernelValues:
    """Values of column sums."""
    shapes: dict[str, str] = {}
    for end in endings(spec.count):
        shapes |= {f"partial{end}": f"(P{end}, N{end})", f"dtype{end}": f"of total{end}", f"total{end}": f"(N{end},)"}
    title = f"Column sums of {spec.count} matrices" if spec.count > 1 else "Column sums of a matrix"
    return KernelValues("reduce/reduce", spec, _REDUCE, title, shapes, {"ends": endings(spec.count)})

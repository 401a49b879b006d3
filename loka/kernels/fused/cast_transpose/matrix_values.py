"""Template values of transpositions and column sums."""

from __future__ import annotations

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.cast_transpose.matrix_spec import Reduce, RequantizeTranspose, Transpose, endings
from loka.kernels.fused.kernel_values import KernelValues


def transpose_values(spec: RequantizeTranspose | Transpose, device: DeviceSpec = DEFAULT) -> KernelValues:
    """Template values of transpositions, with requantization or under one scale."""
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
        launch=device.launches.transpose,
        title=f"The transposed copy of {one}" if spec.count == 1 else several,
        shapes=shapes,
        numbers={"ends": endings(spec.count)},
    )


def reduce_values(spec: Reduce, device: DeviceSpec = DEFAULT) -> KernelValues:
    """Template values of column sums."""
    shapes: dict[str, str] = {}
    for end in endings(spec.count):
        shapes |= {f"partial{end}": f"(P{end}, N{end})", f"dtype{end}": f"of total{end}", f"total{end}": f"(N{end},)"}
    title = f"Column sums of {spec.count} matrices" if spec.count > 1 else "Column sums of a matrix"
    launch = device.launches.reduce
    return KernelValues("reduce/reduce", spec, launch, title, shapes, {"ends": endings(spec.count)})

"""Template values of `CastTranspose`."""

from __future__ import annotations

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.cast_transpose.matrix_spec import CastTranspose
from loka.kernels.fused.kernel_values import KernelValues


def cast_transpose_values(spec: CastTranspose, device: DeviceSpec = DEFAULT) -> KernelValues:
    """Template values for a matrix's two FP8 copies under one scale."""
    launch = device.launches.cast_transpose
    shapes = {"x": "(R, C)", "values": "(R, C)", "transposed": "(C, R)", "scale": "(1, 1)", "maxima": "(Q,)"}
    shapes |= {"amax": "(P,)", "overflow": "(P,)", "overflow_stats": "(2,)"}
    return KernelValues(
        "cast_transpose/cast_transpose", spec, launch, f"To {spec.how.description}, and transposed", shapes
    )

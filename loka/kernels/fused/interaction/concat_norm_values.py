"""Launch configurations and template values of norms over concatenated rows."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.interaction.concat_norm_spec import ConcatNormBackward, ConcatNormForward
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.norm.norm_launch import padded_width

_TITLES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


@dataclass(frozen=True, slots=True)
class ConcatNormConfiguration:
    """Launch configuration."""

    rows: int  # rows per step of a program, a power of two
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def concat_norm_configuration(
    spec: ConcatNormForward | ConcatNormBackward, device: DeviceSpec = DEFAULT
) -> ConcatNormConfiguration:
    """The launch configuration for a spec.

    A backward kernel with sums for a weight or a bias keeps them in registers, so it has its own rows and warps.
    """
    launch, padded = device.launches.concat_norm, padded_width(spec.width)
    if padded > launch.wide:
        warps = min(launch.most_warps, padded // launch.wide_warp_elements)
        return ConcatNormConfiguration(1, warps, max(1, launch.wide_elements // padded))
    if isinstance(spec, ConcatNormForward) or not (spec.weight or spec.bias):
        return ConcatNormConfiguration(launch.elements // padded, *launch.launch)
    return ConcatNormConfiguration(launch.summed_elements // padded, *launch.summed)


def concat_norm_values(spec: ConcatNormForward | ConcatNormBackward, launch: ConcatNormConfiguration) -> KernelValues:
    """Template values of the forward or backward kernel."""
    return KernelValues(
        family=f"interaction/concat_norm_{'forward' if isinstance(spec, ConcatNormForward) else 'backward'}",
        spec=spec,
        launch=launch,
        title=_title(spec),
        shapes=_shapes(spec),
        numbers={"padded": padded_width(spec.width)},
    )


def _title(spec: ConcatNormForward | ConcatNormBackward) -> str:
    eps = f" (eps {spec.eps})" if isinstance(spec, ConcatNormForward) else ""
    what = f"{spec.parts} parts concatenated" if spec.parts > 1 else "a residual added"
    if spec.parts > 1 and spec.residual:
        what += ", a residual added"
    steps = f"{what} -> {_TITLES[spec.norm]}{eps}"
    return steps[0].upper() + steps[1:] if isinstance(spec, ConcatNormForward) else f"Gradient of {steps}"


def _shapes(spec: ConcatNormForward | ConcatNormBackward) -> dict[str, str]:
    w = spec.width
    shapes = {f"part_{i}": f"(B, {f'n_{i}' if spec.parts > 1 else 'n'}, {w})" for i in range(spec.parts)}
    shapes |= dict.fromkeys(("residual", "grad", "out", "dx"), f"(B, n, {w})")
    shapes |= dict.fromkeys(("weight", "bias"), f"({w},)") | dict.fromkeys(("mean", "rstd"), "(B * n,)")
    return shapes | dict.fromkeys(("dweight", "dbias"), f"(P, {w})")

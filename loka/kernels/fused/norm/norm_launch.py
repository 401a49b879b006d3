"""How the generated kernels are launched on a device: frozen in their text when they are rendered.

The tables are the device's (`loka.devices.spec`). Programs loop over rows, so that the partial sums of weights'
gradients are few, and fetch the next rows while they sum. What is too large for the registers costs up to ten times the
time.
"""

from __future__ import annotations

from dataclasses import replace

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.kernels.fused.norm.norm_spec import GATES, NormBackward, NormForward

ONE_SCALE = ("maximum", "tensorwise")  # the kernel that finds a matrix's largest value, and the one that writes it


def configuration(spec: NormForward | NormBackward, device: DeviceSpec = DEFAULT) -> RowLaunch:
    """The choice for a spec, by its family and the width that it holds: the zeros behind x are in registers too."""
    launches, forward = device.launches.rows, isinstance(spec, NormForward)
    padded = padded_width(spec.columns if isinstance(spec, NormForward) else spec.width)
    if padded <= launches.short:
        short = launches.short_forward if forward else launches.short_backward
        return replace(short, rows=launches.short_elements // max(padded, 16))
    if forward and spec.quantize and spec.how.scaling in ONE_SCALE and padded in launches.forward_tensorwise:
        return launches.forward_tensorwise[padded]
    if padded == launches.streaming and _streams(spec):
        return launches.streaming_forward if forward else launches.streaming_backward
    over_rows = spec.traits.over_rows
    loaded = (
        isinstance(spec, NormBackward) and over_rows and (spec.add or spec.residual_grad_in or spec.residual_grad_out)
    )
    if padded == launches.streaming and loaded:
        return launches.loaded_backward
    if forward:
        table = launches.forward if over_rows else launches.forward_simple
    elif over_rows or spec.add:
        table = launches.backward_quantized if spec.quantize else launches.backward
    else:
        table = launches.backward_simple
    found = table.get(padded, launches.widest)
    if spec.activation in GATES and not forward:  # what goes past the norm stays in registers meanwhile
        return replace(found, warps=min(2 * found.warps, launches.most_warps))
    return found


def _streams(spec: NormForward | NormBackward) -> bool:
    """Whether a kernel without a norm reads several matrices: no sums of a row but its maximum wait for one another."""
    more = (spec.times, spec.residual if isinstance(spec, NormForward) else spec.residual_grad_in)
    return spec.norm is None and any(more)


def padded_width(width: int) -> int:
    """The power of two of elements that a row takes up in registers."""
    return 1 << (width - 1).bit_length()

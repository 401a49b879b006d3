"""Launches and titles of norms and their gradients.

The tables of launches are the device's (`loka.devices`). Programs loop over rows, so that the partial sums of weights'
gradients are few, and fetch the next rows while they sum. What is too large for the registers costs up to ten times the
time.

Rows wider than `LARGEST_HELD` are taken in chunks. A forward's program takes whole rows, one after another, each chunk
by chunk: once for the statistics of its norm, and once for the result. Its values are written under the scale of the
row before, while the maximum is found, and written again where the row's own scale is another: after a LayerNorm of
123200 elements never for normal rows, for Student's t with three degrees of freedom every second time. Scales that are
no powers of two are nearly all different, so there the maximum is found first. It waits for what it reads: two programs
on a multiprocessor hide more of that than the L2 cache gives back where one keeps all rows that are worked on within it
(measured on rows of 123200: docs/results/LOG.md). A backward's program keeps to its columns, whose parameters and sums
it holds, and goes down the rows; one launch finds the sums of rows, by columns, with those of the columns, one the
maxima, and one writes. Its programs are as many as find a place at once, chosen by their registers: they have the same
work, and would wait for a second round of few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.kernels.fused.kernel_values import LARGEST_HELD, padded_width
from loka.kernels.fused.norm.activations import GATES, activation_title
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward

ONE_SCALE = ("maximum", "tensorwise")  # the kernel that finds a matrix's largest value, and the one that writes it


def configuration(spec: NormForward | NormBackward, device: DeviceSpec = DEFAULT) -> RowLaunch:
    """The choice for a spec, by its family and the width that it holds: the zeros behind x are in registers too."""
    if spec.width > LARGEST_HELD:
        return _wide_configuration(spec, device)
    launches, forward = device.launches.rows, isinstance(spec, NormForward)
    padded = padded_width(spec.columns)
    if padded <= launches.short:
        short = launches.short_forward if forward else launches.short_backward
        return replace(short, rows=launches.short_elements // max(padded, 16))
    if forward and spec.quantize and spec.how.scaling in ONE_SCALE and padded in launches.forward_tensorwise:
        return launches.forward_tensorwise[padded]
    if padded == launches.streaming and _streams(spec):
        return launches.streaming_forward if forward else launches.streaming_backward
    if spec.traits.over_columns and not (isinstance(spec, NormBackward) and spec.sums_only):
        return (launches.forward_columns if forward else launches.backward_columns).get(padded, launches.widest)
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
    # What goes past a norm stays in registers meanwhile.
    if not forward and spec.activation in GATES:
        return replace(found, warps=min(2 * found.warps, launches.most_warps))
    return found


def _streams(spec: NormForward | NormBackward) -> bool:
    """Whether a kernel without a norm reads several matrices: no sums of a row but its maximum wait for one another."""
    more = (spec.times, spec.multiplied, spec.residual if isinstance(spec, NormForward) else spec.residual_grad_in)
    return spec.norm is None and any(more)


def _wide_configuration(spec: NormForward | NormBackward, device: DeviceSpec) -> RowLaunch:
    """The choice for rows in chunks, which hold whole blocks of a norm over blocks."""
    launch, block = device.launches.wide, spec.block if spec.traits.over_blocks else 1
    if isinstance(spec, NormForward):
        read = sum((1, spec.add, spec.times, spec.residual, spec.weight, spec.bias))  # at each step; 16 KB in float32
        fewer = int(read > launch.stages_read)
        return replace(launch.forward, stages=launch.forward.stages - fewer, chunk=max(launch.chunk, block))
    how, (rows, columns) = launch.backward, launch.tile
    chunk = max(columns, block)
    high = max(how.rows, rows * columns // chunk)
    warps = max(launch.least_warps, min(how.warps, high * chunk // launch.warp_elements))
    return replace(how, rows=high, warps=warps, chunk=chunk)


@dataclass(frozen=True, slots=True)
class Rows:
    """The launch, of a generated package, of a kernel over rows of one width."""

    rows: int  # of a program at a step
    warps: int  # of a program
    least: int  # rows of a program, at least
    programs: int  # on each multiprocessor, at most
    held: bool = True  # weight, bias and add stay in registers; otherwise each step reads them again
    stages: int = 1  # steps whose rows are prefetched into shared memory at once
    chunk: int = 0  # columns at a step of rows that no program holds


_SUMS = ("dweight", "dbias", "dadd")


def rows_launch(spec: NormForward | NormBackward, launch: RowLaunch, device: DeviceSpec = DEFAULT) -> Rows:
    """The launch of a kernel: one that adds up sums, or goes down wide rows, has more rows a program."""
    down = isinstance(spec, NormBackward) and (launch.chunk > 0 or any(name in spec.results for name in _SUMS))
    least = launch.rows * (device.launches.rows.least_summed if down else 1)
    return Rows(launch.rows, launch.warps, least, launch.programs, launch.held, launch.stages, launch.chunk)


def norm_title(spec: NormForward | NormBackward) -> str:
    """What a kernel computes: "Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row"."""
    steps = ["addition"] if spec.add else []
    steps += ["product"] if spec.times else []
    steps += ["residual"] if isinstance(spec, NormForward) and spec.residual else []
    if spec.norm is not None:
        eps = f" (eps {spec.eps})" if isinstance(spec, NormForward) else ""
        block = f" {spec.block}" if spec.traits.over_blocks else ""
        steps.append(spec.traits.title + block + eps)
    if spec.activation is not None:
        steps.append(activation_title(spec.activation))
    steps += ["product"] if spec.multiplied else []
    title = _title(spec, steps, spec.how.description)
    room = 120 - len('    """ for grad (m, WIDTH)."""')
    return title if len(title) <= room else _title(spec, steps, spec.how.short_description)


def _title(spec: NormForward | NormBackward, steps: list[str], quantized: str) -> str:
    rows = [quantized] if spec.quantize else []
    if isinstance(spec, NormBackward):
        steps = [f"gradient of {', '.join(steps)}" if steps else "gradient"]
    elif not steps:
        return f"To {quantized}"
    title = " -> ".join([*steps, *rows])
    return title[0].upper() + title[1:]

"""How kernels of rows wider than `LARGEST_HELD` are launched on a device.

A forward reads its rows twice or three times, and waits for what it reads: two programs on a multiprocessor hide more
of that than the L2 cache gives back where one keeps all rows that are worked on within it (measured on rows of 123200:
docs/results/LOG.md). A backward's programs are as many as find a place at once, chosen by their registers: they have
the same work, and would wait for a second round of few.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward


@dataclass(frozen=True, slots=True)
class WideConfiguration:
    """How a kernel that takes rows in chunks is launched."""

    chunk: int  # columns at a step, a power of two
    rows: int  # at a step: of a forward one, of a backward, whose programs keep to their columns, at least two
    warps: int  # of a program
    programs: int  # on each multiprocessor: of a forward at most, of a backward in all
    stages: int  # steps whose elements are on their way into shared memory at once


def wide_configuration(spec: NormForward | NormBackward, device: DeviceSpec = DEFAULT) -> WideConfiguration:
    """The choice for a spec: chunks hold whole blocks of a norm over blocks."""
    launch, block = device.launches.wide, spec.block if spec.traits.over_blocks else 1
    if isinstance(spec, NormForward):
        read = sum((1, spec.add, spec.times, spec.residual, spec.weight, spec.bias))  # at each step; 16 KB in float32
        how, fewer = launch.forward, int(read > launch.stages_read)
        return WideConfiguration(max(launch.chunk, block), how.rows, how.warps, how.programs, how.stages - fewer)
    how, (rows, columns) = launch.backward, launch.tile
    chunk = max(columns, block)
    high = max(how.rows, rows * columns // chunk)
    warps = max(launch.least_warps, min(how.warps, high * chunk // launch.warp_elements))
    return WideConfiguration(chunk, high, warps, how.programs, how.stages)

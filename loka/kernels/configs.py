"""How the generated kernels are launched on an H100: frozen in their text when they are rendered.

From docs/results/LOG.md, "kernels for the FP8 region": below 2048 wide, one warp for each row or more, since with two
the sums of a row cross warps (the backward at (16384, 512) then took about 100 us more for the region); from 2048 on
four warps and two rows a step. Programs loop over rows, 4 to 16 of them on a multiprocessor, so that the partial sums
of weights' gradients are few. The wrong choice costs up to ten times the time, by spilling registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.kernels.rendered_specs import NormBackward, NormForward

TURN_TILE = 128  # rows and columns that a program of `turn` takes
TURN_WARPS = 4
TURN_PARTS = 1024  # of `largest` read at a step
REDUCE_COLUMNS = 8  # of a program: 32 bytes, the sector that the L2 cache reads
REDUCE_ROWS = 512  # read at a step, so that every thread has 16 reads on their way
REDUCE_WARPS = 8


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a kernel that takes whole rows is launched."""

    rows: int  # that a program takes at a step, a power of two
    warps: int  # of a program
    programs: int  # on each multiprocessor, at most


def configuration(spec: NormForward | NormBackward) -> Configuration:
    """The choice for a spec, by its family and its width."""
    padded = padded_width(spec.width)
    forward = isinstance(spec, NormForward)
    if padded <= 256:  # several short rows for a warp
        return Configuration(rows=min(64, 2048 // padded), warps=1, programs=16)
    if padded < 2048:
        return Configuration(rows=2 if forward and padded <= 512 else 1, warps=1, programs=16)
    if padded < 8192:
        return Configuration(rows=2 if forward and padded == 2048 else 1, warps=4, programs=4)
    if padded == 8192:
        return Configuration(rows=1, warps=8, programs=2)
    return Configuration(rows=1, warps=16, programs=1)


def padded_width(width: int) -> int:
    """The power of two of elements that a row takes up in registers."""
    return 1 << (width - 1).bit_length()

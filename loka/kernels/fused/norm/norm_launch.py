"""How the generated kernels are launched on an H100: frozen in their text when they are rendered.

Measured 512, 1024, 2048 and 4096 wide (docs/results/LOG.md, "rendered kernels" and "rows fetched ahead"); between and
beyond, by what fits the registers. Programs loop over rows, so that the partial sums of weights' gradients are few, and
fetch the next rows while they sum. What is too large for the registers costs up to ten times the time: a thread has at
most 32 elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.kernels.fused.norm.norm_spec import GATES, NormBackward, NormForward

REQUANTIZE_TILE = 128  # rows and columns that a program of `requantize_transpose` takes
REQUANTIZE_WARPS = 4
QUANTISE_TILE = 128  # of a program of `cast_transpose`; not measured yet, chosen for its registers
QUANTISE_WARPS = 8
REQUANTIZE_PARTS = 1024  # of `largest` read at a step
REDUCE_COLUMNS = 16  # of a program
REDUCE_ROWS = 128  # read at a step, so that every thread has 8 reads on their way
REDUCE_WARPS = 8
MOST_WARPS = 16  # of a program that takes whole rows
LEAST_SUMMED = 4  # steps of a program that has partial sums: each writes a row of them, whatever it has added up
PRODUCTS_COLUMNS = 1024  # of a program of `products`, at most; it takes one row


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a kernel that takes whole rows is launched."""

    rows: int  # that a program takes at a step, a power of two
    warps: int  # of a program
    programs: int  # on each multiprocessor, at most
    held: bool = True  # weight, bias and add stay in registers, or are read again (from the L1 cache) at each step
    stages: int = 1  # steps whose rows are on their way into shared memory at once


_HUGE = Configuration(rows=1, warps=16, programs=1, held=False)
_FORWARD = {
    512: Configuration(rows=1, warps=1, programs=32),
    1024: Configuration(rows=1, warps=1, programs=16),
    2048: Configuration(rows=1, warps=4, programs=8, held=False),
    4096: Configuration(rows=1, warps=4, programs=4, held=False),
    8192: Configuration(rows=1, warps=8, programs=2, held=False),
}
_BACKWARD = {  # to a plain matrix; measured with the reduction of its sums, as those to FP8
    512: Configuration(rows=4, warps=2, programs=4, stages=3),
    1024: Configuration(rows=4, warps=4, programs=2, stages=3),
    2048: Configuration(rows=4, warps=8, programs=1, stages=3),
    4096: Configuration(rows=2, warps=8, programs=1, stages=3),
    8192: Configuration(rows=1, warps=8, programs=2, held=False),
}
_BACKWARD_QUANTISED = {
    **_BACKWARD,
    512: Configuration(rows=1, warps=1, programs=8, stages=3),
    1024: Configuration(rows=1, warps=2, programs=8, stages=3),
    2048: Configuration(rows=1, warps=4, programs=4, stages=3),
    4096: Configuration(rows=1, warps=4, programs=2, stages=3),
}
_FORWARD_SIMPLE = {  # without a norm over the whole row: a row waits for its maximum alone
    **_FORWARD,
    1024: Configuration(rows=1, warps=2, programs=32),
    2048: Configuration(rows=1, warps=2, programs=32),
    4096: Configuration(rows=1, warps=4, programs=16),
}
_BACKWARD_SIMPLE = {  # nor sums of columns: as many programs as there may be
    512: Configuration(rows=1, warps=1, programs=32),
    1024: Configuration(rows=1, warps=2, programs=32),
    2048: Configuration(rows=1, warps=4, programs=16),
    4096: Configuration(rows=1, warps=8, programs=8),
    8192: Configuration(rows=1, warps=8, programs=2, held=False),
}


def configuration(spec: NormForward | NormBackward) -> Configuration:
    """The choice for a spec, by its family and the width that it holds: the zeros behind x are in registers too."""
    forward = isinstance(spec, NormForward)
    padded = padded_width(spec.columns if isinstance(spec, NormForward) else spec.width)
    if padded <= 256:  # several short rows for a warp; a backward's sums need the registers of two
        rows = 1024 // max(padded, 16)
        return Configuration(rows, warps=1, programs=16) if forward else Configuration(rows, warps=2, programs=8)
    if padded == 4096 and _streams(spec):  # as many programs as their registers leave room for
        return Configuration(rows=1, warps=8, programs=4 if forward else 3, held=False)
    row_norm = spec.norm in ("layer_norm", "rms_norm")
    if padded == 4096 and isinstance(spec, NormBackward) and row_norm and (spec.add or spec.carried or spec.carry):
        return Configuration(rows=1, warps=8, programs=2)  # one sum or one matrix more, and four warps would spill
    if forward:
        table = _FORWARD if row_norm else _FORWARD_SIMPLE
    elif row_norm or spec.add:
        table = _BACKWARD_QUANTISED if spec.quantise else _BACKWARD
    else:
        table = _BACKWARD_SIMPLE
    found = table.get(padded, _HUGE)
    if spec.activation in GATES and not forward:  # what goes past the norm stays in registers meanwhile
        return replace(found, warps=min(2 * found.warps, MOST_WARPS))
    return found


def _streams(spec: NormForward | NormBackward) -> bool:
    """Whether a kernel without a norm reads several matrices: no sums of a row but its maximum wait for one another."""
    more = (spec.times, spec.residual if isinstance(spec, NormForward) else spec.carried)
    return spec.norm is None and any(more)


def padded_width(width: int) -> int:
    """The power of two of elements that a row takes up in registers."""
    return 1 << (width - 1).bit_length()

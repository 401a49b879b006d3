"""How rendered products are tiled on an H100: frozen in their text when they are rendered.

A choice depends on what is known then: N, K, operands, accumulation and epilogue, never on M. What bounds it: a block
has 227 KiB of shared memory, which holds `stages` tiles of both operands and the tile of the result that is written; a
thread has 255 registers, and an element of the tile's float32 sum is one of them, two where e4m3 is summed precisely
(the tensor core's sum and the float32 one). So a precise tile has at most 64 elements a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.kernels.configs import padded_width
from loka.kernels.gemm_specs import Gemm, SplitGemm
from loka.numerics.names import Accumulation

SHARED = 227 * 1024  # bytes of shared memory that a block can have
SUM_COLUMNS = 256  # elements of a split product that a program of the second pass adds up
SUM_WARPS = 4
LEAST_CHUNK = 512  # rows that a part of a split contraction has at least
MOST_PARTS = 16  # of a split contraction
MULTIPROCESSORS = 132  # of an H100


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled and launched."""

    rows: int  # of a tile of the result
    columns: int  # of a tile of the result
    depth: int  # elements contracted at a step
    stages: int  # steps on their way from memory
    warps: int  # of a program
    programs: int = 1  # on each multiprocessor, at most


# Every tiling that a product with e4m3 operands may be rendered with, fast accumulation only ...
FAST_ONLY = (
    Tiling(rows=128, columns=256, depth=128, stages=3, warps=8),
    Tiling(rows=256, columns=128, depth=128, stages=3, warps=8),
)
# ... and either accumulation.
PRECISE = (
    Tiling(rows=128, columns=128, depth=128, stages=4, warps=8),
    Tiling(rows=128, columns=128, depth=128, stages=5, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=3, warps=8, programs=2),
    Tiling(rows=64, columns=256, depth=128, stages=4, warps=8),
    Tiling(rows=64, columns=128, depth=128, stages=3, warps=4, programs=2),
    Tiling(rows=128, columns=64, depth=128, stages=3, warps=8, programs=2),
)
SMALL = (  # few columns
    Tiling(rows=128, columns=64, depth=128, stages=3, warps=4, programs=2),
    Tiling(rows=128, columns=32, depth=128, stages=3, warps=4, programs=3),
    Tiling(rows=128, columns=16, depth=128, stages=3, warps=4, programs=3),
)
BFLOAT16 = (
    Tiling(rows=128, columns=256, depth=64, stages=3, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=4, warps=8),
    Tiling(rows=64, columns=128, depth=64, stages=3, warps=4, programs=2),
    Tiling(rows=128, columns=64, depth=64, stages=3, warps=8, programs=2),
)
SPLIT = (
    Tiling(rows=128, columns=128, depth=128, stages=4, warps=8),
    Tiling(rows=128, columns=128, depth=128, stages=4, warps=8, programs=2),
    Tiling(rows=128, columns=128, depth=128, stages=3, warps=8, programs=2),
    Tiling(rows=64, columns=128, depth=128, stages=4, warps=4, programs=2),
)
SPLIT_FAST_ONLY = (Tiling(rows=128, columns=256, depth=128, stages=4, warps=8),)
SPLIT_POINTERS = Tiling(rows=64, columns=64, depth=64, stages=3, warps=4)  # where rows are not aligned
SPLIT_BFLOAT16 = (
    Tiling(rows=128, columns=128, depth=64, stages=4, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=3, warps=8, programs=2),
    Tiling(rows=128, columns=256, depth=64, stages=4, warps=8),
)


WHOLE_ROWS = (  # of 512 columns; narrower tiles take the columns' power of two
    Tiling(rows=64, columns=512, depth=128, stages=2, warps=8),
    Tiling(rows=64, columns=512, depth=64, stages=3, warps=8),
)
WHOLE_ROWS_BFLOAT16 = (
    Tiling(rows=64, columns=512, depth=64, stages=2, warps=8),
    Tiling(rows=64, columns=512, depth=32, stages=3, warps=8),
)


def candidates(spec: Gemm | SplitGemm) -> tuple[Tiling, ...]:
    """Every tiling that may be chosen for a spec."""
    fast, quantised = spec.accumulation is Accumulation.FAST, spec.operands == "e4m3"
    if isinstance(spec, SplitGemm):
        return SPLIT + (SPLIT_FAST_ONLY if fast else ()) if quantised else SPLIT_BFLOAT16
    if spec.epilogue.whole_rows:
        found = WHOLE_ROWS if quantised else WHOLE_ROWS_BFLOAT16
        return tuple(replace(tiled, columns=max(padded_width(spec.n), 16)) for tiled in found)
    if spec.epilogue.norm == "block_norm":
        return tuple(t for t in (PRECISE if quantised else BFLOAT16) if t.columns == spec.epilogue.block)
    if spec.n <= 64:
        return tuple(t for t in SMALL if t.columns >= min(padded_width(spec.n), 64))
    return PRECISE + (FAST_ONLY if fast else ()) if quantised else BFLOAT16


def tiling(spec: Gemm | SplitGemm) -> Tiling:
    """The choice for a spec."""
    return candidates(spec)[0]


def most_parts(spec: SplitGemm, tiled: Tiling) -> int:
    """In how many parts a contraction is split at most: a power of two that does not overfill the device."""
    share = min(max(MULTIPROCESSORS * tiled.programs // tiles_of(spec, tiled), 1), MOST_PARTS)
    return 1 << (share.bit_length() - 1)


def tiles_of(spec: SplitGemm, tiled: Tiling) -> int:
    """Tiles of the result."""
    return -(-spec.n // tiled.rows) * -(-spec.k // tiled.columns)

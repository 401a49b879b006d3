"""How rendered products are tiled on an H100: frozen in their text when they are rendered.

A choice depends on what is known then: N, K, operands, accumulation and epilogue, never on M. What bounds it: a block
has 227 KiB of shared memory, which holds `stages` tiles of both operands and the tile of the result that is written; a
thread has 255 registers, and an element of the tile's float32 sum is one of them, two where e4m3 is summed precisely
(the tensor core's sum and the float32 one). So a precise tile has at most 64 elements a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.triton_gemm.gemm_spec import GemmSpec, GroupedGemm, TiledGemm

SHARED = 227 * 1024  # bytes of shared memory that a block can have

BYTES = {"e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}
ALIGNMENT = 16  # bytes: of a row that the tensor memory accelerator takes


def is_aligned(columns: int, dtype: str) -> bool:
    """Whether rows of so many elements start at addresses that a descriptor takes."""
    return columns * BYTES[dtype] % ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled and launched."""

    rows: int  # of a tile of the result
    columns: int  # of a tile of the result
    depth: int  # elements contracted at a step
    stages: int  # steps on their way from memory
    warps: int  # of a program
    programs: int = 1  # on each multiprocessor, at most
    flattened: bool = True  # whether the steps of a program's next tile are fetched while this one is written


# Every tiling that a product with e4m3 operands may be rendered with.
PRECISE = (
    Tiling(rows=128, columns=128, depth=128, stages=4, warps=8),
    Tiling(rows=128, columns=128, depth=128, stages=4, warps=8, flattened=False),
    Tiling(rows=128, columns=128, depth=128, stages=5, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=3, warps=8, programs=2, flattened=False),
    Tiling(rows=128, columns=128, depth=64, stages=3, warps=8, programs=2),
    Tiling(rows=64, columns=256, depth=128, stages=4, warps=8),
    Tiling(rows=64, columns=128, depth=128, stages=3, warps=4, programs=2),
    Tiling(rows=128, columns=64, depth=128, stages=3, warps=8, programs=2),
)
SMALL = (  # at most 64 columns, or the power of two that holds them
    Tiling(rows=128, columns=64, depth=128, stages=3, warps=4, programs=2),
    Tiling(rows=64, columns=64, depth=64, stages=4, warps=4, programs=4),
)
BFLOAT16 = (
    Tiling(rows=128, columns=256, depth=64, stages=3, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=4, warps=8),
    Tiling(rows=128, columns=128, depth=64, stages=4, warps=8, flattened=False),
    Tiling(rows=64, columns=128, depth=64, stages=3, warps=4, programs=2),
    Tiling(rows=128, columns=64, depth=64, stages=3, warps=8, programs=2),
)
WHOLE_ROWS = (  # of 256 columns, two of them side by side; narrower ones take the columns' power of two
    Tiling(rows=64, columns=256, depth=128, stages=2, warps=8),
    Tiling(rows=64, columns=256, depth=128, stages=2, warps=8, flattened=False),
    Tiling(rows=64, columns=256, depth=64, stages=3, warps=8),
)
WHOLE_ROWS_BFLOAT16 = (
    Tiling(rows=64, columns=256, depth=64, stages=2, warps=8),
    Tiling(rows=64, columns=256, depth=32, stages=3, warps=8),
)
# Rows that are not aligned are read by pointers, and those take up registers: smaller tiles, few to choose from.
POINTERS = (
    Tiling(rows=64, columns=64, depth=64, stages=3, warps=4, programs=2),
    Tiling(rows=64, columns=128, depth=64, stages=3, warps=8, programs=2),
)
# One program a tile: products that are many and small.
GROUPED = (
    Tiling(rows=64, columns=64, depth=128, stages=3, warps=4),
    Tiling(rows=128, columns=64, depth=128, stages=3, warps=4),
)
GROUPED_POINTERS = (Tiling(rows=64, columns=64, depth=64, stages=3, warps=4),)
WHOLE_ROWS_POINTERS = (Tiling(rows=64, columns=128, depth=32, stages=3, warps=8),)


def candidates(spec: GemmSpec) -> tuple[Tiling, ...]:
    """Every tiling that may be chosen for a spec."""
    if isinstance(spec, GroupedGemm):
        aligned = all(is_aligned(k, spec.operands) for _, k in spec.shapes)
        widest = max(n for n, _ in spec.shapes)
        return tuple(_narrowed(tiled, widest) for tiled in (GROUPED if aligned else GROUPED_POINTERS))
    return tuple(tiled for tiled in _tilings(spec) if shared_bytes(spec, tiled) <= SHARED)


def shared_bytes(spec: TiledGemm, tiled: Tiling) -> int:
    """Shared memory that a product takes at most: operands on their way, results on theirs, 1 KiB for a norm's sums."""
    columns = tiled.columns if not spec.epilogue.whole_rows else -(-spec.n // tiled.columns) * tiled.columns
    operands = tiled.stages * (tiled.rows + columns) * tiled.depth * BYTES[spec.operands]
    results = tiled.rows * tiled.columns * (BYTES[spec.epilogue.out] + 2 * spec.epilogue.keep)
    return operands + results + 1024


def _tilings(spec: TiledGemm) -> tuple[Tiling, ...]:
    if spec.epilogue.whole_rows:
        return tuple(_narrowed(tiled, spec.n) for tiled in _whole_rows(spec))
    if spec.epilogue.norm == "block_norm":
        if not is_aligned(spec.k, spec.operands):
            return (replace(WHOLE_ROWS_POINTERS[0], columns=spec.epilogue.block),)
        return tuple(tiled for tiled in _large(spec) if tiled.columns == spec.epilogue.block)
    if spec.n <= 64:
        found = SMALL if is_aligned(spec.k, spec.operands) else POINTERS
        return tuple(_narrowed(tiled, spec.n) for tiled in found)
    return _large(spec)


def _large(spec: TiledGemm) -> tuple[Tiling, ...]:
    if not is_aligned(spec.k, spec.operands):
        return POINTERS
    return PRECISE if spec.operands == "e4m3" else BFLOAT16


def _whole_rows(spec: TiledGemm) -> tuple[Tiling, ...]:
    if not is_aligned(spec.k, spec.operands):
        return WHOLE_ROWS_POINTERS
    return WHOLE_ROWS if spec.operands == "e4m3" else WHOLE_ROWS_BFLOAT16


def _narrowed(tiled: Tiling, columns: int) -> Tiling:
    return replace(tiled, columns=min(tiled.columns, max(padded_width(columns), 16)))


def tiling(spec: GemmSpec) -> Tiling:
    """The choice for a spec."""
    return candidates(spec)[0]

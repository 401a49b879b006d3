"""How rendered products are tiled on a device: frozen in their text when they are rendered.

A choice depends on what is known then: N, K, operands, accumulation and epilogue, never on M. What bounds it: a
block's shared memory holds `stages` tiles of both operands and the tile of the result that is written; a thread has 255
registers, and an element of the tile's float32 sum is one of them, two where e4m3 is summed precisely
(the tensor core's sum and the float32 one). So a precise tile has at most 64 elements a thread.
"""

from __future__ import annotations

from dataclasses import replace

from loka.devices.launches import Tiling, Tilings
from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.triton_gemm.gemm_spec import BatchedGemm, GemmSpec, GroupedGemm, SplitGemm, TiledGemm
from loka.numerics.enums import Accumulation

SUM_COLUMNS = 256  # elements of a split product that a program of the second pass adds up
SUM_WARPS = 4
LEAST_CHUNK = 512  # rows that a part of a split contraction has at least
MOST_PARTS = 16  # of a split contraction
BYTES = {"e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}
ALIGNMENT = 16  # bytes: of a row that the tensor memory accelerator takes


def is_aligned(columns: int, dtype: str) -> bool:
    """Whether rows of so many elements start at addresses that a descriptor takes."""
    return columns * BYTES[dtype] % ALIGNMENT == 0


# With e4m3 operands and fast accumulation, beside the device's own.
FAST_ONLY = (
    Tiling(rows=128, columns=256, depth=128, stages=3, warps=8),
    Tiling(rows=128, columns=256, depth=128, stages=3, warps=8, flattened=False),
    Tiling(rows=256, columns=128, depth=128, stages=3, warps=8),
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


def candidates(spec: GemmSpec, device: DeviceSpec = DEFAULT) -> tuple[Tiling, ...]:
    """Every tiling that may be chosen for a spec."""
    if isinstance(spec, BatchedGemm | GroupedGemm):
        shapes = spec.shapes if isinstance(spec, GroupedGemm) else ((spec.n, spec.k),)
        aligned = all(is_aligned(k, spec.operands) for _, k in shapes)
        widest, known = max(n for n, _ in shapes), device.launches.products
        return tuple(_narrowed(tiled, widest) for tiled in (known.grouped if aligned else known.grouped_pointers))
    if isinstance(spec, SplitGemm):
        fast = spec.accumulation is Accumulation.FAST
        return SPLIT + (SPLIT_FAST_ONLY if fast else ()) if spec.operands == "e4m3" else SPLIT_BFLOAT16
    return tuple(
        tiled for tiled in _tilings(spec, device.launches.products) if shared_bytes(spec, tiled) <= device.shared_bytes
    )


def shared_bytes(spec: TiledGemm, tiled: Tiling) -> int:
    """Shared memory that a product takes at most: operands on their way, results on theirs, 1 KiB for a norm's sums."""
    columns = tiled.columns if not spec.epilogue.whole_rows else -(-spec.n // tiled.columns) * tiled.columns
    operands = tiled.stages * (tiled.rows + columns) * tiled.depth * BYTES[spec.operands]
    results = tiled.rows * tiled.columns * (BYTES[spec.epilogue.out] + 2 * spec.epilogue.keep)
    return operands + results + 1024


def _tilings(spec: TiledGemm, known: Tilings) -> tuple[Tiling, ...]:
    if spec.epilogue.whole_rows:
        return tuple(_narrowed(tiled, spec.n) for tiled in _whole_rows(spec, known))
    if spec.epilogue.norm == "block_norm":
        if not is_aligned(spec.k, spec.operands):
            return (replace(known.whole_rows_pointers[0], columns=spec.epilogue.block),)
        return tuple(tiled for tiled in _large(spec, known) if tiled.columns == spec.epilogue.block)
    if spec.n <= 64:
        found = known.small if is_aligned(spec.k, spec.operands) else known.pointers
        return tuple(_narrowed(tiled, spec.n) for tiled in found)
    return _large(spec, known)


def _large(spec: TiledGemm, known: Tilings) -> tuple[Tiling, ...]:
    if not is_aligned(spec.k, spec.operands):
        return known.pointers
    if spec.operands != "e4m3":
        return known.bfloat16
    more = spec.accumulation is Accumulation.FAST and spec.epilogue.is_plain
    return known.e4m3 + (FAST_ONLY if more else ())


def _whole_rows(spec: TiledGemm, known: Tilings) -> tuple[Tiling, ...]:
    if not is_aligned(spec.k, spec.operands):
        return known.whole_rows_pointers
    return known.whole_rows if spec.operands == "e4m3" else known.whole_rows_bfloat16


def _narrowed(tiled: Tiling, columns: int) -> Tiling:
    return replace(tiled, columns=min(tiled.columns, max(padded_width(columns), 16)))


def tiling(spec: GemmSpec, device: DeviceSpec = DEFAULT) -> Tiling:
    """The choice for a spec."""
    return candidates(spec, device)[0]


def most_parts(spec: SplitGemm, tiled: Tiling, device: DeviceSpec = DEFAULT) -> int:
    """In how many parts a contraction is split at most: a power of two that does not overfill the device."""
    share = min(max(device.multiprocessors * tiled.programs // tiles_of(spec, tiled), 1), MOST_PARTS)
    return 1 << (share.bit_length() - 1)


def tiles_of(spec: SplitGemm, tiled: Tiling) -> int:
    """Tiles of the result."""
    return -(-spec.n // tiled.rows) * -(-spec.k // tiled.columns)

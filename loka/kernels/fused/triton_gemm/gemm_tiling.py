"""Tilings of rendered GEMMs on a device, fixed in their text when they are rendered.

The choice depends on N, K, operands, accumulation and epilogue, never on M. Its limits: a block's shared memory holds
`stages` tiles of both operands and the tile of the result that is written; a thread has 255 registers, and each element
of the tile's float32 sum takes one, or two where e4m3 is summed precisely (the tensor core's sum and the float32 one).
So a precise tile has at most 64 elements per thread.
"""

from __future__ import annotations

from dataclasses import replace

from loka.devices.launches import Tiling, Tilings
from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.triton_gemm.gemm_spec import GemmSpec, GroupedGemm, TiledGemm

BYTES = {"e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}
ALIGNMENT = 16  # bytes: of a row for the tensor memory accelerator


def is_aligned(columns: int, dtype: str) -> bool:
    """True if rows of that many elements are aligned for a descriptor."""
    return columns * BYTES[dtype] % ALIGNMENT == 0


def candidates(spec: GemmSpec, device: DeviceSpec = DEFAULT) -> tuple[Tiling, ...]:
    """All tilings that are possible for a spec."""
    known = device.launches.products
    if isinstance(spec, GroupedGemm):
        aligned = all(is_aligned(k, spec.operands) for _, k in spec.shapes)
        widest = max(n for n, _ in spec.shapes)
        return tuple(_narrowed(tiled, widest) for tiled in (known.grouped if aligned else known.grouped_pointers))
    return tuple(tiled for tiled in _tilings(spec, known) if shared_bytes(spec, tiled) <= device.shared_bytes)


def shared_bytes(spec: TiledGemm, tiled: Tiling) -> int:
    """Upper bound of a product's shared memory, bytes: operands and results in flight, and 1 KiB for a norm's sums."""
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
    return known.e4m3 if spec.operands == "e4m3" else known.bfloat16


def _whole_rows(spec: TiledGemm, known: Tilings) -> tuple[Tiling, ...]:
    if not is_aligned(spec.k, spec.operands):
        return known.whole_rows_pointers
    return known.whole_rows if spec.operands == "e4m3" else known.whole_rows_bfloat16


def _narrowed(tiled: Tiling, columns: int) -> Tiling:
    return replace(tiled, columns=min(tiled.columns, max(padded_width(columns), 16)))


def tiling(spec: GemmSpec, device: DeviceSpec = DEFAULT) -> Tiling:
    """The tiling chosen for a spec."""
    return candidates(spec, device)[0]

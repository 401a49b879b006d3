"""A tile of a product in pieces: what each line of the kernel around them reads, so that it defines nothing else.

A tile is one piece, an accumulator of the tiling's rows and columns; where it has to hold rows that are wider, it is
several, side by side. Their vectors (bias, weight) are read one piece after another, and so do not take up registers at
the same time. Names end in _0, _1, ... where there are several.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.launches import Tiling
from loka.errors import InputError
from loka.kernels.fused.triton_gemm.gemm_spec import TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import BYTES, is_aligned
from loka.numerics.enums import Scaling


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """What of a product's text follows from its shape and its tiling."""

    across: int  # tiles in a row of the result
    pieces: int  # accumulators of a tile, each of the tiling's columns
    loads_tma: bool  # whether operands are read by descriptors: their rows are aligned
    stores_tma: bool  # whether the result is written by one
    keeps_tma: bool  # whether the kept product is


def layout(spec: TiledGemm, tiling: Tiling) -> PieceLayout:
    """The layout of a product. 32-bit results are written without a descriptor: a tile of them fills shared memory.

    Raises InputError where the epilogue needs other tiles.
    """
    if spec.epilogue.norm == "block_norm" and tiling.columns != spec.epilogue.block:
        raise InputError(f"a tile of {tiling.columns} columns is not a block of {spec.epilogue.block}")
    out, tiles = BYTES[spec.epilogue.out], -(-spec.n // tiling.columns)
    return PieceLayout(
        across=1 if spec.epilogue.whole_rows else tiles,
        pieces=tiles if spec.epilogue.whole_rows else 1,
        loads_tma=is_aligned(spec.k, spec.operands),
        stores_tma=out < 4 and is_aligned(spec.n, spec.epilogue.out),
        keeps_tma=is_aligned(spec.n, "bfloat16"),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """An accumulator, and the lines that are its own."""

    end: str  # of its names
    masked: bool  # whether it reaches beyond the columns
    mask: str  # of its elements, for a store by pointers
    scales: str  # that multiply its sum
    operand_loads: list[str]
    loads: list[str]  # after the loop
    vector_loads: list[str]  # after the norm's statistics
    store_product: tuple[str, str]  # what stands before and after the value
    store_out: tuple[str, str]


def pieces(spec: TiledGemm, tiling: Tiling, shape: PieceLayout) -> list[Piece]:
    """The pieces of a tile, from left to right."""
    return [_piece(spec, tiling, shape, index) for index in range(shape.pieces)]


def before_loop(spec: TiledGemm, tiling: Tiling, shape: PieceLayout, parts: list[Piece]) -> list[str]:
    """The rows and columns of a tile, where operands are read by pointers."""
    if shape.loads_tma:
        return []
    rows = f"tl.arange(0, {tiling.rows})[:, None] * {spec.k}"
    lines = [*_rows(tiling), f"a_rows = a_ptr + tl.cast(first_row, tl.int64) * {spec.k} + {rows}"]
    for index, part in enumerate(parts):
        lines.append(_column(tiling, shape, index, part.end))
        lines.append(f"b_rows{part.end} = b_ptr + column{part.end}[:, None].to(tl.int64) * {spec.k}")
    return lines


def loads_of_a(spec: TiledGemm, tiling: Tiling, shape: PieceLayout) -> list[str]:
    """One step's elements of a."""
    if shape.loads_tma:
        return ["a = a_desc.load([first_row, first])"]
    return [
        f"element = first + tl.arange(0, {tiling.depth})",
        f"there = (element < {spec.k})[None, :]",
        "a = tl.load(a_rows + element[None, :], mask=valid[:, None] & there, other=0.0)",
    ]


def after_loop(spec: TiledGemm, tiling: Tiling, shape: PieceLayout) -> list[str]:
    """The rows of a tile, where the epilogue reads them, and their scales."""
    rowwise = spec.operands == "e4m3" and spec.scaling_a is Scaling.ROWWISE
    lines = []
    if shape.loads_tma and (rowwise or spec.epilogue.quantise or spec.statistics or _by_pointers(spec, shape)):
        lines += _rows(tiling)
    if _by_pointers(spec, shape):
        lines.append(f"before = tl.cast(first_row, tl.int64) * {spec.n}  # elements, to this tile's first row")
    if rowwise:
        lines.append("scale_a = tl.load(scale_a_ptr + row, mask=valid, other=0.0)")
    return lines


def _piece(spec: TiledGemm, tiling: Tiling, shape: PieceLayout, index: int) -> Piece:
    end = f"_{index}" if shape.pieces > 1 else ""
    last = index == shape.pieces - 1
    masked = last and spec.n % tiling.columns != 0
    mask = f"mask{end}" if masked else "valid[:, None]"
    start = "first_column" if shape.across > 1 else str(index * tiling.columns)
    product = _store("product", "bfloat16", shape.keeps_tma, start, end, mask)
    name = "values" if spec.epilogue.quantise else "out"
    out = _store(name, spec.epilogue.out, shape.stores_tma, start, end, mask)
    zero = f", mask=inside{end}, other=0.0" if masked else ""
    vectors = {
        name: f"{name}{end} = tl.load({name}_ptr + column{end}{zero}).to(tl.float32)"
        for name in ("add", "weight", "bias")
        if getattr(spec.epilogue, name)
    }
    return Piece(
        end=end,
        masked=masked,
        mask=mask,
        scales=_scales(spec, end),
        operand_loads=_loads_of_b(spec, shape, start, end),
        loads=_loads(spec, tiling, shape, index, end, masked, zero)
        + [line for name, line in vectors.items() if name == "add"],
        vector_loads=[line for name, line in vectors.items() if name != "add"],
        store_product=product,
        store_out=out,
    )


def _loads_of_b(spec: TiledGemm, shape: PieceLayout, start: str, end: str) -> list[str]:
    if shape.loads_tma:
        return [f"b{end} = b_desc.load([{start}, first])"]
    mask = f"(column{end} < {spec.n})[:, None] & there"
    return [f"b{end} = tl.load(b_rows{end} + element[None, :], mask={mask}, other=0.0)"]


def _loads(
    spec: TiledGemm, tiling: Tiling, shape: PieceLayout, index: int, end: str, masked: bool, zero: str
) -> list[str]:
    e, offsets = spec.epilogue, _by_pointers(spec, shape)
    rowwise = spec.operands == "e4m3" and spec.scaling_b is Scaling.ROWWISE
    vectors = rowwise or e.add or e.weight or e.bias
    cut = masked and (e.norm == "layer_norm" or (e.quantise and e.activation == "sigmoid"))
    lines = []
    if vectors or offsets or cut:
        if shape.loads_tma:
            lines.append(_column(tiling, shape, index, end))
        if masked:
            lines.append(f"inside{end} = column{end} < {spec.n}")
    if offsets:
        lines.append(f"offsets{end} = tl.arange(0, {tiling.rows})[:, None] * {spec.n} + column{end}[None, :]")
        if masked:
            lines.append(f"mask{end} = valid[:, None] & inside{end}[None, :]")
    if rowwise:
        lines.append(f"scale_b{end} = tl.load(scale_b_ptr + column{end}{zero})")
    return lines


def _by_pointers(spec: TiledGemm, shape: PieceLayout) -> bool:
    """Whether a matrix is written without a descriptor."""
    return not shape.stores_tma or (spec.epilogue.keep and not shape.keeps_tma)


def _rows(tiling: Tiling) -> list[str]:
    return [f"row = first_row + tl.arange(0, {tiling.rows})", "valid = row < m"]


def _column(tiling: Tiling, shape: PieceLayout, index: int, end: str) -> str:
    start = "first_column + " if shape.across > 1 else f"{index * tiling.columns} + " if index else ""
    return f"column{end} = {start}tl.arange(0, {tiling.columns})"


def _scales(spec: TiledGemm, end: str) -> str:
    if spec.operands != "e4m3":
        return ""
    a = "scale_a[:, None]" if spec.scaling_a is Scaling.ROWWISE else "scale_a"
    b = f"scale_b{end}[None, :]" if spec.scaling_b is Scaling.ROWWISE else "scale_b"
    return f"{a} * {b}"


def _store(name: str, dtype: str, tma: bool, start: str, end: str, mask: str) -> tuple[str, str]:
    cast = {"float32": "", "e4m3": ".to(tl.float8e4nv)"}.get(dtype, f".to(tl.{dtype})")
    if tma:
        return f"{name}_desc.store([first_row, {start}], ", f"{cast})"
    return f"tl.store({name}_ptr + before + offsets{end}, ", f"{cast}, mask={mask})"

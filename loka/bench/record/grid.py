"""Which parts are measured for the set that ships: sizes of recommenders, and every power of two around them.

GEMM sizes are products of (rows, columns, contraction) from four families: a cube of powers of two, on which the
crossover map stands; long rows, as fprop and dgrad have; long contractions, as wgrad has; and the odd sizes of known
recommenders. fprop, dgrad and wgrad of all sites share them: which of the three a GEMM is, its sizes do not say.

Counted for an H100, at 10 to 25 ms a part: 1,058 GEMM sizes on seven to eleven kernels and recipes, some on a part of
the sizes only, and 16 producers on 10 widths and 8 to 11 numbers of rows, and on five sizes of wider rows. The largest
products take 12 ms in BF16, so that arithmetic is a small part of it all. Interactions stand in a grid of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from loka.bench.record.gemm_parts import NATIVE, SCALED_MM
from loka.bench.record.interaction_grid import interaction_parts
from loka.errors import InputError
from loka.kernels.fused.norm.norm_widths import LARGEST_HELD
from loka.kernels.measurements.parts import Part, PartKind

Size = tuple[int, int, int]  # rows, columns, contraction

POWERS = tuple(64 << step for step in range(8))  # 64 to 8192
LONG = (16384, 32768, 65536)
LONG_SIDES = POWERS  # of the two short sides beside a long one
ODD_SIDES = (  # the columns and contractions of DCNv2's and DLRM's layers, and their batches
    (512, 3456), (3456, 512), (1024, 3456), (3456, 1024), (3456, 3456), (1024, 480), (480, 1024), (1536, 512),
    (512, 1536), (768, 256), (256, 768), (3072, 768), (768, 3072), (1024, 479), (512, 13), (24, 512),
)  # fmt: skip
ODD_ROWS = (512, 2048, 8192, 32768, 65536)
VAST = ((2048, 1024, 123200), (2048, 123200, 1024), (1024, 123200, 2048), (2048, 1024, 32768), (2048, 32768, 1024))
SPARSE = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # sides of what is measured less often

ROWWISE_PRECISE = "e4m3 rowwise, e4m3 rowwise, precise"
ROWWISE_FAST = "e4m3 rowwise, e4m3 rowwise, fast"
DENSE_RECIPES = (
    ROWWISE_PRECISE,
    ROWWISE_FAST,
    "e4m3 tensorwise, e4m3 tensorwise, precise",
    "e4m3 tensorwise, e4m3 tensorwise, fast",
)
SPARSE_RECIPES = (
    "e4m3 blockwise_1x128, e4m3 blockwise_128x128, precise",
    "e4m3 blockwise_1x128, e4m3 blockwise_1x128, precise",
    "e5m2 rowwise, e4m3 rowwise, precise",
)

WIDTHS = (64, 128, 256, 512, 1024, 2048, 3456, 4096, 8192, 16384)
ROWS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
WIDE = ((1024, 123200), (2048, 123200), (1024, 32768), (2048, 32768), (8192, 32768))  # the widest linears: weights, x
FEW_ROWS = (64, 128, 256)  # of weights; and the map has batches as small
LARGEST_MATRIX = 2**28  # elements
WRITTEN = ("bfloat16", "e4m3 rowwise")
AROUNDS = ("layer_norm", "layer_norm silu", "rms_norm", "block_norm hardswish", "relu", "silu")
BLOCK_NORM = "block_norm hardswish"
QUANTISED = ("e4m3 rowwise", "e4m3 tensorwise", "e4m3 blockwise_1x128", "e5m2 rowwise")
QUANTISED_WIDE = ("e4m3 rowwise", "e5m2 rowwise")  # where a row is taken in chunks
PARTS = tuple(work.value for work in PartKind)


def grid(works: Sequence[str] = PARTS, others: Sequence[str] = ()) -> tuple[Part, ...]:
    """The parts of these kinds of work; `others` are further FP8 kernels with rowwise scales, by their names.

    Raises InputError for an unknown kind.
    """
    for work in works:
        if work not in PARTS:
            raise InputError(f"there are no parts of the kind {work!r}; there are {', '.join(PARTS)}")
    found: list[Part] = []
    if PartKind.GEMM in works:
        found += gemm_parts(others)
    for work in (PartKind.QUANTISE, PartKind.REQUANTIZE_TRANSPOSE, PartKind.FORWARD, PartKind.BACKWARD, PartKind.COPY):
        if work in works:
            found += producer_parts(work)
    found += [part for part in interaction_parts() if part.work in works]
    return tuple(dict.fromkeys(found))


def gemm_sizes() -> tuple[Size, ...]:
    """Every size, once, sorted."""
    cube = set(product(POWERS, POWERS, POWERS))
    rows = {(long, *sides) for long in LONG for sides in product(LONG_SIDES, LONG_SIDES)}
    contractions = {(*sides, long) for long in LONG for sides in product(LONG_SIDES, LONG_SIDES)}
    odd = {
        size
        for rows in ODD_ROWS
        for columns, contraction in ODD_SIDES
        for size in ((rows, columns, contraction), (columns, contraction, rows))
    }
    return tuple(sorted(cube | rows | contractions | odd | set(VAST)))


def gemm_parts(others: Sequence[str]) -> Iterator[Part]:
    """All sizes in BF16, in cuBLASLt's FP8 and on other kernels; sparse ones also in TF32, blockwise and with e5m2."""
    for rows, columns, contraction in gemm_sizes():
        for recipe in DENSE_RECIPES:
            yield Part(PartKind.GEMM, SCALED_MM, rows, columns, contraction, recipe=recipe)
        yield Part(PartKind.GEMM, NATIVE, rows, columns, contraction)
        if all(side in SPARSE for side in (rows, columns, contraction)):
            yield Part(PartKind.GEMM, NATIVE, rows, columns, contraction, dtype="float32")
            for recipe in SPARSE_RECIPES:
                yield Part(PartKind.GEMM, SCALED_MM, rows, columns, contraction, recipe=recipe)
        for kernel in others:
            for recipe in (ROWWISE_PRECISE, ROWWISE_FAST):
                yield Part(PartKind.GEMM, kernel, rows, columns, contraction, recipe=recipe)


def producer_parts(work: PartKind) -> Iterator[Part]:
    """Every width and number of rows that a matrix of LARGEST_MATRIX elements has room for."""
    heights = ROWS if work in (PartKind.FORWARD, PartKind.BACKWARD) else (*FEW_ROWS, *ROWS)
    sizes = [(rows, width) for width in WIDTHS for rows in heights if rows * width <= LARGEST_MATRIX]
    for rows, width in (*sizes, *WIDE):
        for recipe, around in kinds(work, width):
            yield Part(work, "rendered", rows, width, recipe=recipe, around=around)


def kinds(work: PartKind, width: int) -> Iterator[tuple[str, str]]:
    """What is written, and what stands around, for the parts of one width."""
    if work is PartKind.REQUANTIZE_TRANSPOSE:
        yield "e4m3 tensorwise", ""
    elif work is PartKind.COPY:
        yield "bfloat16", ""
    elif work is PartKind.QUANTISE:
        yield from ((recipe, "") for recipe in (QUANTISED if width <= LARGEST_HELD else QUANTISED_WIDE))
    else:
        for around in AROUNDS:
            if around != BLOCK_NORM or width % 256 == 0:
                yield from ((recipe, around) for recipe in WRITTEN)

"""The parts measured for the shipped set: sizes of recommenders, and the powers of two around them.

GEMM sizes (rows, columns, contraction) come from four families: a cube of powers of two, which the crossover map
uses; long rows, as in fprop and dgrad; long contractions, as in wgrad; and the odd sizes of known recommenders. A
size is measured once, whether it is used by fprop, dgrad or wgrad.

On an H100, at 10 to 25 ms a part: 1,058 GEMM sizes on seven to eleven kernels and recipes, some of them on part of the
sizes only, and 16 producers on 10 widths, 8 to 11 numbers of rows, and five sizes of wider rows. The largest products
take 12 ms in BF16, so arithmetic is a small share of the total.

The interactions are those of the zoo's models, and a few similar ones. torch.compile recompiles for each number of
samples, which takes most of the time, so it gets fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from loka.bench.record.gemm_parts import NATIVE, SCALED_MM
from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD
from loka.kernels.measurements.interaction_forms import ConcatNormForm, DotForm, FmForm, Form, parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part, PartKind

Size = tuple[int, int, int]  # rows, columns, contraction

POWERS = tuple(64 << step for step in range(8))  # 64 to 8192
LONG = (16384, 32768, 65536)
LONG_SIDES = POWERS  # sizes of the two short sides beside a long one
ODD_SIDES = (  # columns and contractions of the layers of DCNv2 and DLRM
    (512, 3456), (3456, 512), (1024, 3456), (3456, 1024), (3456, 3456), (1024, 480), (480, 1024), (1536, 512),
    (512, 1536), (768, 256), (256, 768), (3072, 768), (768, 3072), (1024, 479), (512, 13), (24, 512),
)  # fmt: skip
ODD_ROWS = (512, 2048, 8192, 32768, 65536)
VAST = ((2048, 1024, 123200), (2048, 123200, 1024), (1024, 123200, 2048), (2048, 1024, 32768), (2048, 32768, 1024))
SPARSE = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # sides for the less common recipes and dtypes

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
WIDE = ((1024, 123200), (2048, 123200), (1024, 32768), (2048, 32768), (8192, 32768))  # weights and x of wide linears
FEW_ROWS = (64, 128, 256)  # of weights; the crossover map has such small batches too
LARGEST_MATRIX = 2**28  # elements
WRITTEN = ("bfloat16", "e4m3 rowwise")
AROUNDS = ("layer_norm", "layer_norm silu", "rms_norm", "block_norm hardswish", "relu", "silu")
BLOCK_NORM = "block_norm hardswish"
QUANTIZED = ("e4m3 rowwise", "e4m3 tensorwise", "e4m3 blockwise_1x128", "e5m2 rowwise")
QUANTIZED_WIDE = ("e4m3 rowwise", "e5m2 rowwise")  # for rows that are processed in chunks
PARTS = tuple(work.value for work in PartKind)


def grid(works: Sequence[str] = PARTS, others: Sequence[str] = ()) -> tuple[Part, ...]:
    """The parts of these kinds of work; `others`: names of further FP8 kernels with rowwise scales.

    Raises InputError for an unknown kind.
    """
    for work in works:
        if work not in PARTS:
            raise InputError(f"there are no parts of the kind {work!r}; there are {', '.join(PARTS)}")
    found: list[Part] = []
    if PartKind.GEMM in works:
        found += gemm_parts(others)
    for work in (PartKind.QUANTIZE, PartKind.REQUANTIZE_TRANSPOSE, PartKind.FORWARD, PartKind.BACKWARD, PartKind.COPY):
        if work in works:
            found += producer_parts(work)
    found += [part for part in interaction_parts() if part.work in works]
    return tuple(dict.fromkeys(found))


def gemm_sizes() -> tuple[Size, ...]:
    """Every GEMM size once, sorted."""
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
    """All sizes in BF16, in cuBLASLt's FP8 and on other kernels; SPARSE sizes also in TF32, blockwise and e5m2."""
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
    """Every width and number of rows with at most LARGEST_MATRIX elements, and the sizes of WIDE."""
    heights = ROWS if work in (PartKind.FORWARD, PartKind.BACKWARD) else (*FEW_ROWS, *ROWS)
    sizes = [(rows, width) for width in WIDTHS for rows in heights if rows * width <= LARGEST_MATRIX]
    for rows, width in (*sizes, *WIDE):
        for recipe, around in kinds(work, width):
            yield Part(work, "rendered", rows, width, recipe=recipe, around=around)


def kinds(work: PartKind, width: int) -> Iterator[tuple[str, str]]:
    """Pairs of (recipe, norm and activation) that are measured for one width."""
    if work is PartKind.REQUANTIZE_TRANSPOSE:
        yield "e4m3 tensorwise", ""
    elif work is PartKind.COPY:
        yield "bfloat16", ""
    elif work is PartKind.QUANTIZE:
        yield from ((recipe, "") for recipe in (QUANTIZED if width <= LARGEST_HELD else QUANTIZED_WIDE))
    else:
        for around in AROUNDS:
            if around != BLOCK_NORM or width % 256 == 0:
                yield from ((recipe, around) for recipe in WRITTEN)


SAMPLES = (256, 1024, 4096, 16384, 32768)  # of our kernels
COMPILED_SAMPLES = (4096, 16384)
COMPILED_SMALL = (256, *COMPILED_SAMPLES)  # for samples of up to SMALL elements
SMALL = 512  # elements of a sample of an FM interaction or a concat norm
LARGEST_SAMPLES = 2**28  # most elements of all samples together

# Embeddings, dimension, rank, weighted sums of FM interactions: of wukong_small, wukong_large, the rankers on embedded
# clicks and on MovieTweetings, then others. A Wukong layer has a residual, whose gradient its backward adds.
MIXES = (
    (64, 128, 32, 32), (128, 256, 64, 64), (16, 32, 8, 8), (12, 32, 8, 6),
    (32, 64, 16, 16), (32, 128, 16, 16), (96, 64, 24, 24), (64, 128, 32, 0), (26, 64, 16, 0),
)  # fmt: skip
# Rows of each part of a concat norm, and their width: of the same models, then a norm of one tensor and a residual.
JOINS = (((32, 32), 128), ((64, 64), 256), ((8, 8), 32), ((6, 6), 32), ((16, 16), 64), ((64,), 128))
# Norm, and whether it has weight and bias: a layer_norm with both; an rms_norm over the whole row with none.
JOINED_NORMS = (("layer_norm", True), ("rms_norm", False))
# Embeddings and dimension of dot interactions: of MLPerf's DLRM and its kind, and of few short ones.
DOTS = ((27, 128), (27, 64), (27, 16), (9, 64), (40, 128), (64, 64), (101, 128))


def interaction_parts() -> Iterator[Part]:
    """Forward and backward of each interaction, on our kernels and compiled."""
    for embeddings, dim, rank, sums in MIXES:
        form = FmForm(embeddings, rank, sums, passing=sums > 0)
        yield from _sizes(form, dim, embeddings * dim)
    for rows, width in JOINS:
        for norm, affine in JOINED_NORMS:
            yield from _sizes(ConcatNormForm(rows, True, norm, affine, affine), width, sum(rows) * width)
    for embeddings, dim in DOTS:
        yield from _sizes(DotForm(embeddings), dim, embeddings * dim)


def _sizes(form: Form, columns: int, elements: int) -> Iterator[Part]:
    """The parts of one form for each number of samples within LARGEST_SAMPLES; `elements`: of one sample."""
    compiled_samples = COMPILED_SMALL if elements <= SMALL else COMPILED_SAMPLES
    for samples in SAMPLES:
        if samples * elements <= LARGEST_SAMPLES:
            yield from parts_of(form, samples, columns, RENDERED)
            if samples in compiled_samples:
                yield from parts_of(form, samples, columns, COMPILED)

"""The interactions measured for the shipped set: those of the zoo's models, and a few similar ones.

torch.compile recompiles for each number of samples, which takes most of the time, so it gets fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from loka.kernels.measurements.interaction_forms import ConcatNormForm, CrossForm, FmForm, Form, parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part

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
NORMS = (("layer_norm", True), ("rms_norm", False))
WIDTHS = (256, 479, 512, 1024, 3456)  # of cross layers
COMPILED_WIDTHS = (512, 3456)
# The first of several cross layers, those between, and the last.
CROSSES = (CrossForm(True, True, True), CrossForm(True, False, True), CrossForm(True, False))


def interaction_parts() -> Iterator[Part]:
    """Forward and backward of each interaction, on our kernels and compiled."""
    for embeddings, dim, rank, sums in MIXES:
        form = FmForm(embeddings, rank, sums, passing=sums > 0)
        yield from _sizes(form, dim, embeddings * dim, compiled=True)
    for rows, width in JOINS:
        for norm, affine in NORMS:
            yield from _sizes(ConcatNormForm(rows, True, norm, affine, affine), width, sum(rows) * width, compiled=True)
    for width in WIDTHS:
        for cross in CROSSES:
            yield from _sizes(cross, width, width, compiled=width in COMPILED_WIDTHS)


def _sizes(form: Form, columns: int, elements: int, compiled: bool) -> Iterator[Part]:
    """The parts of one form for each number of samples within LARGEST_SAMPLES; `elements`: of one sample."""
    small = elements <= SMALL and not isinstance(form, CrossForm)
    compiled_samples = COMPILED_SMALL if small else COMPILED_SAMPLES
    for samples in SAMPLES:
        if samples * elements <= LARGEST_SAMPLES:
            yield from parts_of(form, samples, columns, RENDERED)
            if compiled and samples in compiled_samples:
                yield from parts_of(form, samples, columns, COMPILED)

"""Which interactions are measured for the set that ships: those of the zoo's models, and a few around them.

torch.compile is asked anew for each number of samples, which takes longer than all else: it has fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from loka.kernels.measurements.interaction_forms import ConcatNormForm, CrossForm, FmForm, Form, parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part

SAMPLES = (256, 1024, 4096, 16384, 32768)  # of our kernels
COMPILED_SAMPLES = (4096, 16384)
COMPILED_SMALL = (256, *COMPILED_SAMPLES)  # where a sample is so small
SMALL = 512  # elements, of a mixing layer or a join
LARGEST_SAMPLES = 2**28  # elements of all samples together

# Embeddings, dimension, rank, weighted sums: of wukong_small, wukong_large, the rankers on embedded clicks and on
# MovieTweetings, then others. A Wukong layer adds its samples to what it made, which then passes a gradient on.
MIXES = (
    (64, 128, 32, 32), (128, 256, 64, 64), (16, 32, 8, 8), (12, 32, 8, 6),
    (32, 64, 16, 16), (32, 128, 16, 16), (96, 64, 24, 24), (64, 128, 32, 0), (26, 64, 16, 0),
)  # fmt: skip
# Rows of each part, their width: of the same models, then a norm of one tensor and a residual.
JOINS = (((32, 32), 128), ((64, 64), 256), ((8, 8), 32), ((6, 6), 32), ((16, 16), 64), ((64,), 128))
# A layer_norm with both parameters; a norm of blocks that is over the whole row has none.
NORMS = (("layer_norm", True), ("rms_norm", False))
WIDTHS = (256, 479, 512, 1024, 3456)  # of cross layers
COMPILED_WIDTHS = (512, 3456)
# The first of several layers, those behind it, and the last.
CROSSES = (CrossForm(True, True, True), CrossForm(True, False, True), CrossForm(True, False))


def interaction_parts() -> Iterator[Part]:
    """Forward and gradients of each, on our kernels and compiled."""
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
    """All numbers of samples of so many elements that there is room for."""
    small = elements <= SMALL and not isinstance(form, CrossForm)
    compiled_samples = COMPILED_SMALL if small else COMPILED_SAMPLES
    for samples in SAMPLES:
        if samples * elements <= LARGEST_SAMPLES:
            yield from parts_of(form, samples, columns, RENDERED)
            if compiled and samples in compiled_samples:
                yield from parts_of(form, samples, columns, COMPILED)

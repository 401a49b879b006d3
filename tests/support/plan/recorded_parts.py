"""Parts of every kind that a recording measures, and interactions of every form, small."""

from __future__ import annotations

from loka.bench.record.grid import kinds
from loka.kernels.measurements.interaction_forms import ConcatNormForm, FmForm, Form
from loka.kernels.measurements.parts import Part, PartKind

WIDTH = 256
SIZES = ((512, 512, 512), (2048, 512, 512))  # the second is one of our own products, too
OTHERS = (PartKind.QUANTIZE, PartKind.REQUANTIZE_TRANSPOSE, PartKind.FORWARD, PartKind.BACKWARD, PartKind.COPY)
USUAL = tuple(
    Part(work, "rendered", 96, WIDTH, recipe=recipe, around=around)
    for work in OTHERS
    for recipe, around in kinds(work, WIDTH)
)
PARTS = (
    *USUAL,
    Part(PartKind.FORWARD, "rendered", 96, WIDTH, dtype="float32", recipe="e4m3 rowwise", around="layer_norm"),
    Part(PartKind.QUANTIZE, "rendered", 96, WIDTH, recipe="e5m2 rowwise"),
    Part(PartKind.COPY, "rendered", 96, WIDTH, dtype="float32", recipe="bfloat16"),
    Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", 90, WIDTH, recipe="e4m3 tensorwise"),  # copies have zeros behind
)
FORMS: tuple[tuple[Form, int], ...] = (
    (FmForm(16, 8, 6, passing=True), 32),
    (FmForm(16, 8, 0), 32),
    (ConcatNormForm((6, 10), True, "layer_norm", True, True), 32),
    (ConcatNormForm((5, 3, 1), False, "rms_norm", False, False), 24),
    (ConcatNormForm((7,), True, "rms_norm", True, True), 24),
)

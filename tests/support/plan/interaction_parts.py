"""Interactions of every form, small."""

from __future__ import annotations

from loka.kernels.measurements.interaction_forms import ConcatNormForm, CrossForm, FmForm, Form

FORMS: tuple[tuple[Form, int], ...] = (
    (FmForm(16, 8, 6, passing=True), 32),
    (FmForm(16, 8, 0), 32),
    (ConcatNormForm((6, 10), True, "layer_norm", True, True), 32),
    (ConcatNormForm((5, 3, 1), False, "rms_norm", False, False), 24),
    (ConcatNormForm((7,), True, "rms_norm", True, True), 24),
    (CrossForm(True, True, True), 48),
    (CrossForm(True, False), 48),
    (CrossForm(False, False, True), 48),
)

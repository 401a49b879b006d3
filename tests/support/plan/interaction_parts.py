"""Interactions of every form, small."""

from __future__ import annotations

from loka.kernels.measurements.interaction_forms import Crossing, Form, Joining, Mixing

FORMS: tuple[tuple[Form, int], ...] = (
    (Mixing(16, 8, 6, passing=True), 32),
    (Mixing(16, 8, 0), 32),
    (Joining((6, 10), True, "layer_norm", True, True), 32),
    (Joining((5, 3, 1), False, "rms_norm", False, False), 24),
    (Joining((7,), True, "rms_norm", True, True), 24),
    (Crossing(True, True, True), 48),
    (Crossing(True, False), 48),
    (Crossing(False, False, True), 48),
)
